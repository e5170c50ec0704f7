"""`legato simulate`"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from legato.cli.options import (
    DISTURB_HELP,
    DISTURB_METAVAR,
    FABRIC_HELP,
    GPUS_PER_HOST_HELP,
    JITTER_HELP,
    OVERSUBSCRIPTION_HELP,
    RACKS_HELP,
    SLOW_HELP,
    SLOW_LINK_HELP,
    SPINES_HELP,
    WORKERS,
    WORKERS_HELP,
    Aggregation,
    Balance,
    Bandwidth,
    Barrier,
    ClusterFile,
    CoreOversubscription,
    Distribution,
    Fidelity,
    GpusPerCard,
    InFlight,
    Iterations,
    Json,
    Latency,
    LocalBandwidth,
    MessageBytes,
    Placement,
    Ports,
    Reduce,
    Seed,
    Send,
    ServerBandwidth,
    Servers,
    Sharing,
    Topology,
    fabric_options,
    in_flight_words,
    keep_apart,
    machines_of,
    quantity,
    split,
)
from legato.cli.output import note, print_json, print_rows, progress
from legato.cli.share import JobOptions, one_each, simulate_shared, timeline_paths, whole
from legato.core import files
from legato.core.cluster import COLLECTIVES, UNDIVIDED, Cluster, LinearCost
from legato.core.errors import InputError, PlanError, TooLargeError
from legato.core.plan import Plan
from legato.core.text import count
from legato.core.timeline import Timeline
from legato.core.units import format_seconds, parse_bandwidth
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.simulator.flow import Network
    from legato.simulator.flow.fabrics.protocol import Fabric

#: A timeline file is for looking at, and has no more workers than these.
_MOST_DRAWN = 32
#: The baseline of speedups is simulated beside other fabrics if it has no more pushes than these.
_MOST_BASELINE = 1_000_000


def simulate(
    workloads: Annotated[
        list[Path],
        typer.Argument(
            metavar="W.json...", help="One workload for all workers, or one for each; with --share, one for each job."
        ),
    ],
    fabric: Annotated[str, typer.Option(help=FABRIC_HELP)] = "all",
    fidelity: Fidelity = "flow",
    cluster: ClusterFile = None,
    workers: Annotated[
        str | None,
        typer.Option(help=WORKERS_HELP, show_default=str(WORKERS), rich_help_panel="Network", metavar="INTEGER"),
    ] = None,
    servers: Servers = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    send: Send = None,
    reduce: Reduce = None,
    server_bandwidth: ServerBandwidth = None,
    gpus_per_host: Annotated[int, typer.Option(help=GPUS_PER_HOST_HELP, rich_help_panel="Network")] = 1,
    gpus_per_card: GpusPerCard = 1,
    local_bandwidth: LocalBandwidth = "100Gbit",
    topology: Topology = "leaf-spine",
    racks: Annotated[int, typer.Option(help=RACKS_HELP, rich_help_panel="Network")] = 1,
    spines: Annotated[int, typer.Option(help=SPINES_HELP, rich_help_panel="Network")] = 1,
    ports: Ports = None,
    oversubscription: Annotated[float, typer.Option(help=OVERSUBSCRIPTION_HELP, rich_help_panel="Network")] = 1.0,
    core_oversubscription: CoreOversubscription = 1.0,
    balance: Balance = "ecmp",
    sharing: Sharing = "fifo",
    jitter: Annotated[float, typer.Option(help=JITTER_HELP, rich_help_panel="Network")] = 0.0,
    slow: Annotated[float, typer.Option(help=SLOW_HELP, rich_help_panel="Network")] = 1.0,
    slow_link: Annotated[float, typer.Option(help=SLOW_LINK_HELP, rich_help_panel="Network")] = 1.0,
    seed: Seed = 0,
    disturb: Annotated[
        str | None,
        typer.Option(metavar=DISTURB_METAVAR, help=DISTURB_HELP, show_default="none", rich_help_panel="Network"),
    ] = None,
    placement: Placement = None,
    distribution: Distribution = None,
    barrier: Barrier = None,
    aggregation: Aggregation = None,
    message_bytes: MessageBytes = None,
    in_flight: InFlight = None,
    iterations: Iterations = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="Name of the scheduler that plans; plain sends one message per tensor.", show_default="plain"
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="P.json", help="Run the plan in this file instead of a scheduler's.")
    ] = None,
    share: Annotated[
        bool,
        typer.Option(
            "--share",
            help="Simulate jobs that share a network. Then --workers, --fabric, --scheduler, --plan and the options of "
            "jobs take one value for all jobs, or one for each, separated by commas.",
            rich_help_panel="Jobs",
        ),
    ] = False,
    hosts: Annotated[
        Literal["packed", "spread", "random", "together"] | None,
        typer.Option(
            help="Hosts of the jobs: one job after the other, alternately over racks, at random, or all jobs on the "
            "same hosts.",
            show_default="packed",
            rich_help_panel="Jobs",
        ),
    ] = None,
    shift: Annotated[
        str | None,
        typer.Option(help="Time after which a job begins.", show_default="0", rich_help_panel="Jobs"),
    ] = None,
    best_shift: Annotated[
        bool,
        typer.Option(
            "--best-shift",
            help="Find the shifts with the smallest slowdowns, and say what it costs to miss them.",
            rich_help_panel="Jobs",
        ),
    ] = False,
    pace: Annotated[
        str | None,
        typer.Option(
            help="Least time between the beginnings of a job's iterations, which keeps its shift up.",
            show_default="none",
            rich_help_panel="Jobs",
        ),
    ] = None,
    priority: Annotated[
        str | None,
        typer.Option(
            help="Priority of a job on links, the highest first, such as 2,1; or intensity, for those of Crux only.",
            show_default="equal",
            rich_help_panel="Jobs",
        ),
    ] = None,
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

    Speedups are over one parameter server without help from switches; beyond a million pushes to it, there
    are speedups only if it is one of the fabrics, and none where a second server is disturbed. A measured cluster's
    bandwidth and latency are those that explain the measured cost of its default collective.

    With --share, several jobs run on one network, and a row per job compares its iteration beside the others with
    that alone on the same hosts.

    Example: [bold]legato simulate vgg.json --workers 32 --bandwidth 25Gbit --fabric all[/]
    """
    from legato.simulator.flow import Network
    from legato.simulator.flow.disturbances import parse_disturbances
    from legato.simulator.flow.network import last_worker
    from legato.simulator.flow.placement import num_hosts

    if plan is not None and scheduler is not None:
        raise InputError("--plan and --scheduler: give one or the other")
    if disturb is not None and not share and iterations not in (None, 1):
        raise InputError(f"--iterations: {iterations} (expected 1 with --disturb, whose times count from its start)")
    plans = [] if plan is None else [Path(path) for path in split(str(plan))] if share else [plan]
    for written in [output] if output is None or not share else timeline_paths(output, len(workloads)):
        keep_apart([*workloads, *plans, *([] if cluster is None else [cluster])], output=written)
    jobs = [files.read(path, Workload) for path in workloads]
    given = JobOptions(fabric, scheduler, None if plan is None else str(plan), shift, pace, priority, hosts, best_shift)
    if not share:
        given.refuse()
    counts = one_each("workers", workers, len(jobs) if share else 1, whole, None)
    machines = machines_of(
        cluster, max(counts, key=lambda n: n or 0), bandwidth, latency, reduce, servers=servers, send=send
    )
    plain, number = Network.of(machines.cluster), machines.cluster.workers
    if share:
        each = [number if one is None else one for one in counts]
        if min(each) < 1:
            raise InputError(f"workers: {min(each)} (expected at least 1)")
        in_a_host = max(1, gpus_per_host)  # less is refused by the network
        number = in_a_host * num_hosts(each, given.placement, in_a_host)
    elif len(jobs) not in (1, number):
        raise InputError(f"{count(len(jobs), 'workload')} for {count(number, 'worker')} (expected one, or one each)")
    network = replace(
        plain,
        workers=number,
        gpus_per_host=gpus_per_host,
        gpus_per_card=gpus_per_card,
        local_bandwidth_bps=quantity("local-bandwidth", local_bandwidth, parse_bandwidth),
        topology=topology,
        racks=racks,
        spines=spines,
        ports=ports,
        oversubscription=oversubscription,
        core_oversubscription=core_oversubscription,
        balance=balance,
        compute_scale=last_worker("slow", slow, number),
        link_scale=last_worker("slow_link", slow_link, number, gpus_per_card),
        server_bandwidth_bps=(
            None if server_bandwidth is None else quantity("server-bandwidth", server_bandwidth, parse_bandwidth)
        ),
        sharing=sharing,
        jitter=jitter,
        seed=seed,
        disturbances=() if disturb is None else parse_disturbances(disturb),
    )
    options = fabric_options(
        placement=placement,
        distribution=distribution,
        barrier=barrier,
        aggregation=aggregation,
        message_bytes=message_bytes,
        in_flight=in_flight,
    )
    if fidelity == "collective" and (unseen := options.keys() - {"aggregation"}):
        raise InputError(f"{min(unseen)}: means nothing at collective fidelity (expected --fidelity flow)")
    if share:
        if fidelity == "collective":
            raise InputError("--share: means nothing at collective fidelity (expected --fidelity flow)")
        options |= {} if not machines.cluster.servers else {"servers": machines.cluster.servers}
        simulate_shared(
            jobs, each, network, machines.describe_shared(network), given, options, iterations, output, json
        )
        return
    chosen = _fabrics(fabric, options if servers is None else options | {"servers": servers}, machines.cluster)
    own = None if plan is None else files.read(plan, Plan)
    planned = _planner(jobs[0], None if scheduler == "plain" else scheduler, own, network)
    if fidelity == "flow":
        check, run = _flow(jobs, network, iterations)
    else:
        check, run = None, _collective(jobs, network)
        if fabric == "all":
            chosen = {name: one for name, one in chosen.items() if _cluster(name, one, network) is not None}
            if own is not None and _beyond_servers(own):
                chosen = {name: one for name, one in chosen.items() if not one.servers}
            if own is not None and any(message.kind != "all_reduce" for message in own.messages):
                chosen = {name: one for name, one in chosen.items() if name not in UNDIVIDED}
    costs_little = fidelity == "collective" or number * len(jobs[0].tensors) <= _MOST_BASELINE
    with_baseline = costs_little and _fits_baseline(network)
    rows, timeline = _rows(chosen, planned, check, run, with_baseline=with_baseline, leave_out=fabric == "all")
    if output is not None:
        where = machines.describe_link(network)
        files.write(output, msgspec.structs.replace(timeline, job=jobs[0].name, network=where))
    if json:
        print_json(rows)
        return
    words = [f"{jobs[0].name} on {machines.describe_link(network)}", f"{fidelity} fidelity"]
    words += in_flight_words(chosen.values()) if fidelity == "flow" else []
    print_rows(", ".join(words), rows)
    if output is not None:
        shown = len({span.worker for span in timeline.spans})
        drawn = f" ({shown} of {count(number, 'worker')})" if fidelity == "flow" and shown < number else ""
        note(f"{timeline.name}, {format_seconds(timeline.iteration_s)}{drawn} -> {output}")


