"""Whole jobs link by link: what each worker sends goes over the links of a network, which several may share.

`programs.py` writes down what each worker does, `connections.py` the links that it uses for that, `quotient.py` which
workers are alike, and `simulation.py` runs one of each. docs/whole_jobs.md explains the model.
"""
