"""Floor 3: grids of simulations, on all cores or on a cluster of machines, that can be interrupted.

A *grid* (`grid.py`) is every combination of workloads, fabrics, schedulers and
machines; a *cell* is one of them, and is run by itself (`cell.py`). `run.py`
runs those that are not yet in the *journal* (`journal.py`), on whatever
`parallel.py` finds; `table.py` writes the rows.
"""

from __future__ import annotations

from legato.sweep.grid import Cell, Fidelity, Grid
from legato.sweep.run import sweep
from legato.sweep.table import write_rows

__all__ = ["Cell", "Fidelity", "Grid", "sweep", "write_rows"]