Check = Callable[[str, "Fabric", Plan | None], None]
Run = Callable[[str, "Fabric", Plan | None], tuple[Timeline | Callable[[], Timeline], dict[str, Any]]]


def _fabrics(names: str, options: dict[str, Any], cluster: Cluster) -> dict[str, Fabric]:
    """The named fabrics, each with the options that it has. Raises `InputError` on an option that none of them has."""
    from legato.simulator.flow import FABRICS
    from legato.simulator.flow.fabrics import check_options, fitting

    chosen = list(FABRICS) if names == "all" else split(names)
    check_options(chosen, options)
    if cluster.servers:
        options = options | {"servers": cluster.servers}
    return {name: fitting(name, options) for name in chosen}


def _planner(
    job: Workload, scheduler: str | None, plan: Plan | None, network: Network
) -> Callable[[str, Fabric], Plan | None]:
    """A function that plans for a fabric, or returns None for one message per tensor."""

    def planned(name: str, fabric: Fabric) -> Plan | None:
        if scheduler is None:
            return plan
        from legato.schedule import schedule
        from legato.simulator.flow.pricing import cluster_for

        return schedule(scheduler, job, cluster_for(name, fabric, network))

    return planned


def _fits_baseline(network: Network) -> bool:
    """Whether the baseline of speedups has all the servers that are disturbed."""
    from legato.simulator.flow import BASELINE, FABRICS

    return all(one.kind != "server" or one.number < FABRICS[BASELINE].servers for one in network.disturbances)


