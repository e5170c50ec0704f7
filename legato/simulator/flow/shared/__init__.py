"""Several jobs on one network: where they are (`placement.py`), what they do to one another (`jobs.py`), and when each
of them had better begin (`phases.py`)."""
