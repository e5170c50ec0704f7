"""Plans whose messages are sent in two halves: sharded ones, and those with few messages."""