def _rows(
    chosen: dict[str, Fabric],
    planned: Callable[[str, Fabric], Plan | None],
    check: Check | None,
    run: Run,
    *,
    with_baseline: bool,
    leave_out: bool,
) -> tuple[list[dict[str, Any]], Timeline]:
    """One row per fabric, and the timeline of the fastest one.

    With `leave_out`, fabrics for which there is no plan are left out. `check` refuses what is too large, of all
    fabrics before the first one runs. Speedups are None if the baseline is not one of the fabrics, and is not
    simulated as well (`with_baseline`).
    """
    from legato.simulator.flow import BASELINE, FABRICS

    plans = {}
    for name, fabric in chosen.items():
        try:
            plans[name] = planned(name, fabric)
        except PlanError as error:
            if not leave_out:
                raise
            note(f"{name} is left out: {error}")
    chosen = {name: fabric for name, fabric in chosen.items() if name in plans}
    if check is not None:
        for name, fabric in chosen.items():
            check(name, fabric, plans[name])
    rows: list[dict[str, Any]] = []
    drawn, baseline_s = [], None
    with progress("simulating") as advance:
        for done, (name, fabric) in enumerate(chosen.items()):
            advance(done, len(chosen))
            plan = plans[name]
            start = time.perf_counter()
            draw, found = run(name, fabric, plan)
            simulate_s = time.perf_counter() - start
            iteration_s = found.pop("iteration_s")
            rows.append({"fabric": name, "iteration_s": iteration_s, "speedup": None, **found})
            rows[-1]["simulate_s"] = simulate_s
            drawn.append(draw)
            if plan is None and fabric == FABRICS[BASELINE]:
                baseline_s = iteration_s
        if baseline_s is None and with_baseline:
            with contextlib.suppress(TooLargeError):
                baseline_s = run(BASELINE, FABRICS[BASELINE], None)[1]["iteration_s"]
    for row in rows:
        if baseline_s is not None:
            row["speedup"] = baseline_s / row["iteration_s"] if row["iteration_s"] > 0 else 1.0
    fastest = drawn[min(range(len(rows)), key=lambda i: rows[i]["iteration_s"])]
    return rows, fastest if isinstance(fastest, Timeline) else fastest()


