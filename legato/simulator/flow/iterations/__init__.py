"""The iterations of one job as a graph.

Each worker's computation (`compute.py`) and its messages become a graph (`unroll.py`). `run.py` runs the graph, and
`result.py` reads the result.
"""
