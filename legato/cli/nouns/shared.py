"""Workloads as jobs that share a network: `legato simulate --share`, and `legato sweep --share` on many networks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from legato.cli.axes import FabricOptions, NetworkOptions, SweptOptions, note_machine
from legato.cli.nouns.running import Cells, Simulated
from legato.cli.options import (
    Json,
    TimelineOutput,
    fabric_of,
    in_flight_words,
    make_timelines,
    one_each,
    scheduler_of,
    setting,
    split,
    timeline_paths,
    whole,
)
from legato.cli.output import fidelity_of, note, note_unseen, print_json, print_table, progress
from legato.core import files
from legato.core.axes import BY_NAME, NETWORK
from legato.core.errors import InputError
from legato.core.plan import Plan
from legato.core.quantities import parse_seconds
from legato.core.table import Column, Table
from legato.core.text import count
from legato.core.units import format_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.simulator.flow import Network, SharedJob, SharedNetwork
    from legato.simulator.flow.shared.placement import Placement

__all__ = ["Places", "simulate", "sweep"]

#: The largest number of cells in a sweep; each takes a second or more.
_MOST_CELLS = 1000


@dataclass(frozen=True)
class Hosts:
    """The option that says on which hosts jobs run when they share a network."""

    PANEL: ClassVar = "Jobs that share a network (--share)"

    hosts: Literal["packed", "spread", "random", "together"] | None = setting(
        None,
        "Hosts of the jobs: packed (one job after another), spread over racks, random, or together on the same hosts.",
        metavar="NAME",
        show_default="packed",
    )

    @property
    def how(self) -> Placement:
        return self.hosts or "packed"


@dataclass(frozen=True)
class Places(Hosts):
    """The options that say on which hosts jobs run when they share a network, and when the jobs start."""

    shift: str | None = setting(None, "Delay before a job starts, such as 120ms.", show_default="0")


@dataclass(frozen=True)
class Timed(Places):
    """The options for measuring iterations of jobs; most take one value for all jobs, or one value for each job."""

    priority: str | None = setting(
        None, "Priority of each job on links, such as 2,1 (highest first).", show_default="equal"
    )


def simulate(
    paths: list[Path],
    workloads: list[Workload],
    /,
    what: Simulated,
    given: NetworkOptions,
    options: FabricOptions,
    how: Timed,
    output: TimelineOutput = None,
    json: Json = False,
) -> None:
    """Simulate jobs that share a network, and print how much they slow each other down."""
    from legato.simulator.flow import SharedNetwork

    what.check()
    _check_links(what.fidelity)
    plans = [] if what.plan is None else [Path(path) for path in split(str(what.plan))]
    counts = one_each("workers", given.axes.get("workers"), len(workloads), whole, None)
    machines = given.replace(workers=max(counts, key=lambda n: n or 0)).machines()
    workers = [machines.cluster.workers if one is None else one for one in counts]
    if min(workers) < 1:
        raise InputError(f"workers: {min(workers)} (expected at least 1)")
    network = _network(workers, given.values(machines.cluster), how)
    options = options | ({"servers": machines.cluster.servers} if machines.cluster.servers else {})
    make_timelines(output, len(workloads), [*paths, *plans, *given.files])
    priorities = {"equal": [0] * len(workloads)}
    if how.priority is not None:
        priorities["given"] = one_each("priority", how.priority, len(workloads), whole, 0)
    shared, number = _shared(workloads, workers, network, what, how, options)
    jobs = shared.jobs
    rows = _rows(shared, priorities)
    best = min(rows, key=lambda row: math.inf if row["slowdown"] is None else row["slowdown"])
    if output is not None:
        _write(output, shared, best)
    if network.disturbances:
        note_unseen({row["case"]: row["window_s"] for row in rows}, network.disturbances)
        quiet = _rows(SharedNetwork(jobs, replace(network, disturbances=()), iterations=number), priorities)
        rows += [row | {"case": f"{row['case']}, undisturbed"} for row in quiet]
    if json:
        print_json({"cases": rows})
        return
    note_machine(machines.machine)
    words = [f"{count(len(jobs), 'job')} on {machines.describe_shared(network)}", how.how, "by transfers"]
    words += in_flight_words(job.fabric for job in jobs if not isinstance(job.fabric, str))
    print_table(_table(", ".join(words), rows))


def sweep(
    paths: list[Path],
    workloads: list[Workload],
    /,
    cells: Cells,
    given: SweptOptions,
    options: FabricOptions,
    how: Hosts,
    json: Json = False,
) -> None:
    """Simulate a mix of jobs on every network, and print a row for each; `--workers` has the workers of each job."""
    _check_links(cells.fidelity)
    if "servers" in given.axes:
        raise InputError("--servers: does not apply to jobs that share networks")
    how = Timed(hosts=how.hosts)
    what = Simulated(cells.fabric, None, cells.iterations, cells.scheduler)
    default = BY_NAME["workers"].usual
    workers = [n or default for n in one_each("workers", given.axes.get("workers"), len(workloads), whole, default)]
    axes = {field: values for field, values in given.several().items() if field not in ("workers", "servers")}
    networks = [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())]
    if len(networks) > _MOST_CELLS:
        raise InputError(f"{len(networks):,} networks (expected at most {_MOST_CELLS:,})")
    found = []
    with progress("sweeping") as advance:
        for done, values in enumerate(networks):
            advance(done, len(networks))
            network = _network(workers, values, how)
            shared, _ = _shared(workloads, workers, network, what, how, options)
            (row,) = _rows(shared, {"equal": [0] * len(workloads)})
            found.append(values | {key: value for key, value in row.items() if key != "case"})
    if json:
        print_json(found)
        return
    note_machine(given.named())
    swept = [axis for axis in NETWORK if len(axes.get(axis.field, ())) > 1]
    same = [
        axis.say(axis.write(networks[0][axis.field]))
        for axis in NETWORK
        if axis.words and axis not in swept and axis.field in axes and networks[0][axis.field] != axis.usual
    ]
    title = [f"{count(len(workloads), 'job')} on {count(len(networks), 'network')}", *same, how.how]
    columns = [
        *(Column(axis.column, axis.field) for axis in swept),
        *(
            Column(f"{job['job']} on {job['workers']}", _iteration_of(j), format_seconds, missing="starves")
            for j, job in enumerate(found[0]["jobs"])
        ),
        Column("slowdown", "slowdown", missing="starves"),
        Column("computing", "utilization"),
    ]
    print_table(Table(", ".join(title), found, columns, keys=max(1, len(swept))))


def _iteration_of(job: int) -> Callable[[dict[str, Any]], float | None]:
    return lambda row: row["jobs"][job]["iteration_s"]


def _check_links(fidelity: str | None) -> None:
    if fidelity_of(fidelity, "transfers") == "formulas":
        raise InputError("--share: does not apply to --fidelity formulas (expected --fidelity transfers)")


def _network(workers: Sequence[int], values: dict[str, Any], how: Hosts) -> Network:
    """Return the network with these properties (`values`), and with hosts for all workers of the jobs."""
    from legato.simulator.flow.shared.placement import num_hosts
    from legato.sweeps.grid import network_of

    in_a_host = max(1, values["gpus_per_host"])  # the network refuses less than 1
    return network_of(values | {"workers": in_a_host * num_hosts(workers, how.how, in_a_host), "servers": 1})


def _shared(
    workloads: Sequence[Workload],
    workers: Sequence[int],
    network: Network,
    what: Simulated,
    how: Timed,
    options: dict[str, Any],
) -> tuple[SharedNetwork, int]:
    """Return the jobs on their shared network, and the number of iterations to simulate."""
    from legato.simulator.flow import SharedNetwork
    from legato.simulator.flow.shared.jobs import ITERATIONS
    from legato.simulator.flow.shared.placement import check_taken

    jobs = _jobs(workloads, workers, network, what, how, options)
    check_taken({host for job in jobs for host in job.hosts}, network)
    number = ITERATIONS if what.iterations is None else what.iterations
    return SharedNetwork(jobs, network, iterations=number), number


def _jobs(
    workloads: Sequence[Workload],
    workers: Sequence[int],
    network: Network,
    what: Simulated,
    how: Timed,
    options: dict[str, Any],
) -> list[SharedJob]:
    from legato.simulator.flow import SharedJob, place
    from legato.simulator.flow.fabrics import check_options, fitting, label
    from legato.simulator.flow.iterations.run import check_flow_plan
    from legato.sweeps.cell import plan_for

    count, titles = len(workloads), [one.name for one in workloads]
    names = one_each("fabric", what.fabric, count, fabric_of, "")
    if "all" in names:
        raise InputError("--fabric: 'all' (expected, with --share, one fabric for all jobs, or one each)")
    check_options(names, options)
    fabrics = [fitting(name, options) for name in names]
    hosts = place(workers, how.how, network)
    schedulers = one_each("scheduler", what.scheduler, count, scheduler_of, "plain")
    plans: list[str | None] = [*one_each("plan", None if what.plan is None else str(what.plan), count, str, "")]
    shift_s = one_each("shift", how.shift, count, parse_seconds, 0.0)
    jobs = []
    for j, workload in enumerate(workloads):
        name = f"{workload.name} {j + 1}" if titles.count(workload.name) > 1 else workload.name
        plan = files.read(path, Plan) if (path := plans[j]) else None
        if plan is not None:
            check_flow_plan(plan)
        job = SharedJob(
            name=name,
            workload=workload,
            hosts=hosts[j],
            fabric=fabrics[j],
            plan=plan,
            shift_s=shift_s[j],
        )
        if schedulers[j] != "plain":
            machines = job.machines(network, j)
            job = replace(job, plan=plan_for(schedulers[j], workload, label(names[j]), fabrics[j], machines))
        jobs.append(job)
    return jobs


def _rows(shared: SharedNetwork, priorities: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Return a row for each case: jobs with equal and with given priorities."""
    rows = []
    for name, levels in priorities.items():
        times = shared.run(levels)
        each = zip(times.jobs, levels, shared.jobs, strict=True)
        jobs = [
            {
                "job": one.name,
                "workers": one.workers,
                "priority": level,
                "shift_s": own.shift_s,
                "alone_s": one.alone_s,
                "iteration_s": one.iteration_s,
                "slowdown": one.slowdown,
                "shortest_s": one.shortest_s,
                "longest_s": one.longest_s,
                "iterations": one.iterations,
                "utilization": one.utilization,
            }
            for one, level, own in each
        ]
        row = {"case": name, "window_s": [times.begin_s, times.end_s], "slowdown": _finite(times.slowdown)}
        rows.append({**row, "utilization": times.utilization, "jobs": jobs})
    return rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


#: The heads of the columns of simulated jobs, by the keys of their values.
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


def _table(title: str, cases: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a row for each job in each case, and a row for all jobs of a case."""
    rows: list[dict[str, Any]] = []
    sums = []
    for case in cases:
        begin_s, end_s = map(format_seconds, case["window_s"])
        workers = sum(job["workers"] for job in case["jobs"])
        every = case | {"job": f"all, from {begin_s} to {end_s}", "workers": workers}
        rows += [*({"case": case["case"]} | job for job in case["jobs"]), every]
        sums.append(len(rows) - 1)
    columns = [Column(head, key, missing="starves") for key, head in _HEADS.items()]
    return Table(title, rows, columns, sums=sums, keys=2)


def _write(folder: Path, shared: SharedNetwork, best: dict[str, Any]) -> None:
    jobs = best["jobs"]
    times = shared.run([job["priority"] for job in jobs])
    every = zip(timeline_paths(folder, len(jobs)), times.jobs, strict=True)
    written = [path for path, job in every if job.iteration_s is not None]  # a job that starves has no timeline
    for path, timeline in zip(written, times.timelines(), strict=True):
        files.write(path, timeline)
    note(f"{best['case']}: timelines -> {folder} (legato report {' '.join(map(str, written))} shows them)")