def _flow(jobs: Sequence[Workload], network: Network, iterations: int | None) -> tuple[Check, Run]:
    from legato.simulator.flow import simulate_flow
    from legato.simulator.flow.run import check_flow

    job = jobs[0] if len(jobs) == 1 else jobs
    if network.disturbances:  # a factor of 1 among them, so that both times are of the first iteration
        iterations = 1

    def check(name: str, fabric: Fabric, plan: Plan | None) -> None:
        try:
            check_flow(job, plan, fabric, network, iterations=iterations)
        except TooLargeError as error:
            raise TooLargeError(f"{name}: {error}") from None

    def run(name: str, fabric: Fabric, plan: Plan | None) -> tuple[Callable[[], Timeline], dict[str, Any]]:
        result = simulate_flow(job, plan, fabric, network, iterations=iterations, keep_transfers=False)
        drawn = sorted(result.ranks.tolist())[:_MOST_DRAWN]
        disturbed = {}
        if network.disturbances:
            quiet = replace(network, disturbances=())
            quiet_s = simulate_flow(job, plan, fabric, quiet, iterations=iterations, keep_transfers=False).iteration_s
            lost_s = network.lost_s(result.iteration_s, fabric.host_shape(network))
            propagated = (result.iteration_s - quiet_s) / lost_s if lost_s > 0 else None
            disturbed = {"undisturbed_s": quiet_s, "lost_s": lost_s, "propagated": propagated}
        return lambda: result.timeline(drawn, name), {
            "iteration_s": result.iteration_s,
            **disturbed,
            "overlap": result.overlap,
            "utilization": result.utilization,
        }

    return check, run


def _collective(jobs: Sequence[Workload], network: Network) -> Run:
    """Simulate one shared resource and identical workers, as planners do."""
    from legato.simulator import collective
    from legato.simulator.flow import plain_plan

    if len(jobs) > 1 or not network.plain:
        raise InputError("--fidelity collective: needs like hosts behind one switch (expected --fidelity flow)")

    def run(name: str, fabric: Fabric, plan: Plan | None) -> tuple[Timeline, dict[str, Any]]:
        cluster = _cluster(name, fabric, network)
        if cluster is None:
            raise InputError(f"--fidelity collective: {name!r} has no cost formula (expected --fidelity flow)")
        if fabric.servers and plan is not None and (what := _beyond_servers(plan)):
            raise InputError(f"{name}: a plan with {what} on parameter servers (expected a fabric without servers)")
        plan = plain_plan(jobs[0], fabric) if plan is None else plan
        # At this fidelity a message names its collective, and the cluster has only one.
        messages = tuple(msgspec.structs.replace(message, collective=None) for message in plan.messages)
        timeline = collective.simulate(
            jobs[0], msgspec.structs.replace(plan, scheduler=name, messages=messages), cluster
        )
        return timeline, {
            "iteration_s": timeline.iteration_s,
            "overlap": timeline.overlap,
            "utilization": timeline.utilization,
        }

    return run


def _beyond_servers(plan: Plan) -> str:
    """What of a plan parameter servers cannot do; "" if they can do everything."""
    if plan.shard != "none":
        return f"shard {plan.shard!r}"
    return "wire formats" if any(message.wire is not None for message in plan.messages) else ""


def _cluster(name: str, fabric: Fabric, network: Network) -> Cluster | None:
    """The machines with the cost of an all-reduce, or of a push and a pull (what the servers' links carry).

    None for a fabric that has no formula.
    """
    from legato.simulator.flow.fabrics.servers import Servers
    from legato.simulator.flow.network import PRICED_AS

    if not isinstance(fabric, Servers):
        return network.cluster(name) if PRICED_AS.get(name, name) in COLLECTIVES else None
    # Copies of each byte that a server receives and sends; a worker receives and sends one.
    received = max(1, (1 if fabric.aggregation else network.workers) / fabric.servers)
    sent = max(1, (1 if fabric.multicast else network.workers) / fabric.servers)
    alpha_s = 2 * network.latency_s + network.sending_s * (sent - 1)
    return Cluster(network.workers, {name: LinearCost(alpha_s, (received + sent) * network.s_per_byte)})
