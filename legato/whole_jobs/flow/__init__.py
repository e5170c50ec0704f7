"""Whole jobs link by link: communications cross the links of a network, and share links that they cross together.

`programs.py` writes the actions of each worker, and `connections.py` finds the links that communications use.
`quotient.py` finds workers that are alike, and `simulation.py` simulates one worker of each class. docs/whole_jobs.md
explains the model.
"""
