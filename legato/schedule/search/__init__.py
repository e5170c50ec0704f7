"""The scheduler `legato`, and the parts of its search."""
