"""Read profiler files: `events` stores a step in `columns`; `activities` separates computations and collectives."""
