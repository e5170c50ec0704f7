"""Parameters that wait for their updates: the buckets of their gradients, the recorded updates, and their readers."""
