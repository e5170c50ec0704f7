"""legato attached to the user's DDP and optimizer: decides whether DDP or a plan runs, and which plan."""
