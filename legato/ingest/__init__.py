"""Floor 1: foreign traces become a `Workload`, and the times in them a measured `Timeline`.

`kineto` reads traces of the PyTorch profiler, `execution_trace` joins them with
PyTorch execution traces, `chakra` reads and writes MLCommons Chakra, and
`send_trace` the CSV traces of the Network Operator Edition. All importers fill
in the values of `traced`, from which `assemble` builds the workload.
"""
