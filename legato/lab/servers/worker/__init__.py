"""The workers' side: pushes (`worker.py`) and pulls (`puller.py`).

`arrivals.py` observes the order in which transfers arrive, and `changes.py` detects what a training script changes
between pushes and pulls.
"""
