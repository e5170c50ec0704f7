"""The side of the workers: what they push (`worker.py`) and pull (`puller.py`), in which order transfers arrive
(`arrivals.py`), and what a training script changes in between (`changes.py`)."""
