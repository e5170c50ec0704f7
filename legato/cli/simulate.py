"""`legato simulate`"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from legato.cli.axes import FabricOptions, Given, NetworkOptions
from legato.cli.options import (
    Json,
    Simulated,
    in_flight_words,
    keep_apart,
    one_each,
    split,
    timeline_paths,
    whole,
)
from legato.cli.output import fidelity_of, note, print_json, print_rows, progress
from legato.cli.programs import program_of, simulate_program
from legato.cli.share import JobOptions, simulate_shared
from legato.cli.shared_jobs import simulate_shared_jobs
from legato.cli.whole_jobs import job_of, jobs_of, simulate_job
from legato.core import files
from legato.core.cluster import UNDIVIDED, Cluster
from legato.core.errors import InputError, PlanError, TooLargeError
from legato.core.plan import Plan
from legato.core.text import count
from legato.core.timeline import Timeline
from legato.core.units import format_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.simulator.flow import FlowResult, Network
    from legato.simulator.flow.fabrics.protocol import Fabric

#: A timeline file is for looking at, and has no more workers than these.
_MOST_DRAWN = 32
#: The baseline of speedups is simulated beside other fabrics if it has no more pushes than these.
_MOST_BASELINE = 1_000_000


def simulate(
    typed: typer.Context,
    workloads: Annotated[
        list[Path],
        typer.Argument(
            metavar="W.json...", help="One workload for all workers, or one for each; with --share, one for each job."
        ),
    ],
    what: Simulated,
    network: NetworkOptions,
    options: FabricOptions,
    jobs: JobOptions,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="T.json",
            help="Write the fastest fabric's timeline to this file; with --share, one for each job to this folder.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Simulate one iteration on parameter servers, with help from switches, and on collectives.

    Switches that are sold to add up gradients (SHARP, NCCL's CollNet) are the fabric sharp: no server, sums inside
    hosts first, message by message. The fabrics multicast, aggregation and multicast+aggregation are parameter servers
    that switches help, as in the Network Operator Edition: all gradients cross a server's link, with a barrier.

    Speedups are over one parameter server without help from switches; beyond a million pushes to it, there
    are speedups only if it is one of the fabrics, and none where a second server is disturbed. A measured cluster's
    bandwidth and latency are those that explain the measured cost of its default collective.

    With --share, several jobs run on one network, and a row per job compares its iteration beside the others with
    that alone on the same hosts.

    A whole job, as legato workload --tensor writes it, is simulated on the links and hosts of its machine, with the
    topology and the disturbances that are given here, or by formulas; and so is a traced one, as legato
    import --program writes it, also on more --workers. With --share, several whole jobs run on one network.

    Example: [bold]legato simulate vgg.json --workers 32 --bandwidth 25Gbit --fabric all[/]
    """
    if what.plan is not None and what.scheduler is not None:
        raise InputError("--plan and --scheduler: give one or the other")
    plans = [] if what.plan is None else [Path(path) for path in split(str(what.plan))] if jobs.share else [what.plan]
    for written in timeline_paths(output, len(workloads)) if output is not None and jobs.share else [output]:
        keep_apart([*workloads, *plans, *([] if network.file is None else [network.file])], output=written)
    data = [files.load(path) for path in workloads]
    if jobs.share and len(data) > 1 and (several := jobs_of(data, workloads)):
        simulate_shared_jobs(typed, several)
        return
    if (job := job_of(data, workloads)) is not None:
        simulate_job(typed, job)
        return
    if (program := program_of(data, workloads)) is not None:
        simulate_program(typed, program)
        return
    read = [files.decode(one, Workload, str(path)) for one, path in zip(data, workloads, strict=True)]
    what = replace(what, fidelity=fidelity_of(what.fidelity, "transfers"))
    if what.fidelity == "formulas" and options:
        raise InputError(f"{min(options)}: means nothing by formulas (expected --fidelity transfers)")
    if jobs.share:
        simulate_shared(read, what, network, options, jobs, output, json)
    else:
        jobs.refuse()
        _simulate(read, what, network, options, output, json)


