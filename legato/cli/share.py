"""`legato simulate --share`: several jobs on one network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

from legato.cli.options import Value, in_flight_words, quantity, split
from legato.cli.output import note, print_json, print_table, progress
from legato.core import files
from legato.core.errors import FileError, InputError
from legato.core.plan import Plan
from legato.core.text import count, percent
from legato.core.units import format_seconds, parse_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.simulator.flow import Disturbance, Job, Network, Phases, SharedNetwork
    from legato.simulator.flow.placement import Placement

__all__ = ["JobOptions", "one_each", "simulate_shared", "timeline_paths", "whole"]

#: The priorities that Crux would give.
BY_INTENSITY = "intensity"


class JobOptions(NamedTuple):
    """The options of jobs as they were given: most have one value for all jobs, or one for each."""

    fabric: str
    scheduler: str | None
    plan: str | None
    shift: str | None
    pace: str | None
    priority: str | None
    hosts: Placement | None
    best_shift: bool

    @property
    def placement(self) -> Placement:
        return self.hosts or "packed"

    def refuse(self) -> None:
        """Raise `InputError` if there is one that means nothing without --share."""
        for name in ("shift", "pace", "priority", "hosts", "best_shift"):
            if getattr(self, name):
                raise InputError(f"--{name.replace('_', '-')}: means nothing for one job (expected --share)")


def one_each(option: str, text: str | None, jobs: int, parse: Callable[[str], Value], default: Value) -> list[Value]:
    """The values in `text`: one for all jobs, or one for each. Raises `InputError` if there are as many as neither."""
    if text is None:
        return [default] * jobs
    parts = split(text)
    if len(parts) not in (1, jobs):
        expected = "one for all, or one each" if jobs > 1 else "one"
        raise InputError(f"--{option}: {count(len(parts), 'value')} for {count(jobs, 'job')} (expected {expected})")
    values = [quantity(option, value, parse) for value in parts]
    return values * jobs if len(values) == 1 else values


def whole(text: str) -> int:
    """A whole number. Raises `InputError`."""
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{text!r} is not a whole number") from None


def simulate_shared(
    workloads: Sequence[Workload],
    workers: Sequence[int],
    network: Network,
    title: str,
    given: JobOptions,
    fabric_options: dict[str, Any],
    iterations: int | None,
    output: Path | None,
    json: bool,
) -> None:
    """Simulate jobs with so many workers on a network with a host for each, and print what they do to one another."""
    from legato.simulator.flow import SharedNetwork
    from legato.simulator.flow.jobs import ITERATIONS

    for option, there in (("shift", given.shift is not None), ("disturb", bool(network.disturbances))):
        if given.best_shift and there:
            raise InputError(f"--best-shift and --{option}: give one or the other")
    jobs = _jobs(workloads, workers, network, given, fabric_options)
    _check_taken(jobs, network)
    priorities = [0] * len(jobs)
    if given.priority not in (None, BY_INTENSITY):
        priorities = one_each("priority", given.priority, len(jobs), whole, 0)
    if output is not None:
        _make(output)
    number = ITERATIONS if iterations is None else iterations
    shared = SharedNetwork(jobs, network, iterations=number)
    rows, phases = _rows(shared, given, priorities)
    best = min(rows, key=lambda row: math.inf if row["slowdown"] is None else row["slowdown"])
    if output is not None:
        _write(output, shared, best)
    if network.disturbances:
        _note_unseen(rows, network.disturbances)
        quiet, _ = _rows(SharedNetwork(jobs, replace(network, disturbances=()), iterations=number), given, priorities)
        rows += [row | {"case": f"{row['case']}, undisturbed"} for row in quiet]
    if json:
        print_json({"cases": rows, "best_shift": None if phases is None else _phases(phases)})
        return
    words = [f"{count(len(jobs), 'job')} on {title}", given.placement, "flow fidelity"]
    words += in_flight_words(job.fabric for job in jobs if not isinstance(job.fabric, str))
    print_table(_table(", ".join(words), rows), keys=2)
    if phases is not None:
        print_table(_drifts(phases))


def _jobs(
    workloads: Sequence[Workload],
    workers: Sequence[int],
    network: Network,
    given: JobOptions,
    fabric_options: dict[str, Any],
) -> list[Job]:
    from legato.simulator.flow import Job, place
    from legato.simulator.flow.fabrics import check_options, fitting
    from legato.simulator.flow.run import check_flow_plan

    count, titles = len(workloads), [one.name for one in workloads]
    names = one_each("fabric", given.fabric, count, str, "")
    if "all" in names:
        raise InputError("--fabric: 'all' (expected, with --share, one fabric for all jobs, or one each)")
    check_options(names, fabric_options)
    fabrics = [fitting(name, fabric_options) for name in names]
    hosts = place(workers, given.placement, network)
    schedulers = one_each("scheduler", given.scheduler, count, str, "plain")
    plans: list[str | None] = [*one_each("plan", given.plan, count, str, "")]
    shift_s = one_each("shift", given.shift, count, parse_seconds, 0.0)
    pace_s = one_each("pace", given.pace, count, parse_seconds, 0.0)
    jobs = []
    for j, workload in enumerate(workloads):
        name = f"{workload.name} {j + 1}" if titles.count(workload.name) > 1 else workload.name
        plan = files.read(path, Plan) if (path := plans[j]) else None
        if plan is not None:
            check_flow_plan(plan)
        job = Job(
            name=name,
            workload=workload,
            hosts=hosts[j],
            fabric=fabrics[j],
            plan=plan,
            shift_s=shift_s[j],
            pace_s=pace_s[j],
        )
        if schedulers[j] != "plain":
            from legato.schedule import schedule
            from legato.simulator.flow.pricing import cluster_for

            cluster = cluster_for(names[j], fabrics[j], job.machines(network, j))
            job = replace(job, plan=schedule(schedulers[j], workload, cluster))
        jobs.append(job)
    return jobs


def _check_taken(jobs: Sequence[Job], network: Network) -> None:
    """Raise `InputError` if a GPU is slower on which no job has a worker, or a card that no job uses.

    It would change nothing. On rails without spines, transfers also take the cards of GPUs without a worker.
    """
    taken = {host for job in jobs for host in job.hosts}
    cards = {host // network.gpus_per_card for host in taken}
    of_gpus = [one for one in network.disturbances if one.kind in ("compute", "link")]
    slower: list[tuple[str, int]] = [(one.kind, one.number) for one in of_gpus]
    slower += [("slow", number) for number, factor in enumerate(network.compute_scale) if factor != 1]
    slower += [("slow_link", number) for number, factor in enumerate(network.link_scale) if factor != 1]
    for name, number in slower:
        used = number in taken
        if "link" in name:
            used = not network.switches.connected or number // network.gpus_per_card in cards
        if not used:
            expected = f"one of the {len(taken)} with a worker, of {network.workers}"
            raise InputError(f"{name}: GPU {number}, on which no job has a worker (expected {expected})")


def _rows(
    shared: SharedNetwork, given: JobOptions, priorities: Sequence[int]
) -> tuple[list[dict[str, Any]], Phases | None]:
    """A row for each case: equal priorities, those that are given, those of Crux, and the best shifts."""
    from legato.simulator.flow import best_shifts

    own_s = [job.shift_s for job in shared.jobs]
    cases: dict[str, tuple[Sequence[int], Sequence[float]]] = {"equal": ([0] * len(own_s), own_s)}
    if given.priority is not None:
        if given.priority != BY_INTENSITY:
            cases["given"] = (priorities, own_s)
        cases[BY_INTENSITY] = (shared.priority_by_intensity, own_s)
    phases = None
    if given.best_shift:
        with progress("shifting jobs") as advance:
            phases = best_shifts(shared, priority=priorities, progress=advance)
        cases["best shift"] = (priorities, phases.shift_s)
    intensity = [_finite(one) for one in shared.intensity]
    rows = []
    for name, (priority, shift_s) in cases.items():
        times = shared.run(shift_s, priority)
        each = zip(times.jobs, priority, shift_s, intensity, strict=True)
        jobs = [
            {
                "job": one.name,
                "workers": one.workers,
                "priority": level,
                "shift_s": shift,
                "alone_s": one.alone_s,
                "iteration_s": one.iteration_s,
                "slowdown": one.slowdown,
                "shortest_s": one.shortest_s,
                "longest_s": one.longest_s,
                "iterations": one.iterations,
                "utilization": one.utilization,
                "intensity": busy,
            }
            for one, level, shift, busy in each
        ]
        row = {"case": name, "window_s": [times.begin_s, times.end_s], "slowdown": _finite(times.slowdown)}
        rows.append({**row, "utilization": times.utilization, "jobs": jobs})
    return rows, phases


def _note_unseen(rows: Sequence[dict[str, Any]], disturbances: Sequence[Disturbance]) -> None:
    """Say which disturbances are over when the window begins in which times count, or begin after it."""
    for row in rows:
        begin_s, end_s = row["window_s"]
        for one in disturbances:
            if one.end_s <= begin_s or one.start_s >= end_s:
                window = f"{format_seconds(begin_s)} to {format_seconds(end_s)}"
                note(f"{row['case']}: {one.kind} {one.number} is disturbed outside of the window only, {window}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _phases(phases: Phases) -> dict[str, Any]:
    return {
        "shift_s": phases.shift_s,
        "drift": [{"off": share, "slowdown": _finite(slowdown)} for share, slowdown in phases.drift],
        "longer_period": None if phases.longer is None else _finite(phases.longer),
        "mean_over_phases": _finite(phases.mean),
        "worst_phase": _finite(phases.worst),
        "phases": [{"shift_s": shift, "slowdown": _finite(slowdown)} for shift, slowdown in phases.phases],
    }


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each job in each case, and one for all jobs."""
    table = Table(title=title, header_style="dim")
    for column in ("case", "job"):
        table.add_column(column)
    for column in (
        "workers", "priority", "shift", "alone", "shared", "slowdown", "shortest", "longest", "iterations",
        "utilization",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        for job in row["jobs"]:
            table.add_row(
                row["case"],
                job["job"],
                str(job["workers"]),
                str(job["priority"]),
                format_seconds(job["shift_s"]),
                format_seconds(job["alone_s"]),
                *_starving(job["iteration_s"], format_seconds),
                *_starving(job["slowdown"], _slowdown),
                *_starving(job["shortest_s"], format_seconds),
                *_starving(job["longest_s"], format_seconds),
                str(job["iterations"]),
                *_starving(job["utilization"], percent),
            )
        begin_s, end_s = row["window_s"]
        table.add_row(
            row["case"],
            f"all, from {format_seconds(begin_s)} to {format_seconds(end_s)}",
            str(sum(job["workers"] for job in row["jobs"])),
            *[""] * 4,
            *_starving(row["slowdown"], _slowdown),
            *[""] * 3,
            percent(row["utilization"]),
            style="bold",
            end_section=True,
        )
    return table


def _starving(value: float | None, text: Callable[[float], str]) -> list[str]:
    return ["starves" if value is None else text(value)]


def _slowdown(slowdown: float) -> str:
    return f"{slowdown:.3f}x"


def _drifts(phases: Phases) -> Table:
    """The mean slowdown with the best shifts, and where they are missed."""
    table = Table(title="where the jobs miss the best shifts", header_style="dim")
    table.add_column("phase")
    table.add_column("mean slowdown", justify="right")
    found: list[tuple[str, float | None]] = [("best shifts", phases.times.slowdown)]
    found += [(f"off by {share:.0%} of a period", slowdown) for share, slowdown in phases.drift]
    found += [("the last job's period 1% longer", phases.longer)]
    found += [("mean over all phases", phases.mean), ("worst phase", phases.worst)]
    for name, slowdown in found:
        table.add_row(name, "too large" if slowdown is None else _slowdown(slowdown))
    return table


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: {error.strerror}") from None


def timeline_paths(folder: Path, jobs: int) -> list[Path]:
    """The files in the folder to which the timelines of so many jobs are written."""
    return [folder / f"job-{number}.json" for number in range(1, jobs + 1)]


def _write(folder: Path, shared: SharedNetwork, best: dict[str, Any]) -> None:
    jobs = best["jobs"]
    times = shared.run([job["shift_s"] for job in jobs], [job["priority"] for job in jobs])
    every = zip(timeline_paths(folder, len(jobs)), times.jobs, strict=True)
    written = [path for path, job in every if job.iteration_s is not None]  # a job that starves has no timeline
    for path, timeline in zip(written, times.timelines(), strict=True):
        files.write(path, timeline)
    note(f"{best['case']}: timelines -> {folder} (legato report {' '.join(map(str, written))} shows them)")
