"""Jobs that share a network: the iteration of each job alone on its hosts, and next to the other jobs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import msgspec

from legato.core import files
from legato.core.axes import BY_NAME, NETWORK
from legato.core.errors import InputError
from legato.core.job import Job, Machine
from legato.core.plan import Plan
from legato.core.program import Program
from legato.core.table import Column, Table, factor
from legato.core.text import count, percent
from legato.core.timeline import Timeline
from legato.core.units import format_seconds
from legato.core.workload import Workload
from legato.reports.model import ModelReport
from legato.schedule import Scheduler
from legato.simulator.flow import Fabric, Network, SharedJob, SharedNetwork, place
from legato.simulator.flow.fabrics import check_options, fitting, label
from legato.simulator.flow.iterations.run import check_flow_plan
from legato.simulator.flow.shared.jobs import ITERATIONS
from legato.simulator.flow.shared.placement import Placement, check_taken, num_hosts
from legato.sweeps.cell import Outcome, attempt, plan_for
from legato.sweeps.grid import PLAIN, THIS_RUN, Cell, check_axes, network_of
from legato.sweeps.results import Swept, named
from legato.sweeps.run import outcomes
from legato.whole_jobs.flow.shared import STEPS, SharedStep, simulate_shared
from legato.whole_jobs.flow.step import network_of as network_on
from legato.whole_jobs.step import Step, waits
from legato.whole_jobs.traced import ProgramStep
from legato.zoo.presets import machine_named, with_links

__all__ = ["MixResults", "MixRow", "Shared", "share", "sweep_shared"]

#: The largest number of cells in a sweep; each takes a second or more.
_MOST_CELLS = 1000
#: Changes by less than this share of the step on an unshared network are not shown.
_LEAST_SHARE = 0.001


@dataclass(frozen=True)
class Shared:
    """Jobs on a network, in one or several cases, such as with and without disturbances.

    Each case has the window of time in which its jobs were measured, and its jobs' times. `timelines()` returns a
    timeline of each job, or None for a job that starves, in the case with the smallest mean slowdown. Workloads have
    `fabrics`, and whole jobs and programs have their steps `alone`.
    """

    rows: list[dict[str, Any]]
    network: Network
    timelines: Callable[[], Sequence[Timeline | None]]
    fabrics: Sequence[Fabric] = ()
    alone: Sequence[Step | ProgramStep] = ()

    def table(self, title: str = "") -> Table:
        """Return a table with a row for each job in each case, and a row for all jobs of a case."""
        rows: list[dict[str, Any]] = []
        sums = []
        for case in self.rows:
            begin_s, end_s = map(format_seconds, case["window_s"])
            workers = sum(job["workers"] for job in case["jobs"])
            every = case | {"job": f"all, from {begin_s} to {end_s}", "workers": workers}
            rows += [*({"case": case["case"]} | job for job in case["jobs"]), every]
            sums.append(len(rows) - 1)
        columns = [Column(head, key, missing="starves") for key, head in _HEADS.items()]
        columns += [Column(head, partial(_waits_of, key)) for key, head in _WAITS.items()]
        columns.append(Column("longer, of the step alone", _longer))
        one = len(self.rows) == 1
        return Table(title, rows, columns, sums=sums, keys=2).shown(
            lambda head, texts: texts - {"0", "0 s"} and not (one and head == "case")
        )

    def __str__(self) -> str:
        """Return the table as text."""
        return str(self.table())

    def _repr_html_(self) -> str:
        """Return the table for notebooks."""
        return self.table()._repr_html_()


#: The heads of the table's columns, by the keys of their values.
_HEADS = {
    "case": "case",
    "job": "job",
    "workers": "workers",
    "priority": "priority",
    "shift_s": "shift",
    "alone_s": "alone",
    "iteration_s": "shared",
    "slowdown": "slowdown",
    "shortest_s": "shortest",
    "longest_s": "longest",
    "iterations": "iterations",
    "utilization": "utilization",
}
_WAITS = {"alone_parts": "waits for, alone", "parts": "waits for, shared"}


def _waits_of(key: str, job: Mapping[str, Any]) -> str:
    return waits(job[key]) if key in job else ""


def _longer(job: Mapping[str, Any]) -> str:
    """List by how much other jobs prolong parts of a step, largest first, as shares of the step of the job alone."""
    if "longer_s" not in job:
        return ""
    more = {part: seconds / job["alone_s"] for part, seconds in job["longer_s"].items()}
    shown = sorted((part for part in more if abs(more[part]) >= _LEAST_SHARE), key=lambda part: -more[part])
    return ", ".join(f"{part} {percent(more[part], signed=True)}" for part in shown) or "nothing"


def share(  # noqa: PLR0913
    jobs: Sequence[Workload] | Sequence[Job | Program],
    *,
    workers: int | Sequence[int] | None = None,
    fabric: str | Fabric | Sequence[str | Fabric] | None = None,
    scheduler: str | Scheduler | Sequence[str | Scheduler] | None = None,
    plan: Plan | Sequence[Plan | None] | None = None,
    priority: Sequence[int] | None = None,
    hosts: Placement = "packed",
    shift_s: float | Sequence[float] = 0.0,
    iterations: int | None = None,
    options: Mapping[str, Any] | None = None,
    machine: Machine | str = "h100",
    **axes: Any,
) -> Shared:
    """Simulate jobs that share a network, and compare each job with the same job alone on its hosts.

    Jobs are workloads, or whole jobs and programs. `axes` describe the network as in `legato.sweep`, with one value
    each. `shift_s`, the delay before a job starts, has one value for all jobs or one for each, as have `workers` (by
    default 8), `fabric` (a ring), `scheduler` (`plain`) and `plan` of workloads. `hosts` says where the jobs run
    (`legato.simulator.flow.shared.placement.place`). With `priority`, links serve workloads with a higher number first,
    in a case of its own; a disturbed network adds the same cases undisturbed. `options` are options of fabrics. Whole
    jobs have the links of their machines (programs: of `machine`), unless axes change them. `iterations` is the least
    number of iterations, or of steps of whole jobs, to measure. Raises `InputError` on wrong values.
    """
    whole = [isinstance(job, Job | Program) for job in jobs]
    if any(whole) != all(whole) or not jobs:
        raise InputError("workloads together with whole jobs, or nothing (expected only one kind)")
    own = {"workers": workers, "fabric": fabric, "scheduler": scheduler, "plan": plan}
    every = own | {"priority": priority, "options": options or None}
    given, shifts_s = [name for name, value in every.items() if value is not None], _each("shift_s", shift_s, len(jobs))
    parts = ("links", "switches") if whole[0] else ("", "links", "switches")
    known = [axis.field for axis in NETWORK if axis.part in parts and axis.name not in ("workers", "servers")]
    check_axes({name: (value,) for name, value in axes.items()}, known)
    if whole[0]:
        if given:
            raise InputError(f"{given[0]}: does not apply to whole jobs (expected workloads)")
        return _of_jobs(jobs, shifts_s, hosts, iterations, machine_named(machine), axes)
    chosen = _USUAL | {name: value for name, value in own.items() if value is not None}
    each = {"shift_s": shifts_s} | {name: _each(name, value, len(jobs)) for name, value in chosen.items()}
    return _of_workloads(jobs, each, priority, hosts, iterations, options or {}, axes)


_USUAL = {"workers": BY_NAME["workers"].usual, "fabric": "ring", "scheduler": PLAIN, "plan": None}


def _each(name: str, value: Any, jobs: int) -> list[Any]:
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if len(values) not in (1, jobs):
        raise InputError(f"{name}: {len(values)} values for {jobs} jobs (expected one for all, or one each)")
    return values * jobs if len(values) == 1 else values


def _of_workloads(
    workloads: Sequence[Any],
    each: Mapping[str, list[Any]],
    priority: Sequence[int] | None,
    how: Placement,
    iterations: int | None,
    options: Mapping[str, Any],
    axes: Mapping[str, Any],
) -> Shared:
    workers, network = each["workers"], _network(each["workers"], how, axes)
    check_options(each["fabric"], options)
    fabrics = [fitting(name, options) for name in each["fabric"]]
    jobs = []
    for j, (name, workload, taken) in enumerate(
        zip(named(workloads), workloads, place(workers, how, network), strict=True)
    ):
        plan = each["plan"][j]
        if plan is not None:
            check_flow_plan(plan)
        job = SharedJob(
            name=name, workload=workload, hosts=taken, fabric=fabrics[j], plan=plan, shift_s=each["shift_s"][j]
        )
        if plan is None and each["scheduler"][j] != PLAIN:
            machines = job.machines(network, j)
            plan = plan_for(each["scheduler"][j], workload, label(each["fabric"][j]), fabrics[j], machines)
        jobs.append(replace(job, plan=plan))
    check_taken({host for job in jobs for host in job.hosts}, network)
    number = ITERATIONS if iterations is None else iterations
    shared, levels = SharedNetwork(jobs, network, iterations=number), {"equal": [0] * len(jobs)}
    levels |= {} if priority is None else {"given": _each("priority", priority, len(jobs))}
    rows = _cases(shared, levels)
    best = min(rows, key=lambda row: math.inf if row["slowdown"] is None else row["slowdown"])
    if network.disturbances:
        quiet = _cases(SharedNetwork(jobs, replace(network, disturbances=()), iterations=number), levels)
        rows += [row | {"case": f"{row['case']}, undisturbed"} for row in quiet]

    def timelines() -> list[Timeline | None]:
        times = shared.run(levels[best["case"]])
        drawn = iter(times.timelines())
        return [None if job.iteration_s is None else next(drawn) for job in times.jobs]

    return Shared(rows, network, timelines, fabrics)


def _network(workers: Sequence[int], how: Placement, axes: Mapping[str, Any]) -> Network:
    """Return the network with these values of axes, and with hosts for all workers of the jobs."""
    if min(workers) < 1:
        raise InputError(f"workers: {min(workers)} (expected at least 1)")
    values = {axis.field: axis.usual for axis in NETWORK} | dict(axes)
    in_a_host = max(1, values["gpus_per_host"])  # the network refuses less than 1
    return network_of(values | {"workers": in_a_host * num_hosts(workers, how, in_a_host), "servers": 1})


def _cases(shared: SharedNetwork, priorities: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Return a row for each case: jobs with equal and with given priorities."""
    rows = []
    for case, levels in priorities.items():
        times = shared.run(levels)
        jobs = [
            _row(asdict(one) | {"job": one.name, "slowdown": one.slowdown, "priority": level, "shift_s": own.shift_s})
            for one, level, own in zip(times.jobs, levels, shared.jobs, strict=True)
        ]
        slowdown = times.slowdown if math.isfinite(times.slowdown) else None
        row = {"case": case, "window_s": [times.begin_s, times.end_s], "slowdown": slowdown}
        rows.append({**row, "utilization": times.utilization, "jobs": jobs})
    return rows


