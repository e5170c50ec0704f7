"""Jobs that share a network: `legato simulate --share`, and `legato sweep --share` of workloads on many networks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from msgspec.structs import replace

from legato.cli.axes import FabricOptions, NetworkOptions, SweptOptions, note_machine
from legato.cli.nouns.job import OfMachine, said
from legato.cli.nouns.running import Cells, Running, Simulated, Written
from legato.cli.options import (
    Fidelity,
    Iterations,
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
from legato.cli.output import fidelity_of, note, note_unseen, print_json, print_table
from legato.core import files
from legato.core.axes import BY_NAME
from legato.core.errors import InputError
from legato.core.job import Job
from legato.core.plan import Plan
from legato.core.program import Program
from legato.core.quantities import parse_seconds
from legato.core.text import count
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.simulator.flow.shared.placement import Placement
    from legato.sweeps.share import Shared

__all__ = ["Places", "simulate", "simulate_jobs", "sweep"]


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
    from legato.sweeps.share import share

    what.check()
    plans = [] if what.plan is None else [Path(path) for path in split(str(what.plan))]
    make_timelines(output, len(workloads), [*paths, *plans, *given.files])
    number = len(workloads)
    counts = one_each("workers", given.axes.get("workers"), number, whole, None)
    machines = given.replace(workers=max(counts, key=lambda n: n or 0)).machines()
    found = share(
        workloads,
        **_each_job(what, number),
        workers=[machines.cluster.workers if one is None else one for one in counts],
        plan=[files.read(path, Plan) for path in plans] if plans else None,
        priority=None if how.priority is None else one_each("priority", how.priority, number, whole, 0),
        hosts=how.how,
        shift_s=one_each("shift", how.shift, number, parse_seconds, 0.0),
        options=options | ({"servers": machines.cluster.servers} if machines.cluster.servers else {}),
        **{field: value for field, value in given.values(machines.cluster).items() if field not in _OF_JOBS},
    )
    words = [f"{count(number, 'job')} on {machines.describe_shared(found.network)}", how.how, "by transfers"]
    _show(found, ", ".join([*words, *in_flight_words(found.fabrics)]), output, "", json)
    if not json:
        note_machine(machines.machine)


def simulate_jobs(
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
    """Print how long the steps of whole jobs and programs take on a network that they share."""
    from legato.sweeps.share import share
    from legato.whole_jobs.step import Step
    from legato.whole_jobs.told import caveats
    from legato.zoo.presets import machine_named

    if len(given) == 1:
        raise InputError(f"--share: does not apply to a {'whole job' if isinstance(given[0], Job) else 'program'}")
    _check_links(fidelity, "flows")
    if output is not None and any(isinstance(one, Program) for one in given):
        raise InputError("--output: a program has no timeline (expected whole jobs)")
    make_timelines(output, len(given), paths)
    jobs = [replace(one, machine=machine.on(one.machine)) if isinstance(one, Job) else one for one in given]
    links = next((job.machine for job in jobs if isinstance(job, Job)), None) or machine.on(machine_named("h100"))
    shift_s = one_each("shift", places.shift, len(jobs), parse_seconds, 0.0)
    switches = {axis.field: value for axis, value in machine.of("switches").items()}
    found = share(jobs, hosts=places.how, shift_s=shift_s, iterations=iterations, machine=links, **switches)
    steps = [step for step in found.alone if isinstance(step, Step)]
    notes = dict.fromkeys(f"{step.job.name}: {caveat}" for step in steps for caveat in caveats(step))
    for line in () if json else notes:
        note(line)
    title = f"{count(len(jobs), 'job')} on {found.network.workers:,} x {links.name}{said(machine)}"
    _show(found, f"{title}, {places.how}, by flows", output, said(machine).removeprefix(", "), json)


def _show(found: Shared, title: str, output: Path | None, network: str, json: bool) -> None:
    """Print the cases, or write them as JSON; write the jobs' timelines to a folder."""
    windows_s = {case["case"]: case["window_s"] for case in found.rows if "undisturbed" not in case["case"]}
    note_unseen(windows_s, found.network.disturbances)
    if output is not None:
        paths, written = timeline_paths(output, len(found.rows[0]["jobs"])), []
        for path, timeline in zip(paths, found.timelines(), strict=True):
            if timeline is not None:  # a job that starves has none
                files.write(path, replace(timeline, network=network))
                written.append(str(path))
        note(f"timelines of the jobs -> {output} (legato report {' '.join(written)} shows them)")
    if json:
        print_json({"cases": found.rows})
    else:
        print_table(found.table(title))


def sweep(  # noqa: PLR0913
    paths: list[Path],
    workloads: list[Workload],
    /,
    cells: Cells,
    given: SweptOptions,
    options: FabricOptions,
    how: Hosts,
    written: Written,
    running: Running,
    json: Json = False,
) -> None:
    """Simulate a mix of jobs on every network, and print a row for each; `--workers` has the workers of each job."""
    from legato.sweeps.share import sweep_shared

    written.check(paths, ".csv", ".html")
    if "servers" in given.axes:
        raise InputError("--servers: does not apply to jobs that share networks")
    default = BY_NAME["workers"].usual
    workers = [n or default for n in one_each("workers", given.axes.get("workers"), len(workloads), whole, default)]
    axes = {field: values for field, values in given.several().items() if field not in _OF_JOBS}
    settings = _each_job(cells, len(workloads)) | {"workers": workers, "hosts": how.how, "options": options}
    with running.cells(written.first) as kept:
        found = sweep_shared(workloads, axes, settings, **kept)

    def show() -> None:
        note_machine(given.named())
        jobs, networks = count(len(workloads), "job"), count(len(found), "network")
        print_table(found.table(", ".join([f"{jobs} on {networks}", *found.in_common(usual=False), how.how])))
        for line in found.failures:
            note(line)

    written.rows(found, show, json)


#: The axes that belong to the jobs, not to their network.
_OF_JOBS = ("workers", "servers")


def _each_job(cells: Cells, jobs: int) -> dict[str, Any]:
    """Return the fabric and the scheduler of each job, and the number of iterations."""
    _check_links(cells.fidelity, "transfers")
    fabrics = one_each("fabric", cells.fabric, jobs, fabric_of, "")
    if "all" in fabrics:
        raise InputError("--fabric: 'all' (expected, with --share, one fabric for all jobs, or one each)")
    schedulers = one_each("scheduler", cells.scheduler, jobs, scheduler_of, "plain")
    return {"fabric": fabrics, "scheduler": schedulers, "iterations": cells.iterations}


def _check_links(fidelity: str | None, detailed: Literal["transfers", "flows"]) -> None:
    if fidelity_of(fidelity, detailed) == "formulas":
        raise InputError(f"--share: does not apply to --fidelity formulas (expected --fidelity {detailed})")
