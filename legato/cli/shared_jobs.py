"""`legato simulate --share` of whole jobs: how long a step of each is beside the others, and what it then waits for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer
from msgspec.structs import replace
from rich.table import Table

from legato.cli.options import make_folder, one_each, timeline_paths
from legato.cli.output import fidelity_of, note, note_unseen, print_json, print_table
from legato.cli.whole_jobs import OF_NETWORK, caveats, links, network_given, refuse_others, values, waits
from legato.core import files
from legato.core.errors import InputError
from legato.core.job import Job
from legato.core.quantities import parse_seconds
from legato.core.text import count, percent
from legato.core.units import format_seconds

if TYPE_CHECKING:
    from legato.simulator.flow.shared.placement import Placement
    from legato.whole_jobs.flow.shared import SharedStep

__all__ = ["simulate_shared_jobs"]

_USED = {
    "workloads", "fidelity", "bandwidth", "local_bandwidth", "gpus_per_host", "share", "hosts", "shift", "iterations",
    "json", "output", *OF_NETWORK,
}  # fmt: skip
#: Of a step alone: changes of less are not shown.
_LEAST_SHARE = 0.001


def simulate_shared_jobs(typed: typer.Context, jobs: list[Job]) -> None:
    """The verb `legato simulate --share` for whole jobs, with the other options as they were typed."""
    from legato.simulator.flow.shared.placement import check_taken, place
    from legato.whole_jobs.flow.shared import STEPS, simulate_shared

    given = typed.params
    how: Placement = given["hosts"] or "packed"
    refuse_others(typed, _USED)
    if fidelity_of(given["fidelity"], "flows") == "formulas":
        raise InputError("--share: means nothing by formulas (expected --fidelity flows)")
    if how == "together":
        raise InputError("--hosts: together (expected packed, spread or random: a GPU has one whole job)")
    jobs = [replace(job, machine=links(typed, job.machine)) for job in jobs]
    sizes = [job.mesh.workers for job in jobs]
    network, words = network_given(typed, jobs[0].machine, sum(sizes))
    places = place(sizes, how, network)
    check_taken({gpu for own in places for gpu in own}, network)
    shift_s = one_each("shift", given["shift"], len(jobs), parse_seconds, 0.0)
    if given["output"] is not None:
        make_folder(given["output"])
    steps = STEPS if given["iterations"] is None else given["iterations"]
    window_s, found = simulate_shared(jobs, places, network, steps=steps, shift_s=shift_s)
    note_unseen({"shared": window_s}, network.disturbances)
    if given["output"] is not None:
        _write(given["output"], found, words.removeprefix(", "))
    titles = [job.name for job in jobs]
    names = [f"{name} {j + 1}" if titles.count(name) > 1 else name for j, name in enumerate(titles)]
    if given["json"]:
        rows = [_row(*one) for one in zip(names, shift_s, found, strict=True)]
        print_json({"window_s": window_s, "slowdown": _slowdown(found), "jobs": rows})
        return
    for j, (name, one) in enumerate(zip(names, found, strict=True)):
        if jobs.index(jobs[j]) == j:
            for caveat in caveats(one.alone):
                note(f"{name}: {caveat}")
    title = f"{count(len(jobs), 'job')} on {network.workers:,} x {jobs[0].machine.name}{words}, {how}, by flows"
    print_table(_table(title, names, found, window_s))


def _slowdown(found: Sequence[SharedStep]) -> float:
    return fmean(one.slowdown for one in found)


def _table(title: str, names: Sequence[str], found: Sequence[SharedStep], window_s: tuple[float, float]) -> Table:
    """A line for each job, and one for all."""
    table = Table("job", title=title, header_style="dim")
    for head in ("GPUs", "alone", "shared", "slowdown", "shortest", "longest", "steps"):
        table.add_column(head, justify="right")
    for head in ("waits for, alone", "waits for, shared", "longer, of the step alone"):
        table.add_column(head)
    workers = [one.alone.job.mesh.workers for one in found]
    for name, gpus, one in zip(names, workers, found, strict=True):
        alone, shared = format_seconds(one.alone.seconds), format_seconds(one.beside.seconds)
        cells = [f"{gpus:,}", alone, shared, f"{one.slowdown:.3f}x"]
        cells += [format_seconds(min(one.steps_s)), format_seconds(max(one.steps_s)), str(len(one.steps_s))]
        table.add_row(name, *cells, waits(one.alone.parts), waits(one.beside.parts), _longer(one))
    begin, end = map(format_seconds, window_s)
    every = [f"all, from {begin} to {end}", f"{sum(workers):,}", "", "", f"{_slowdown(found):.3f}x"]
    table.add_row(*every, style="bold")
    return table


def _row(name: str, shift_s: float, found: SharedStep) -> dict[str, Any]:
    """What `--json` prints of a job."""
    return {
        "job": name,
        "shift_s": shift_s,
        "slowdown": found.slowdown,
        "shortest_s": min(found.steps_s),
        "longest_s": max(found.steps_s),
        "steps": len(found.steps_s),
        "longer_s": found.longer_s,
        "alone": values(found.alone),
        "shared": values(found.beside),
    }


def _longer(found: SharedStep) -> str:
    """What of a step takes longer beside the other jobs, as shares of the step alone, the most first."""
    more = {part: seconds / found.alone.seconds for part, seconds in found.longer_s.items()}
    shown = sorted((part for part in more if abs(more[part]) >= _LEAST_SHARE), key=lambda part: -more[part])
    return ", ".join(f"{part} {percent(more[part], signed=True)}" for part in shown) or "nothing"


def _write(folder: Path, found: list[SharedStep], network: str) -> None:
    paths = timeline_paths(folder, len(found))
    for path, one in zip(paths, found, strict=True):
        files.write(path, one.longest.timeline(network))
    note(f"timelines of the longest steps -> {folder} (legato report {' '.join(map(str, paths))} shows them)")
