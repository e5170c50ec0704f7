"""Plans that send messages in two halves: sharded plans, and plans with few messages."""