def _row(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: values[key] for key in (*_HEADS, *_WAITS, "longer_s") if key in values}


def _of_jobs(
    given: Sequence[Any],
    shift_s: Sequence[float],
    how: Placement,
    iterations: int | None,
    machine: Machine,
    axes: Mapping[str, Any],
) -> Shared:
    if how == "together":
        raise InputError("hosts: together (expected packed, spread or random: a GPU runs only one whole job)")
    links, switches = ({a.field: axes[a.field] for a in NETWORK if a.part == p and a.field in axes} for p in _PARTS)
    jobs = [
        msgspec.structs.replace(j, machine=with_links(j.machine, links)) if isinstance(j, Job) else j for j in given
    ]
    machine = next((job.machine for job in jobs if isinstance(job, Job)), with_links(machine, links))
    sizes = [job.mesh.workers if isinstance(job, Job) else job.workers for job in jobs]
    network = network_on(machine, sum(sizes), **switches)
    taken = place(sizes, how, network)
    check_taken({gpu for own in taken for gpu in own}, network)
    steps = STEPS if iterations is None else iterations
    window_s, found = simulate_shared(jobs, taken, network, machine, steps=steps, shift_s=shift_s)
    rows = [_step(*one) for one in zip(named(jobs), sizes, shift_s, found, strict=True)]
    case = {"case": "shared", "window_s": list(window_s), "slowdown": fmean(one.slowdown for one in found)}

    def timelines() -> list[Timeline | None]:
        return [None if one.longest is None else one.longest.timeline() for one in found]

    return Shared([case | {"jobs": rows}], network, timelines, alone=[one.alone for one in found])


