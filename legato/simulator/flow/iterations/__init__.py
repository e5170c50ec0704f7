"""The iterations of one job: each worker's computation (`compute.py`) and the messages around it become a graph
(`unroll.py`), which is run (`run.py`) and read (`result.py`)."""
