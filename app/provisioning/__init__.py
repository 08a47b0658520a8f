"""The crash-safe life of one claim's machine. Knows no Kubernetes: the claim is reached through a port."""
