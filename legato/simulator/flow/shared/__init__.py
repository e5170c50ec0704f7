"""Several jobs on one network.

`placement.py` places the jobs, `jobs.py` simulates how they slow each other down, and `phases.py` finds when each job
should begin.
"""
