"""Sweeps of whole jobs: the predicted step of each job on every combination of networks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from legato.core import files
from legato.core.axes import NETWORK
from legato.core.errors import InputError
from legato.core.job import Job
from legato.core.table import Column, Table
from legato.reports.model import BreakdownChart, ModelReport
from legato.simulator.flow import Network
from legato.sweeps.cell import Outcome, attempt
from legato.sweeps.grid import Cell
from legato.sweeps.journal import Journal
from legato.sweeps.results import Swept, failures
from legato.sweeps.run import outcomes
from legato.whole_jobs.flow.step import FlowStep, network_of, simulate
from legato.whole_jobs.step import Step, predict, waits
from legato.whole_jobs.told import DRAWN, breakdown, caveats
from legato.zoo.presets import with_links

__all__ = ["JobResults", "JobRow", "on_network", "step_on", "sweep_jobs"]

#: The largest number of cells: a prediction of a large job takes 0.1 s, and a simulation takes seconds.
_MOST_CELLS = 10_000


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """The result for a job on one network; `axes` has the values of the sweep's axes by field.

    The step takes `step_s` seconds, which is the sum of its `parts` (`Step.parts`). `speedup` is relative to the job's
    first network that has a result. Without a result, the fields for numbers are None or empty, and `error` says why.
    """

    job: str
    axes: dict[str, Any]
    step_s: float | None
    speedup: float | None
    tokens_per_s: float | None
    utilization: float | None
    parts: dict[str, float]
    error: str | None

    @property
    def columns(self) -> dict[str, Any]:
        """Return the row as `legato sweep --json` prints it, with each axis and each part as a field."""
        found = msgspec.structs.asdict(self)
        job, axes, parts = (found.pop(name) for name in ("job", "axes", "parts"))
        return {"job": job, **axes, **found, **{f"{part}_s": seconds for part, seconds in parts.items()}}


class JobResults(Swept[JobRow]):
    """The rows of a sweep of whole jobs by a fidelity; `jobs` has the jobs by name."""

    def __init__(self, rows: Iterable[JobRow], jobs: Mapping[str, Job], fidelity: str) -> None:
        super().__init__(rows)
        self.jobs, self._fidelity = jobs, fidelity

    @property
    def same(self) -> str:
        """Return in words the values that all rows have in common."""
        return "".join(f", {words}" for words in [*self.in_common(), f"by {self._fidelity}"])

    def table(self, title: str = "", job: str | None = None) -> Table:
        """Return a table of the rows, or of the rows of one job."""
        columns = [
            *([Column("job", "job")] if job is None else []),
            *self.columns(),
            Column("step", "step_s", missing="failed"),
            Column("speedup over the first", "speedup"),
            Column("utilization", "utilization"),
            Column("waits for", lambda row: waits(row.parts) if row.parts else ""),
        ]
        return Table(title, [row for row in self if job in (None, row.job)], columns)

    def sections(self) -> tuple[ModelReport, ...]:
        """Return a section of a page for each job: a chart with the parts of its step on each network, and a table."""
        return tuple(self._section(name, job) for name, job in self.jobs.items())

    def _section(self, name: str, job: Job) -> ModelReport:
        bars = [
            breakdown(
                ", ".join(axis.say(axis.write(row.axes[axis.field])) for axis in self.differing) or "the network",
                row.parts,
                note=f"{row.speedup:.2f}x",
            )
            for row in self
            if row.job == name and row.step_s is not None
        ]
        hint = f"{DRAWN} The time of each step is followed by the speedup over the first one."
        charts = (BreakdownChart(f"The step on each network{self.same}", hint, tuple(bars)),) if bars else ()
        told = (self.table("networks: predicted", name), *failures(row for row in self if row.job == name))
        return ModelReport(str(job), told=told, asides=tuple(caveats(predict(job))), breakdowns=charts)


def sweep_jobs(
    named: Mapping[str, Job],
    axes: Mapping[str, Sequence[Any]],
    fidelity: Literal["formulas", "flows"],
    *,
    journal: Journal | None = None,
    jobs: int | None = None,
    dask: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> JobResults:
    """Predict the step of every named job on every network; the last axis of the networks changes fastest.

    `axes` has, by field, the values of axes of links (`core/axes.py`). With the fidelity `flows`, axes of switches are
    allowed as well. The other arguments, and errors, are as in `sweep`. Raises `InputError` on numbers outside their
    range, and on more than ten thousand cells.
    """
    networks = [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())]
    if len(named) * len(networks) > _MOST_CELLS:
        raise InputError(f"{len(named) * len(networks):,} cells (expected at most {_MOST_CELLS:,})")
    ids = {name: files.identity(job) for name, job in named.items()}
    how = {"fidelity": fidelity}
    cells = [(name, Cell(inputs=(ids[name],), settings=how, axes=axes)) for name in named for axes in networks]
    work = [(cell, named[name]) for name, cell in cells]
    for cell, job in work:
        on_network(job, cell.axes, cell.settings["fidelity"])
    done = outcomes(work, _run, fidelity, journal=journal, jobs=jobs, dask=dask, progress=progress)
    first_s: dict[str, float] = {}
    rows: list[JobRow] = []
    for name, cell in cells:
        found = done[cell.key]
        step_s = found.iteration_s
        rows.append(
            JobRow(
                job=name,
                axes=cell.axes,
                step_s=step_s,
                speedup=first_s.setdefault(name, step_s) / step_s if step_s else None,
                tokens_per_s=named[name].tokens / step_s if step_s else None,
                utilization=found.utilization,
                parts=found.parts,
                error=found.error,
            )
        )
    return JobResults(rows, named, fidelity)


def _run(cell: Cell, job: Job) -> Outcome:
    def simulated() -> dict[str, Any]:
        step, _ = step_on(*on_network(job, cell.axes, cell.settings["fidelity"]))
        return {"iteration_s": step.seconds, "utilization": step.utilization, "parts": step.parts}

    return attempt(simulated)


def on_network(job: Job, axes: Mapping[str, Any], fidelity: str) -> tuple[Job, Network | None]:
    """Return the job with links as in `axes`, and its network (for formulas, None). Raises `InputError`."""
    job = msgspec.structs.replace(job, machine=with_links(job.machine, axes))
    if fidelity == "formulas":
        return job, None
    switches = {axis.field for axis in NETWORK if axis.part == "switches"}
    others = {field: value for field, value in axes.items() if field in switches}
    return job, network_of(job.machine, job.mesh.workers, **others)


def step_on(job: Job, network: Network | None, lane: int | None = None) -> tuple[Step, FlowStep | None]:
    """Return a job's step and its simulation on the network; without a network, the step by formulas and None.

    The parts of a simulated step are the times of the busiest worker (of the given `lane`, if any).
    """
    if network is None:
        return predict(job), None
    found = simulate(job, network, lane=lane)
    return found.step, found
