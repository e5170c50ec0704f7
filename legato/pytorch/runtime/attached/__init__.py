"""legato attached to the user's DDP and optimizer: it decides which plan runs, or DDP."""
