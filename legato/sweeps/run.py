"""Run the unfinished cells of a grid, and return its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from importlib import import_module
from typing import TypeVar

from legato.core import files
from legato.core.axes import SERVERS, SWEPT
from legato.core.results import Results
from legato.reports.model import SweepRow
from legato.sweeps.cell import Outcome, run_cell
from legato.sweeps.grid import Cell, Grid
from legato.sweeps.journal import Journal
from legato.sweeps.parallel import in_parallel

__all__ = ["outcomes", "sweep"]


def sweep(
    grid: Grid,
    *,
    journal: Journal | None = None,
    jobs: int | None = None,
    dask: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Results[SweepRow]:
    """Simulate every cell of a grid, and return one row per cell in the order of the grid.

    Cells in the journal do not run again. A cell that runs is stored in the journal
    as soon as it is done. Cells run on `jobs` cores of this machine (None: all), or on the Dask cluster whose
    scheduler has the address `dask`. `progress(done, total)` is called as cells finish. A cell that fails is a row with
    an error. Raises `InputError` if the cluster cannot be used, or if links are to be simulated and numba is missing.
    """
    cells = grid.cells()
    by_id = {files.identity(job): job for job in grid.workloads}
    work = [(cell, (by_id[cell.inputs[0]], *grid.parts(cell))) for cell in cells]
    done = outcomes(work, run_cell, grid.fidelity, journal=journal, jobs=jobs, dask=dask, progress=progress)
    return _rows(grid, cells, done)


T = TypeVar("T")


def outcomes(
    work: Sequence[tuple[Cell, T]],
    run: Callable[[Cell, T], Outcome],
    fidelity: str,
    *,
    journal: Journal | None,
    jobs: int | None,
    dask: str | None,
    progress: Callable[[int, int], object] | None,
) -> dict[str, Outcome]:
    """Return the outcomes of cells by key, from the journal or from `run(cell, input of the cell)`.

    The other arguments and the errors are the same as in `sweep`.
    """
    if fidelity != "formulas":
        import_module("legato.simulator.flow.engine.loop")  # an `InputError` where numba is not installed
    done = {} if journal is None else journal.done
    todo = {cell.key: (cell, item) for cell, item in work if cell.key not in done}
    total = len(work)
    finished = total - len(todo)
    if progress:
        progress(finished, total)
    with closing(in_parallel(partial(_run, run), list(todo.items()), jobs, dask)) as results:
        for key, outcome in results:
            if journal is None:
                done[key] = outcome
            else:
                journal.add(key, outcome)
            finished += 1
            if progress:
                progress(finished, total)
    return done


def _run(run: Callable[[Cell, T], Outcome], todo: tuple[str, tuple[Cell, T]]) -> tuple[str, Outcome]:
    key, (cell, item) = todo
    return key, run(cell, item)


def _rows(grid: Grid, cells: list[Cell], done: dict[str, Outcome]) -> Results[SweepRow]:
    label = _labels(grid)
    found = [(cell, done[cell.key]) for cell in cells]
    first = _series(cells[0])
    # A cell without servers is compared with the baseline of the first number of servers, if there is one.
    servers = cells[0].axes[SERVERS.field]
    base = {_network(cell): out.iteration_s for cell, out in found if _series(cell) == first}
    rows = []
    for cell, out in found:
        values = cell.axes
        base_s = base[_network(cell, (values[SERVERS.field] or servers) if servers else 0)]
        rows.append(
            SweepRow(
                workload=label[cell.inputs[0]],
                **{name: cell.settings[name] for name in ("fabric", "scheduler", "fidelity")},
                axes={axis.field: values[axis.field] for axis in SWEPT},
                iteration_s=out.iteration_s,
                speedup=base_s / out.iteration_s if base_s and out.iteration_s else None,
                lower_bound_s=out.lower_bound_s,
                gap=out.iteration_s / out.lower_bound_s - 1 if out.iteration_s and out.lower_bound_s else None,
                overlap=out.overlap,
                utilization=out.utilization,
                num_messages=out.num_messages,
                wall_s=out.wall_s,
                error=out.error,
            )
        )
    return Results(rows)


def _series(cell: Cell) -> tuple[str, str]:
    return cell.settings["fabric"], cell.settings["scheduler"]


def _network(cell: Cell, servers: int | None = None) -> tuple[object, ...]:
    """Return the workload and the network that a cell shares with its baseline; `servers` replaces its servers."""
    return cell.inputs[0], *(cell.axes if servers is None else cell.axes | {SERVERS.field: servers}).values()


def _labels(grid: Grid) -> dict[str, str]:
    """Return the workloads' names by id; names that several workloads share are made unique."""
    names = {files.identity(job): job.name for job in grid.workloads}
    every = list(names.values())
    return {job: name if every.count(name) == 1 else f"{name} ({job[:6]})" for job, name in names.items()}
