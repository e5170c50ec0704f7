"""A profiler's file: `events` reads a step into `columns`, `activities` tells computations from collectives."""
