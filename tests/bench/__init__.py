"""Measurements. They print tables and ratios and never fail on time."""
