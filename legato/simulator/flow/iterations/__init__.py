"""The iterations of one job as a graph.

`compute.py` describes each worker's computation, and `unroll.py` builds the graph of computation and messages. `run.py`
runs the graph, and `result.py` reads the result.
"""
