"""The Nebula controller: one process a replica. `docs/architecture.md` has the map of the rooms."""
