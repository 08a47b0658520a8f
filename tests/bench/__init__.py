"""``make bench``: measurements. They print a table and ``artifacts/bench.json``, and never fail on time."""
