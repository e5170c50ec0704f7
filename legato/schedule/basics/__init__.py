"""The common basis of all schedulers: ready order, heads and tails, Jackson's rule, orders of computation."""
