"""The engine of all simulators: a cloud's machines, lives, bill and faults, without a protocol.

A simulator (``providers/<cloud>/simulator.py``, the only importer) adds the protocol of its cloud. State is
on disk before any answer leaves, so that SIGKILL of a simulator loses nothing that it ever said.
"""
