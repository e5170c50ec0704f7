"""What every scheduler starts from: ready order, heads and tails, Jackson's rule, orders of computation."""