_PARTS = ("links", "switches")


def _step(name: str, workers: int, shift_s: float, found: SharedStep) -> dict[str, Any]:
    steps_s = found.steps_s
    values = {"alone_parts": found.alone.parts, "parts": found.beside.parts, "longer_s": found.longer_s}
    values |= {"shortest_s": min(steps_s), "longest_s": max(steps_s), "iterations": len(steps_s)}
    values |= {"alone_s": found.alone.seconds, "iteration_s": found.beside.seconds, "slowdown": found.slowdown}
    return _row(values | {"job": name, "workers": workers, "shift_s": shift_s})


class MixRow(msgspec.Struct, frozen=True, kw_only=True):
    """The case of `share` on one network; `axes` has the network's values by field. `error` says why there is none."""

    axes: dict[str, Any]
    case: dict[str, Any]
    error: str | None = None

    @property
    def parts(self) -> dict[str, float]:
        """Return no parts: the jobs have different iterations."""
        return {}

    @property
    def columns(self) -> dict[str, Any]:
        """Return the row as `legato sweep --share --json` prints it, with each axis as a field."""
        return self.axes | self.case | {"error": self.error}


class MixResults(Swept[MixRow]):
    """The rows of a sweep of jobs that share networks, and the jobs' names with their numbers of workers."""

    def __init__(self, rows: Iterable[MixRow], names: Sequence[str]) -> None:
        super().__init__(rows)
        self._names = names

    def table(self, title: str = "") -> Table:
        """Return a table with a column for each axis on which the networks differ, and one for each job."""
        columns = [
            *self.columns(),
            *(
                Column(name, partial(_iteration_of, j), format_seconds, missing="starves")
                for j, name in enumerate(self._names)
            ),
            Column(
                "slowdown", lambda row: "failed" if row.error else row.case["slowdown"], _slowdown, missing="starves"
            ),
            Column("computing", lambda row: row.case.get("utilization", ""), percent),
        ]
        return Table(title, self, columns, keys=max(1, len(self.differing)))

    def sections(self) -> tuple[ModelReport, ...]:
        """Return the section of a page: a table."""
        table = self.table(f"{count(len(self._names), 'job')} on {count(len(self), 'network')}")
        return (ModelReport(", ".join(self._names), told=(table, *self.failures)),)


