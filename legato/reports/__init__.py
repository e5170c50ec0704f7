"""Pictures of timelines and plans (this package is on floor 1 in the table of imports in docs/design.md).

`html` writes a report, one self-contained page with the tables and figures of
workloads (`sections`, `schedulers`, `timelines`, `workloads`, `idle`) and of
sweeps (`sweeps`). `perfetto` writes timelines as a Chrome trace. `doubts` finds
reasons not to trust a measurement.
"""
