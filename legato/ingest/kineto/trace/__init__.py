"""Read profiler files: `events` reads a step into `columns`; `activities` separates computations and collectives."""
