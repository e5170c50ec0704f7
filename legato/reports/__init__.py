"""Floor 1: pictures of timelines and plans.

`html` writes a report, one self-contained page with the tables and figures of
workloads (`sections`, `schedulers`, `timelines`, `workloads`, `idle`) and of
sweeps (`sweeps`). `perfetto` writes timelines as a Chrome trace. `doubts` finds
reasons not to trust a measurement.
"""
