"""The parts that all schedulers share: the ready order, heads and tails, Jackson's rule, orders of computation."""
