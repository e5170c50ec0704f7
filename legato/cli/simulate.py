"""`legato simulate`"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
import typer

from legato.cli.network_options import (
    Aggregation,
    Barrier,
    Distribution,
    Group,
    InFlight,
    Iterations,
    MessageBytes,
    Placement,
    Reduce,
    Seed,
    Sharing,
    fabric_options,
    sharing_of,
)
from legato.cli.options import Json
from legato.cli.output import note, print_json, print_rows, progress
from legato.core import files
from legato.core.cluster import COLLECTIVES, Cluster, LinearCost
from legato.core.errors import InputError, unknown_name
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.units import format_seconds, parse_bandwidth, parse_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.simulator.flow import Network
    from legato.simulator.flow.fabrics.protocol import Fabric

#: A timeline file is for looking at; more workers than these are left out of it.
_MOST_DRAWN = 32

Fidelity = Literal["collective", "flow"]


def simulate(
    workloads: Annotated[list[Path], typer.Argument(metavar="W.json...", help="One workload, or one a worker.")],
    fabric: Annotated[str, typer.Option(help="A fabric's name, several with commas, or all.")] = "all",
    fidelity: Annotated[str, typer.Option(help="flow: every transfer; collective: as planners see it.")] = "flow",
    workers: Annotated[int, typer.Option(help="Number of workers.")] = 32,
    bandwidth: Annotated[str, typer.Option(help="Of every host's link, like 25Gbit.")] = "25Gbit",
    latency: Annotated[str, typer.Option(help="From host to host, like 5us.")] = "0",
    reduce: Reduce = "0",
    servers: Annotated[int | None, typer.Option(help="Parameter servers. (default: 1)")] = None,
    server_bandwidth: Annotated[str | None, typer.Option(help="Of servers' links. (default: as the others')")] = None,
    placement: Placement = None,
    distribution: Distribution = None,
    barrier: Barrier = None,
    aggregation: Aggregation = None,
    message_bytes: MessageBytes = None,
    in_flight: InFlight = None,
    group: Group = None,
    racks: Annotated[int, typer.Option(help="Racks that the workers stand in.")] = 1,
    oversubscription: Annotated[float, typer.Option(help="Of the racks' uplinks: 4 is 4:1.")] = 1.0,
    sharing: Sharing = "fifo",
    jitter: Annotated[float, typer.Option(help="Of computation: sigma of a lognormal factor.")] = 0.0,
    slow: Annotated[float, typer.Option(help="The last worker computes so many times as long.")] = 1.0,
    slow_link: Annotated[float, typer.Option(help="The last worker's link is so many times as slow.")] = 1.0,
    seed: Seed = 0,
    iterations: Iterations = None,
    scheduler: Annotated[str | None, typer.Option(help="Plan with it. (default: a message a tensor)")] = None,
    plan: Annotated[Path | None, typer.Option(metavar="P.json", help="Run this plan.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the fastest timeline here.")] = None,
    json: Json = False,
) -> None:
    """What an iteration takes on a network: parameter servers, help from the switches, collectives.

    Speedups are over one parameter server.

    Example: [bold]legato simulate vgg.json --fabric all --workers 32 --bandwidth 25Gbit[/]
    """
    from legato.simulator.flow import Network
    from legato.simulator.flow.network import last_worker

    if fidelity not in get_args(Fidelity):
        raise unknown_name("fidelity", fidelity, get_args(Fidelity))
    if plan is not None and scheduler is not None:
        raise InputError("--plan and --scheduler: give one or the other")
    jobs = [files.read(path, Workload) for path in workloads]
    if len(jobs) not in (1, workers):
        raise InputError(f"{len(jobs)} workloads for {workers} workers (expected one, or one each)")
    network = Network(
        workers=workers,
        bandwidth_bps=parse_bandwidth(bandwidth),
        latency_s=parse_seconds(latency),
        racks=racks,
        oversubscription=oversubscription,
        compute_scale=last_worker("slow", slow, workers),
        link_scale=last_worker("slow_link", slow_link, workers),
        server_bandwidth_bps=None if server_bandwidth is None else parse_bandwidth(server_bandwidth),
        sharing=sharing_of(sharing),
        reduce_s_per_byte=parse_seconds(reduce) / 2**20,
        jitter=jitter,
        seed=seed,
    )
    options = fabric_options(
        placement=placement,
        distribution=distribution,
        barrier=barrier,
        aggregation=aggregation,
        message_bytes=message_bytes,
        in_flight=in_flight,
        group=group,
    )
    if fidelity == "collective" and (unseen := options.keys() - {"aggregation"}):
        raise InputError(f"{min(unseen)}: not seen at collective fidelity (expected --fidelity flow)")
    chosen = _fabrics(fabric, options if servers is None else options | {"servers": servers}, workers)
    planned = _planner(jobs[0], scheduler, None if plan is None else files.read(plan, Plan), network)
    if fidelity == "flow":
        run = _flow(jobs, network, iterations)
    else:
        run = _collective(jobs, network)
        if fabric == "all":
            chosen = {name: one for name, one in chosen.items() if _cost(name, one, network) is not None}
    rows, timeline = _rows(chosen, planned, run)
    if output is not None:
        files.write(output, timeline)
    if json:
        print_json(rows)
        return
    print_rows(f"{jobs[0].name} on {workers} workers, {bandwidth}, {fidelity} fidelity", rows)
    if output is not None:
        drawn = f" (the first {_MOST_DRAWN} workers)" if fidelity == "flow" and workers > _MOST_DRAWN else ""
        note(f"{timeline.name}, {format_seconds(timeline.iteration_s)}{drawn} -> {output}")


Run = Callable[[str, "Fabric", Plan | None], tuple[Timeline | Callable[[], Timeline], dict[str, Any]]]


def _fabrics(names: str, options: dict[str, Any], workers: int) -> dict[str, Fabric]:
    """The fabrics asked for, each with those of the options that it has; an option that none has is wrong."""
    from legato.simulator.flow import FABRICS
    from legato.simulator.flow.fabrics import check_options, fitting

    chosen = list(FABRICS) if names == "all" else [name.strip() for name in names.split(",")]
    check_options(chosen, options)
    return {name: fitting(name, options, workers) for name in chosen}


def _planner(
    job: Workload, scheduler: str | None, plan: Plan | None, network: Network
) -> Callable[[str, Fabric], Plan | None]:
    """The plan for a fabric; None for a message a tensor."""

    def planned(name: str, fabric: Fabric) -> Plan | None:
        if scheduler is None:
            return plan
        from legato.schedule import schedule

        return schedule(scheduler, job, network.cluster(name, fabric.servers))

    return planned


def _rows(
    chosen: dict[str, Fabric], planned: Callable[[str, Fabric], Plan | None], run: Run
) -> tuple[list[dict[str, Any]], Timeline]:
    """A row a fabric, and the fastest one's timeline."""
    from legato.simulator.flow import BASELINE, FABRICS

    rows, drawn = [], []
    with progress("simulating") as advance:
        baseline_s = run(BASELINE, FABRICS[BASELINE], None)[1]["iteration_s"]
        for done, (name, fabric) in enumerate(chosen.items()):
            advance(done, len(chosen))
            plan = planned(name, fabric)
            start = time.perf_counter()
            draw, found = run(name, fabric, plan)
            simulate_s = time.perf_counter() - start
            speedup = baseline_s / found["iteration_s"] if found["iteration_s"] > 0 else 1.0
            rows.append({"fabric": name, "iteration_s": found.pop("iteration_s"), "speedup": speedup, **found})
            rows[-1]["simulate_s"] = simulate_s
            drawn.append(draw)
    fastest = drawn[min(range(len(rows)), key=lambda i: rows[i]["iteration_s"])]
    return rows, fastest if isinstance(fastest, Timeline) else fastest()


