"""Watches -> rows: NodeClaims and CloudPodBindings, kept for people and reports."""
