"""The ways to a rented machine, and what is kept of its output when it goes."""
