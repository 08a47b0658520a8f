"""From the facts of runs to money: segments, adjustments, prices, bills, budgets. Design section 10."""
