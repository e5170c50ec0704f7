"""Traces of the PyTorch profiler (Kineto).

`importer` is the entry and reads like a table of contents. `trace/` reads the file; `phases`, `step` and `gradients`
find out what one step of one rank computed and sent.
"""
