"""The flow simulation of a workload, a plan, a fabric and a network: build the graph, run it, read the result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from legato.core.errors import InputError, PlanError
from legato.core.plan import Message, Plan, Slice, check_plan
from legato.core.workload import Workload
from legato.simulator.flow.compute import check_alike
from legato.simulator.flow.fabrics import fabric as fabric_named
from legato.simulator.flow.fabrics.protocol import Fabric
from legato.simulator.flow.fabrics.servers import creation_order
from legato.simulator.flow.graph import MOST_FAIR_SERVICES, Graph, Services
from legato.simulator.flow.network import Network
from legato.simulator.flow.result import FlowResult
from legato.simulator.flow.topology import Topology
from legato.simulator.flow.unroll import Unrolled

__all__ = ["check_iterations", "compile_flow", "plain_plan", "simulate_flow"]

_MOST_ITERATIONS = 1000


def plain_plan(workload: Workload, fabric: Fabric | str) -> Plan:
    """Return the plan of a framework without a scheduler: one message per tensor, sent as soon as it is ready.

    On parameter servers, each tensor has a push and a pull; pulls are in the
    order of the forward pass, which starts while parameters arrive. On
    collectives, each tensor has an all-reduce, and the forward pass waits for the
    last one (Network Operator Edition, 3.2).
    """
    found = fabric_named(fabric) if isinstance(fabric, str) else fabric
    whole = {tensor.name: (Slice(tensor.name, 0, tensor.nbytes),) for tensor in workload.tensors}
    at = {op: k for k, op in enumerate(workload.iteration_order())}
    ready = [tensor.name for tensor in sorted(workload.tensors, key=lambda tensor: at[tensor.ready_after])]
    if not found.servers:
        return Plan("plain", tuple(Message(whole[name]) for name in ready))
    pushes = [Message(whole[name], kind="push") for name in ready]
    pulls = [Message(whole[name], kind="pull") for name in creation_order(workload)]
    return Plan("plain", (*pushes, *pulls), forward_overlap=True)


def simulate_flow(
    workload: Workload | Sequence[Workload],
    plan: Plan | None,
    fabric: Fabric | str,
    network: Network,
    *,
    iterations: int | None = None,
    symmetry: bool = True,
    keep_transfers: bool = True,
) -> FlowResult:
    """Simulate a plan on a fabric: every transfer on every link.

    `workload` is that of all workers, or a sequence with one per worker, which
    may differ only in the durations of ops. Without a plan, `plain_plan` is used.
    `iterations` None means 1 if all workers start together (with a barrier, or
    if they are identical), else 3. `symmetry` False simulates every worker even
    if one can represent all; `keep_transfers` False drops the data that only the
    link lanes of `FlowResult.timeline` need.

    Raises `InputError` on arguments out of range or that contradict each other,
    and `PlanError` on a plan that does not fit the workload or waits for itself.
    """
    unrolled = compile_flow(workload, plan, fabric, network, iterations=iterations, symmetry=symmetry)
    services = unrolled.graph.freeze(unrolled.topology.num_links)
    done = _run(services, unrolled.topology)
    if done < len(services.records):
        left = len(services.records) - done
        raise PlanError(f"the plan waits for itself: {left} transfers or ops never start")
    return FlowResult.of(unrolled, services.records, keep_transfers=keep_transfers)


def compile_flow(
    workload: Workload | Sequence[Workload],
    plan: Plan | None,
    fabric: Fabric | str,
    network: Network,
    *,
    iterations: int | None = None,
    symmetry: bool = True,
) -> Unrolled:
    """Build the graph that `simulate_flow` runs. Arguments and errors are the same."""
    workloads = _per_worker(workload, network)
    job, found = workloads[0], fabric_named(fabric) if isinstance(fabric, str) else fabric
    plan = plain_plan(job, found) if plan is None else plan
    check_plan(plan, job)
    alike = network.uniform and all(other is job or other == job for other in workloads)
    size = found.simulated(network.workers)
    if not (symmetry and alike and network.racks == 1 and network.sharing == "fifo"):
        size = network.workers
    if iterations is None:
        iterations = 1 if found.synchronous or (alike and not found.servers) else 3
    check_iterations(iterations)
    graph = Graph(MOST_FAIR_SERVICES) if network.sharing == "fair" else Graph()
    # Every worker sends or receives every message, and those that are not simulated have durations, too.
    graph.check_room(iterations * max(size * len(plan.messages), network.workers))
    topology = Topology(graph, network, size, found.servers, found.local_bandwidth_bps)
    durations = np.array([[op.duration_s for op in one.ops] for one in workloads[:size]])
    if len(durations) < size:
        durations = np.broadcast_to(durations, (size, durations.shape[1]))
    try:
        return Unrolled(job, plan, found, topology, durations, network.slowdown(iterations)).build()
    except MemoryError:
        raise InputError(f"{network.workers} workers: too many transfers for this machine's memory") from None


def check_iterations(iterations: int) -> None:
    """Raise `InputError` on a number of iterations that cannot be simulated."""
    if not 1 <= iterations <= _MOST_ITERATIONS:
        raise InputError(f"iterations: {iterations} (expected 1 to {_MOST_ITERATIONS})")


def _per_worker(workload: Workload | Sequence[Workload], network: Network) -> Sequence[Workload]:
    """Return one workload if all workers have the same, otherwise one per worker."""
    if isinstance(workload, Workload):
        return [workload]
    if len(workload) != network.workers:
        raise InputError(f"{len(workload)} workloads for {network.workers} workers (expected one each)")
    check_alike(workload)
    return workload


def _run(services: Services, topology: Topology) -> int:
    """Run the engine for the network's sharing, and return how many services ran."""
    if topology.network.sharing == "fair":
        from legato.simulator.flow.fair import run_fair

        return run_fair(services, topology.s_per_byte())
    from legato.simulator.flow.engine import run_services

    return int(run_services(*services))
