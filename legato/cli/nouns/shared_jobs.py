"""`legato simulate --share` of whole jobs and programs: the step of each job on the shared network and alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from legato.cli.nouns.job import OfMachine, said
from legato.cli.nouns.program import step_values
from legato.cli.nouns.shared import Places
from legato.cli.options import Fidelity, Iterations, Json, TimelineOutput, make_timelines, one_each, timeline_paths
from legato.cli.output import fidelity_of, note, note_unseen, print_json, print_table
from legato.core import files
from legato.core.errors import InputError
from legato.core.job import Job
from legato.core.program import Program
from legato.core.quantities import parse_seconds
from legato.core.table import Table, factor
from legato.core.text import count, percent
from legato.core.units import format_seconds

if TYPE_CHECKING:
    from legato.whole_jobs.flow.shared import SharedStep
    from legato.whole_jobs.step import Step
    from legato.whole_jobs.traced import ProgramStep

__all__ = ["simulate"]

#: Changes by less than this share of the step on an unshared network are not shown.
_LEAST_SHARE = 0.001


def simulate(
    paths: list[Path],
    given: list[Job | Program],
    /,
    machine: OfMachine,
    places: Places,
    fidelity: Fidelity = None,
    iterations: Iterations = None,
    output: TimelineOutput = None,
    json: Json = False,
) -> None:
    """Print how long the jobs' steps take on a network that they share."""
    from legato.simulator.flow.shared.placement import check_taken, place
    from legato.whole_jobs.flow.shared import STEPS, simulate_shared
    from legato.whole_jobs.flow.step import network_of
    from legato.whole_jobs.step import Step
    from legato.zoo.presets import machine_named

    if len(given) == 1:
        raise InputError(f"--share: does not apply to a {'whole job' if isinstance(given[0], Job) else 'program'}")
    if fidelity_of(fidelity, "flows") == "formulas":
        raise InputError("--share: does not apply to --fidelity formulas (expected --fidelity flows)")
    if places.how == "together":
        raise InputError("--hosts: together (expected packed, spread or random: a GPU runs only one whole job)")
    if output is not None and any(isinstance(one, Program) for one in given):
        raise InputError("--output: a program has no timeline (expected whole jobs)")
    jobs: list[Job | Program] = [
        replace(job, machine=machine.on(job.machine)) if isinstance(job, Job) else job for job in given
    ]
    links = next((job.machine for job in jobs if isinstance(job, Job)), None)
    links = links or machine.on(machine_named("h100"))
    sizes = [job.mesh.workers if isinstance(job, Job) else job.workers for job in jobs]
    switches = {axis.field: value for axis, value in machine.of("switches").items()}
    network = network_of(links, sum(sizes), **switches)
    taken = place(sizes, places.how, network)
    check_taken({gpu for own in taken for gpu in own}, network)
    shift_s = one_each("shift", places.shift, len(jobs), parse_seconds, 0.0)
    make_timelines(output, len(jobs), paths)
    steps = STEPS if iterations is None else iterations
    window_s, found = simulate_shared(jobs, taken, network, links, steps=steps, shift_s=shift_s)
    note_unseen({"shared": window_s}, network.disturbances)
    if output is not None:
        _write(output, found, said(machine).removeprefix(", "))
    titles = [job.name for job in jobs]
    names = [f"{name} {j + 1}" if titles.count(name) > 1 else name for j, name in enumerate(titles)]
    if json:
        rows = [_row(*one) for one in zip(names, shift_s, found, strict=True)]
        print_json({"window_s": window_s, "slowdown": _slowdown(found), "jobs": rows})
        return
    from legato.whole_jobs.told import caveats

    for j, (name, one) in enumerate(zip(names, found, strict=True)):
        if jobs.index(jobs[j]) == j and isinstance(one.alone, Step):
            for caveat in caveats(one.alone):
                note(f"{name}: {caveat}")
    title = f"{count(len(jobs), 'job')} on {network.workers:,} x {links.name}{said(machine)}, {places.how}, by flows"
    print_table(_table(title, list(zip(names, sizes, found, strict=True)), window_s))


def _slowdown(found: Sequence[SharedStep]) -> float:
    return fmean(one.slowdown for one in found)


def _table(title: str, jobs: list[tuple[str, int, SharedStep]], window_s: tuple[float, float]) -> Table:
    """Return a table with a row for each job, and a row for all jobs."""
    from legato.whole_jobs.step import waits

    write = {
        "job": None,
        "GPUs": "{:,}".format,
        **dict.fromkeys(("alone", "shared"), format_seconds),
        "slowdown": partial(factor, decimals=3),
        **dict.fromkeys(("shortest", "longest"), format_seconds),
        "steps": str,
        **dict.fromkeys(("waits for, alone", "waits for, shared", "longer, of the step alone")),
    }
    rows: list[tuple[Any, ...]] = [
        (
            *(name, gpus, one.alone.seconds, one.beside.seconds, one.slowdown),
            *(min(one.steps_s), max(one.steps_s), len(one.steps_s)),
            *(waits(one.alone.parts), waits(one.beside.parts), _longer(one)),
        )
        for name, gpus, one in jobs
    ]
    begin, end = map(format_seconds, window_s)
    every = f"all, from {begin} to {end}", sum(row[1] for row in rows), "", "", _slowdown([one for *_, one in jobs])
    return Table.of(title, write, [*rows, (*every, *[""] * 6)], sums=[len(rows)])


def _row(name: str, shift_s: float, found: SharedStep) -> dict[str, Any]:
    """Return what `--json` prints for a job."""
    return {
        "job": name,
        "shift_s": shift_s,
        "slowdown": found.slowdown,
        "shortest_s": min(found.steps_s),
        "longest_s": max(found.steps_s),
        "steps": len(found.steps_s),
        "longer_s": found.longer_s,
        "alone": _values(found.alone),
        "shared": _values(found.beside),
    }


def _values(step: Step | ProgramStep) -> dict[str, Any]:
    from legato.whole_jobs.step import Step

    return step.columns if isinstance(step, Step) else step_values(step)


def _longer(found: SharedStep) -> str:
    """List by how much other jobs prolong parts of a step, largest first, as shares of the step of the job alone."""
    more = {part: seconds / found.alone.seconds for part, seconds in found.longer_s.items()}
    shown = sorted((part for part in more if abs(more[part]) >= _LEAST_SHARE), key=lambda part: -more[part])
    return ", ".join(f"{part} {percent(more[part], signed=True)}" for part in shown) or "nothing"


def _write(folder: Path, found: list[SharedStep], network: str) -> None:
    paths = timeline_paths(folder, len(found))
    for path, one in zip(paths, found, strict=True):
        if one.longest is not None:
            files.write(path, one.longest.timeline(network))
    note(f"timelines of the longest steps -> {folder} (legato report {' '.join(map(str, paths))} shows them)")
