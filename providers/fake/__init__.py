"""A cloud that does not exist: an adapter, and a simulator with a plain HTTP API that it talks to."""
