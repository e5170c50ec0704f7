"""Several jobs on one network: `placement.py` places them, and `jobs.py` simulates how they slow each other down."""