def _flow(jobs: Sequence[Workload], network: Network, iterations: int | None) -> Run:
    from legato.simulator.flow import simulate_flow

    job = jobs[0] if len(jobs) == 1 else jobs

    def run(name: str, fabric: Fabric, plan: Plan | None) -> tuple[Callable[[], Timeline], dict[str, Any]]:
        result = simulate_flow(job, plan, fabric, network, iterations=iterations, keep_transfers=False)
        drawn = range(min(_MOST_DRAWN, result.gradient_s.shape[1]))
        return lambda: result.timeline(drawn, name), {
            "iteration_s": result.iteration_s,
            "overlap": result.overlap,
            "utilization": result.utilization,
        }

    return run


def _collective(jobs: Sequence[Workload], network: Network) -> Run:
    """One shared resource, identical workers: what the planners see."""
    from legato.simulator import collective
    from legato.simulator.flow import plain_plan

    if len(jobs) > 1 or not network.plain:
        raise InputError("--fidelity collective: all hosts are alike, behind one switch (expected --fidelity flow)")

    def run(name: str, fabric: Fabric, plan: Plan | None) -> tuple[Timeline, dict[str, Any]]:
        cost = _cost(name, fabric, network)
        if cost is None:
            raise InputError(f"--fidelity collective: no cost of {name!r} is known (expected --fidelity flow)")
        cluster = Cluster(network.workers, {name: cost})
        plan = plain_plan(jobs[0], fabric) if plan is None else plan
        # At this fidelity a message names its collective; here there is one.
        messages = tuple(msgspec.structs.replace(message, collective=name) for message in plan.messages)
        timeline = collective.simulate(jobs[0], Plan(name, messages, plan.forward_overlap, plan.op_order), cluster)
        return timeline, {
            "iteration_s": timeline.iteration_s,
            "overlap": timeline.overlap,
            "utilization": timeline.utilization,
        }

    return run


def _cost(name: str, fabric: Fabric, network: Network) -> LinearCost | None:
    """Of an all-reduce, or of a push and a pull: MG-WFBP's Table II; of servers, what their links carry."""
    from legato.simulator.flow.fabrics.servers import Servers

    n, byte = network.workers, network.s_per_byte
    if isinstance(fabric, Servers):
        # What a server gets and sends a byte of the model; a worker gets and sends each byte once.
        copies = max(1, (1 if fabric.aggregation else n) / fabric.servers)
        copies += max(1, (1 if fabric.multicast else n) / fabric.servers)
        return LinearCost(2 * network.latency_s, copies * byte)
    known = "recursive-doubling" if name == "butterfly" else name
    if known not in COLLECTIVES:
        return None
    return LinearCost(*COLLECTIVES[known](n, network.latency_s, byte, network.reduce_s_per_byte))
