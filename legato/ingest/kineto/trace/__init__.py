"""A file of the profiler: `events` reads one step's events into `columns`, and `activities` tells computations from
collectives."""
