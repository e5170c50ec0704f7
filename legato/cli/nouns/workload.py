"""Workloads: `legato simulate` on one network, with a row for each fabric, and `legato sweep` on many networks."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from legato.cli.axes import FabricOptions, Given, NetworkOptions, SweptOptions, note_machine
from legato.cli.nouns.running import MOST_SHOWN, Cells, Running, Simulated, Written
from legato.cli.options import (
    Json,
    TimelineOutput,
    fabric_of,
    in_flight_words,
    keep_apart,
    one_each,
    scheduler_of,
    split,
    whole,
)
from legato.cli.output import fidelity_of, note, print_json, print_rows, print_table, progress
from legato.core import files
from legato.core.axes import NETWORK, SERVERS, SWEPT
from legato.core.cluster import SEND_S, Cluster
from legato.core.errors import InputError, PlanError, TooLargeError
from legato.core.plan import Plan
from legato.core.text import count
from legato.core.timeline import Timeline
from legato.core.units import format_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.reports.model import SweepRow
    from legato.schedule import Scheduler
    from legato.simulator.flow import FlowResult, Network
    from legato.simulator.flow.fabrics.protocol import Fabric
    from legato.sweeps import Grid
    from legato.sweeps.cell import Simulation

__all__ = ["simulate", "sweep"]

#: The largest number of workers in a timeline file, which is meant to be drawn.
_MOST_DRAWN = 32
#: If speedups need a baseline that is not among the fabrics, it is simulated up to this number of pushes.
_MOST_BASELINE = 1_000_000


def simulate(
    paths: list[Path],
    jobs: list[Workload],
    /,
    what: Simulated,
    given: NetworkOptions,
    options: FabricOptions,
    output: TimelineOutput = None,
    json: Json = False,
) -> None:
    """Simulate one network, and print a row for each fabric."""
    from legato.sweeps.cell import Simulation
    from legato.sweeps.grid import network_of

    what.check()
    keep_apart([*paths, *([] if what.plan is None else [what.plan]), *given.files], output=output)
    fidelity = fidelity_of(what.fidelity, "transfers")
    if fidelity == "formulas" and options:
        raise InputError(f"{min(options)}: does not apply to --fidelity formulas (expected --fidelity transfers)")
    (workers,) = one_each("workers", given.axes.get("workers"), 1, whole, None)
    given = given.replace(workers=workers)
    machines = given.machines()
    number = machines.cluster.workers
    if len(jobs) not in (1, number):
        raise InputError(f"{count(len(jobs), 'workload')} for {count(number, 'worker')} (expected one, or one each)")
    network = network_of(given.values(machines.cluster))
    servers = given.axes.get("servers")
    chosen = _fabrics(what.fabric, options if servers is None else options | {"servers": servers}, machines.cluster)
    own = None if what.plan is None else files.read(what.plan, Plan)
    # With any disturbance, even one by a factor of 1, both times are for one iteration.
    iterations = 1 if what.iterations is None and network.disturbances else what.iterations
    simulation = Simulation(jobs, network, fidelity, iterations)
    if fidelity == "formulas" and what.fabric == "all":
        chosen = {name: one for name, one in chosen.items() if not simulation.beyond_formulas(own, name, one)}
    plans = _plans(
        chosen, jobs[0], own or scheduler_of(what.scheduler or "plain"), network, leave_out=what.fabric == "all"
    )
    for name, plan in plans.items():
        simulation.check(plan, name, chosen[name])
    costs_little = fidelity == "formulas" or number * len(jobs[0].tensors) <= _MOST_BASELINE
    rows, timeline = _rows(simulation, chosen, plans, with_baseline=costs_little and _fits_baseline(network))
    if output is not None:
        where = machines.describe_link(network)
        files.write(output, msgspec.structs.replace(timeline, job=jobs[0].name, network=where))
    if json:
        print_json(rows)
        return
    note_machine(machines.machine)
    words = [f"{jobs[0].name} on {machines.describe_link(network)}", f"by {fidelity}"]
    words += in_flight_words(chosen.values()) if fidelity == "transfers" else []
    print_rows(", ".join(words), rows)
    free = [row["fabric"] for row in rows if row.get("undisturbed_s") == row["iteration_s"]]
    if free and network.disturbed:
        note(f"{given.axes['disturb']}: costs nothing with {', '.join(free)}; iterations take as long without it")
    if output is not None:
        shown = len({span.worker for span in timeline.spans})
        drawn = f" ({shown} of {count(number, 'worker')})" if fidelity == "transfers" and shown < number else ""
        note(f"{timeline.name}, {format_seconds(timeline.iteration_s)}{drawn} -> {output}")


def _fabrics(names: str, options: dict[str, Any], cluster: Cluster) -> dict[str, Fabric]:
    """Return the named fabrics, each with its options; raise `InputError` on an option that none of them has."""
    from legato.simulator.flow.fabrics import check_options, fabric_names, fitting, label

    chosen = fabric_names() if names == "all" else list(map(fabric_of, split(names)))
    check_options(chosen, options)
    if cluster.servers:
        options = options | {"servers": cluster.servers}
    return {label(one): fitting(one, options) for one in chosen}


def _plans(
    chosen: dict[str, Fabric], job: Workload, by: Plan | str | Scheduler, network: Network, *, leave_out: bool
) -> dict[str, Plan]:
    """Return the plan for each fabric: the given plan, or the plan of a scheduler.

    With `leave_out`, a fabric that the scheduler cannot plan for is left out. Otherwise raises `PlanError`.
    """
    from legato.sweeps.cell import plan_for

    plans = {}
    for name, fabric in chosen.items():
        try:
            plans[name] = by if isinstance(by, Plan) else plan_for(by, job, name, fabric, network)
        except PlanError as error:
            if not leave_out:
                raise
            note(f"{name} is left out: {error}")
    return plans


def _fits_baseline(network: Network) -> bool:
    """Return whether every server that a disturbance names exists in the fabric to which speedups are relative."""
    from legato.simulator.flow import BASELINE, FABRICS

    return all(one.kind != "server" or one.number < FABRICS[BASELINE].servers for one in network.disturbances)


def _rows(
    simulation: Simulation, chosen: dict[str, Fabric], plans: dict[str, Plan], *, with_baseline: bool
) -> tuple[list[dict[str, Any]], Timeline]:
    """Return one row per fabric with a plan, and the timeline of the fastest fabric.

    Speedups are relative to a baseline. With `with_baseline`, a baseline that is not among the fabrics is simulated
    too. Without a simulated baseline, speedups are None.
    """
    from legato.simulator.flow import BASELINE, FABRICS, plain_plan

    baseline, plain = FABRICS[BASELINE], plain_plan(simulation.workloads[0], BASELINE)
    rows: list[dict[str, Any]] = []
    results: list[Timeline | FlowResult] = []
    baseline_s, began_s = None, _compiled_s()
    with progress("simulating") as advance:
        for done, (name, plan) in enumerate(plans.items()):
            advance(done, len(plans))
            start, compiled_s = time.perf_counter(), _compiled_s()
            found = simulation.run(plan, name, chosen[name])
            more = _disturbed(simulation, found, plan, name, chosen[name])
            took_s, compiled_s = time.perf_counter() - start, _compiled_s() - compiled_s
            row = {"fabric": name, "iteration_s": found.iteration_s, "speedup": None, **more}
            row |= {"overlap": found.overlap, "utilization": found.utilization}
            rows.append({**row, "simulate_s": took_s - compiled_s})
            results.append(found)
            if chosen[name] == baseline and plan == plain:
                baseline_s = row["iteration_s"]
        if baseline_s is None and with_baseline:
            with contextlib.suppress(TooLargeError):
                found = simulation.run(plain, BASELINE, baseline)
                more = _disturbed(simulation, found, plain, BASELINE, baseline)
                baseline_s = more.get("iteration_s", found.iteration_s)
    if (compiled_s := _compiled_s() - began_s) > 0:
        note(f"the simulator was compiled in {format_seconds(compiled_s)}, once")
    if baseline_s is not None:
        for row in rows:
            row["speedup"] = baseline_s / row["iteration_s"] if row["iteration_s"] > 0 else 1.0
    fastest, name = min(zip(results, plans, strict=True), key=lambda one: one[0].iteration_s)
    if not isinstance(fastest, Timeline):
        fastest = fastest.timeline(sorted(fastest.ranks.tolist())[:_MOST_DRAWN], name)
    return rows, fastest


def _compiled_s() -> float:
    """Return how many seconds this process has spent compiling the flow simulator."""
    loop = sys.modules.get("legato.simulator.flow.engine.loop")
    return 0.0 if loop is None else loop.compiled_s()


def _disturbed(
    simulation: Simulation, found: Timeline | FlowResult, plan: Plan, name: str, fabric: Fabric
) -> dict[str, Any]:
    """Return the additional columns of a fabric's row on a disturbed network, or nothing without disturbances."""
    network = simulation.network
    if isinstance(found, Timeline) or not network.disturbances:
        return {}
    quiet = replace(simulation, network=replace(network, disturbances=())).run(plan, name, fabric)
    assert not isinstance(quiet, Timeline)
    ends_s, quiet_s = found.end_s.tolist(), float(quiet.end_s[-1])
    each_s = [end - before for before, end in itertools.pairwise([0.0, *ends_s])]
    more = {"longest_s": max(each_s)} if len(each_s) > 1 else {}
    means_s = {"iteration_s": ends_s[-1] / len(each_s), "undisturbed_s": quiet_s / len(each_s)}
    return {**means_s, **more}