def _simulate(
    jobs: Sequence[Workload],
    what: Simulated,
    given: Given,
    options: dict[str, Any],
    output: Path | None,
    json: bool,
) -> None:
    """Simulate one network, and print a row for each fabric."""
    from legato.sweep.grid import network_of

    (workers,) = one_each("workers", given.axes["workers"], 1, whole, None)
    machines = given.replace(workers=workers).machines()
    number = machines.cluster.workers
    if len(jobs) not in (1, number):
        raise InputError(f"{count(len(jobs), 'workload')} for {count(number, 'worker')} (expected one, or one each)")
    network = network_of(given.values(machines.cluster))
    servers = given.axes["servers"]
    chosen = _fabrics(what.fabric, options if servers is None else options | {"servers": servers}, machines.cluster)
    own = None if what.plan is None else files.read(what.plan, Plan)
    if what.fidelity == "transfers":
        check, run = _flow(jobs, network, what.iterations)
    else:
        check, run = None, _collective(jobs, network)
        if what.fabric == "all":
            chosen = {name: one for name, one in chosen.items() if _is_priced(name, one, network, own)}
    plans = _plans(chosen, jobs[0], own or what.scheduler or "plain", network, leave_out=what.fabric == "all")
    if check is not None:
        for name, plan in plans.items():
            check(name, chosen[name], plan)
    costs_little = what.fidelity == "formulas" or number * len(jobs[0].tensors) <= _MOST_BASELINE
    rows, timeline = _rows(jobs[0], chosen, plans, run, with_baseline=costs_little and _fits_baseline(network))
    if output is not None:
        where = machines.describe_link(network)
        files.write(output, msgspec.structs.replace(timeline, job=jobs[0].name, network=where))
    if json:
        print_json(rows)
        return
    words = [f"{jobs[0].name} on {machines.describe_link(network)}", f"by {what.fidelity}"]
    words += in_flight_words(chosen.values()) if what.fidelity == "transfers" else []
    print_rows(", ".join(words), rows)
    free = [row["fabric"] for row in rows if row.get("undisturbed_s") == row["iteration_s"]]
    if free and network.disturbed:
        note(f"{given.axes['disturb']}: costs nothing with {', '.join(free)}; iterations take as long undisturbed")
    if output is not None:
        shown = len({span.worker for span in timeline.spans})
        drawn = f" ({shown} of {count(number, 'worker')})" if what.fidelity == "transfers" and shown < number else ""
        note(f"{timeline.name}, {format_seconds(timeline.iteration_s)}{drawn} -> {output}")


Check = Callable[[str, "Fabric", Plan], None]
#: Also returns what else is known of a fabric: columns that only some tables have.
Run = Callable[[str, "Fabric", Plan], "tuple[Timeline | FlowResult, dict[str, Any]]"]


def _fabrics(names: str, options: dict[str, Any], cluster: Cluster) -> dict[str, Fabric]:
    """The named fabrics, each with the options that it has. Raises `InputError` on an option that none of them has."""
    from legato.simulator.flow import FABRICS
    from legato.simulator.flow.fabrics import check_options, fitting

    chosen = list(FABRICS) if names == "all" else split(names)
    check_options(chosen, options)
    if cluster.servers:
        options = options | {"servers": cluster.servers}
    return {name: fitting(name, options) for name in chosen}


def _plans(
    chosen: dict[str, Fabric], job: Workload, by: Plan | str, network: Network, *, leave_out: bool
) -> dict[str, Plan]:
    """The plan for each fabric: a plan, or a scheduler's. With `leave_out`, fabrics without one are left out."""
    from legato.sweep.cell import plan_for

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
    """Whether the baseline of speedups has all the servers that are disturbed."""
    from legato.simulator.flow import BASELINE, FABRICS

    return all(one.kind != "server" or one.number < FABRICS[BASELINE].servers for one in network.disturbances)


def _rows(
    job: Workload, chosen: dict[str, Fabric], plans: dict[str, Plan], run: Run, *, with_baseline: bool
) -> tuple[list[dict[str, Any]], Timeline]:
    """One row per fabric with a plan, and the timeline of the fastest one.

    Speedups are None if the baseline is not one of the fabrics, and is not simulated as well (`with_baseline`).
    """
    from legato.simulator.flow import BASELINE, FABRICS, plain_plan

    baseline, plain = FABRICS[BASELINE], plain_plan(job, BASELINE)
    rows: list[dict[str, Any]] = []
    results: list[Timeline | FlowResult] = []
    baseline_s, began_s = None, _compiled_s()
    with progress("simulating") as advance:
        for done, (name, plan) in enumerate(plans.items()):
            advance(done, len(plans))
            start, compiled_s = time.perf_counter(), _compiled_s()
            found, more = run(name, chosen[name], plan)
            took_s, compiled_s = time.perf_counter() - start, _compiled_s() - compiled_s
            row = {"fabric": name, "iteration_s": found.iteration_s, "speedup": None, **more}
            row |= {"overlap": found.overlap, "utilization": found.utilization}
            rows.append({**row, "simulate_s": took_s - compiled_s})
            results.append(found)
            if chosen[name] == baseline and plan == plain:
                baseline_s = row["iteration_s"]
        if baseline_s is None and with_baseline:
            with contextlib.suppress(TooLargeError):
                found, more = run(BASELINE, baseline, plain)
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
    """The seconds for which this process has compiled the flow simulator, if it has loaded it."""
    loop = sys.modules.get("legato.simulator.flow.engine.loop")
    return 0.0 if loop is None else loop.compiled_s()