def _iteration_of(j: int, row: MixRow) -> float | str | None:
    return row.case["jobs"][j]["iteration_s"] if row.case else ""


def _slowdown(value: float | str) -> str:
    return value if isinstance(value, str) else factor(value, 3)


def sweep_shared(
    workloads: Sequence[Workload],
    axes: Mapping[str, Sequence[Any]],
    settings: Mapping[str, Any],
    **how: Any,
) -> MixResults:
    """Simulate workloads that share a network, on every combination of networks.

    `axes` has the values of the axes of networks (`core/axes.py`) by field, and `settings` has the other arguments of
    `share`, with one value for each job. The arguments `how`, and the errors, are as in `sweep`.
    """
    networks = [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())]
    if len(networks) > _MOST_CELLS:
        raise InputError(f"{len(networks):,} networks (expected at most {_MOST_CELLS:,})")
    for network in networks:
        _network(settings["workers"], settings["hosts"], network)
    settled = {name: [str(one) for one in own] if isinstance(own, list) else own for name, own in settings.items()}
    user = any(not isinstance(one, str) for name in ("fabric", "scheduler") for one in settings[name])
    cells = [
        Cell(inputs=tuple(map(files.identity, workloads)), settings=settled, axes=axes, own=THIS_RUN if user else "")
        for axes in networks
    ]
    done = outcomes([(cell, (workloads, settings)) for cell in cells], _run, "transfers", **how)
    found = [done[cell.key] for cell in cells]
    names = [f"{n} on {w}" for n, w in zip(named(workloads), settings["workers"], strict=True)]
    rows = (MixRow(axes=cell.axes, case=one.case, error=one.error) for cell, one in zip(cells, found, strict=True))
    return MixResults(rows, names)


def _run(cell: Cell, given: tuple[Sequence[Workload], Mapping[str, Any]]) -> Outcome:
    def simulated() -> dict[str, Any]:
        workloads, settings = given
        (case, *_) = share(workloads, **settings, **cell.axes).rows
        return {"case": {key: value for key, value in case.items() if key != "case"}}

    return attempt(simulated)
