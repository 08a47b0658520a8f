"""``make demo``: the product on a bare machine, in plain words and real kubectl output."""