def _flow(jobs: Sequence[Workload], network: Network, iterations: int | None) -> tuple[Check, Run]:
    from legato.simulator.flow import simulate_flow
    from legato.simulator.flow.iterations.run import check_flow

    job = jobs[0] if len(jobs) == 1 else jobs
    if network.disturbances:  # a factor of 1 among them, so that both times are of the same iterations
        iterations = iterations or 1

    def check(name: str, fabric: Fabric, plan: Plan) -> None:
        try:
            check_flow(job, plan, fabric, network, iterations=iterations)
        except TooLargeError as error:
            raise TooLargeError(f"{name}: {error}") from None

    def run(name: str, fabric: Fabric, plan: Plan) -> tuple[FlowResult, dict[str, Any]]:
        result = simulate_flow(job, plan, fabric, network, iterations=iterations, keep_transfers=False)
        if not network.disturbances:
            return result, {}
        quiet = replace(network, disturbances=())
        ends_s = result.end_s.tolist()
        quiet_s = float(simulate_flow(job, plan, fabric, quiet, iterations=iterations, keep_transfers=False).end_s[-1])
        lost_s = network.lost_s(ends_s[-1], fabric.host_shape(network))
        propagated = (ends_s[-1] - quiet_s) / lost_s if lost_s > 0 else None
        each_s = [end - before for before, end in itertools.pairwise([0.0, *ends_s])]
        more = {"longest_s": max(each_s)} if len(each_s) > 1 else {}
        means_s = {"iteration_s": ends_s[-1] / len(each_s), "undisturbed_s": quiet_s / len(each_s)}
        return result, {**means_s, **more, "lost_s": lost_s, "propagated": propagated}

    return check, run


def _collective(jobs: Sequence[Workload], network: Network) -> Run:
    """Simulate one shared resource and identical workers, as planners do."""
    from legato.simulator import collective

    if len(jobs) > 1 or not network.plain:
        raise InputError("--fidelity formulas: needs like hosts behind one switch (expected --fidelity transfers)")

    def run(name: str, fabric: Fabric, plan: Plan) -> tuple[Timeline, dict[str, Any]]:
        cluster = _cluster(name, fabric, network)
        if cluster is None:
            raise InputError(f"--fidelity formulas: {name!r} has no cost formula (expected --fidelity transfers)")
        if fabric.servers and (what := _beyond_servers(plan)):
            raise InputError(f"{name}: a plan with {what} on parameter servers (expected a fabric without servers)")
        # At this fidelity a message names its collective, and the cluster has only one.
        messages = tuple(msgspec.structs.replace(message, collective=None) for message in plan.messages)
        plan = msgspec.structs.replace(plan, scheduler=name, messages=messages)
        return collective.simulate(jobs[0], plan, cluster), {}

    return run


def _is_priced(name: str, fabric: Fabric, network: Network, plan: Plan | None) -> bool:
    """Whether there is a formula for the fabric, and for the messages of a plan if it is given."""
    if _cluster(name, fabric, network) is None:
        return False
    if plan is not None and fabric.servers:
        return not _beyond_servers(plan)
    return plan is None or name not in UNDIVIDED or all(one.kind == "all_reduce" for one in plan.messages)


def _beyond_servers(plan: Plan) -> str:
    """What of a plan parameter servers cannot do; "" if they can do everything."""
    if plan.shard != "none":
        return f"shard {plan.shard!r}"
    return "wire formats" if any(message.wire is not None for message in plan.messages) else ""


def _cluster(name: str, fabric: Fabric, network: Network) -> Cluster | None:
    """The machines with the cost of an all-reduce, or of a push and a pull; None for a fabric that has no formula."""
    from legato.simulator.flow.network.network import PRICED_AS
    from legato.sweep.grid import fabric_names

    return network.cluster(name, fabric.servers) if PRICED_AS.get(name, name) in fabric_names("formulas") else None
