"""From a gated Pod to a claim on one candidate, and the lifted gate. The ranking is pure."""
