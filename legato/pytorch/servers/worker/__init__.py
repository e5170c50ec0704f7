"""The workers' side: pushes (`worker.py`) and pulls (`puller.py`).

`arrivals.py` observes the order in which transfers arrive, and `changes.py` what a training script changes in between.
"""
