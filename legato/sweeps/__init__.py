"""Sweeps: grids of simulations on all cores or on a cluster of machines. An interrupted sweep can be continued.

A *grid* (`grid.py`) is every combination of workloads, fabrics, schedulers and machines. A *cell* is one combination,
which is simulated independently (`cell.py`). `run.py` runs the cells that are not yet in the *journal*
(`journal.py`), on the cores that `parallel.py` provides. `table.py` writes the rows. Grids of whole jobs combine jobs
and networks only (`jobs.py`).
"""

from __future__ import annotations

from legato.sweeps.grid import Cell, Fidelity, Grid
from legato.sweeps.jobs import JobResults, JobRow, sweep_jobs
from legato.sweeps.run import sweep
from legato.sweeps.table import write_rows

__all__ = ["Cell", "Fidelity", "Grid", "JobResults", "JobRow", "sweep", "sweep_jobs", "write_rows"]
