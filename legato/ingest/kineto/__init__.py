"""Traces of the PyTorch profiler (Kineto).

`importer` is the entry and reads like a table of contents. `events` reads the
file into `columns`; `activities`, `phases`, `step` and `gradients` find out what
one step of one rank computed and sent.
"""
