"""The scheduler `legato`, and what it searches with."""
