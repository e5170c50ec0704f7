"""What is attached to the user's DDP and optimizer, and decides which plan runs, or DDP."""