def sweep(
    paths: list[Path],
    workloads: list[Workload],
    /,
    cells: Cells,
    network: SweptOptions,
    options: FabricOptions,
    written: Written,
    running: Running,
    json: Json = False,
) -> None:
    """Simulate every combination of workloads, networks and schedulers, and write and print the rows."""
    from legato.sweeps import Grid
    from legato.sweeps import sweep as sweep_grid
    from legato.sweeps.grid import fabric_names

    written.check(paths, ".parquet", ".csv", ".html")
    fidelity = fidelity_of(cells.fidelity, "transfers")
    grid = Grid(
        workloads=tuple(workloads),
        fabrics=tuple(fabric_names(fidelity) if cells.fabric == "all" else map(fabric_of, split(cells.fabric))),
        schedulers=tuple(map(scheduler_of, split("plain" if cells.scheduler is None else cells.scheduler))),
        fidelity=fidelity,
        axes=network.several(),
        iterations=cells.iterations,
        options=options,
    )
    with running.cells(written.first) as how:
        rows = sweep_grid(grid, **how)
    written.rows(rows, partial(_show, rows, grid, network), json)


def _same_everywhere(rows: Sequence[SweepRow], grid: Grid) -> list[str]:
    """Return in words what all cells have in common: machines, links, and other values that are not defaults."""
    from legato.simulator.flow.fabrics import fitting
    from legato.sweeps.grid import PLAIN

    def only(name: str) -> list[str]:
        names = {getattr(row, name) for row in rows}
        return list(names) if len(names) == 1 else []

    same = [(axis, values[0]) for axis in NETWORK if axis.words and len(values := grid.values[axis.field]) == 1]
    said = [(axis, axis.say(axis.write(v))) for axis, v in same if v != axis.usual or (axis.in_cluster and axis.column)]
    words = only("workload") + [text for axis, text in said if axis.column]
    words += only("fabric") + [name for name in only("scheduler") if name != PLAIN]
    words += _sends(grid) + [text for axis, text in said if not axis.column]
    others = [f"{name.replace('_', ' ')} {value}" for name, value in grid.options.items() if name != "in_flight"]
    if grid.fidelity == "formulas":
        return [*words, *others, "by formulas"]
    return [*words, *others, *in_flight_words(fitting(one, grid.options) for one in grid.fabrics)]


