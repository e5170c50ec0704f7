"""Several jobs on one network: where they are (`placement.py`), what they do to one another (`jobs.py`), and when each
should begin (`phases.py`)."""
