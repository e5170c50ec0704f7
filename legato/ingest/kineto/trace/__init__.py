"""What a file of the profiler says: `events` reads those of one step into `columns`, and `activities` tells
computations from collectives."""
