"""Import of traces of the PyTorch profiler (Kineto).

`importer` is the entry point and reads like a table of contents. `trace/` reads the file. `phases`, `step` and
`gradients` find out what one rank computed and sent in one step.
"""