def _sends(grid: Grid) -> list[str]:
    """Return in words how long a send keeps its sender busy; the list is empty if this time is 0."""
    latencies_s, (send_s,) = grid.values["latency_s"], grid.values["send_s"]
    latest_s = min(SEND_S, max(latencies_s)) if send_s is None else send_s
    less = ", or the latency" if latest_s > min(latencies_s) else ""
    return [f"{format_seconds(latest_s)} a send{less}"] if latest_s else []


def _show(rows: Sequence[SweepRow], grid: Grid, network: Given) -> None:
    """Print one row per cell, or, if there are many cells, only the row of the fastest cell on each network.

    The title has the values that all cells share.
    """
    from legato.reports.sweeps import sweep_table

    note_machine(network.named())
    shown, cluster = list(rows), "" if network.file is None else f"{network.file}: "
    title = ", ".join([cluster + count(len(rows), "cell"), *_same_everywhere(rows, grid)])
    if len(rows) > MOST_SHOWN:
        shown = _fastest_each(rows)
        title += f"; the fastest on each of {count(len(shown), 'network')}"
    if len(shown) > MOST_SHOWN:
        title += f" ({MOST_SHOWN} shown)"
    print_table(replace(sweep_table(rows, title), rows=shown[:MOST_SHOWN]))
    failed = [row for row in rows if row.error is not None]
    for error in dict.fromkeys(row.error for row in failed):
        names = ", ".join(dict.fromkeys(f"{row.scheduler} on {row.fabric}" for row in failed if row.error == error))
        note(f"{sum(row.error == error for row in failed):,} failed ({names}): {error}")


def _fastest_each(rows: Sequence[SweepRow]) -> list[SweepRow]:
    best: dict[Any, SweepRow] = {}
    for row in rows:
        machines = row.workload, *(row.axes[axis.field] for axis in SWEPT if axis is not SERVERS)
        seconds = best[machines].iteration_s if machines in best else None
        if machines not in best or (row.iteration_s is not None and (seconds is None or row.iteration_s < seconds)):
            best[machines] = row
    return list(best.values())
