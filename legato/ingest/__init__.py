"""Floor 1: traces that others made become a `Workload`, and what they measured a `Timeline`."""
