"""Judges what the clouds show: which machine has no owner, what may be done about it, and the trail of it."""
