"""The thin Kubernetes layer: one HTTP session, plain dicts, and the few patterns every controller needs.

Nothing in this room knows what Nebula is for. Objects are the dicts that the API server sent, without
``managedFields``; durations are seconds; every request has a time-out.
"""
