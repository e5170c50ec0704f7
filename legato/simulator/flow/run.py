"""From a workload, a plan, a fabric and a network to what happens: build the graph, run it, read it."""

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
from legato.simulator.flow.graph import Graph, Services
from legato.simulator.flow.network import Network
from legato.simulator.flow.result import FlowResult
from legato.simulator.flow.topology import Topology
from legato.simulator.flow.unroll import Unrolled

__all__ = ["check_iterations", "compile_flow", "plain_plan", "simulate_flow"]

_MOST_ITERATIONS = 1000


def plain_plan(workload: Workload, fabric: Fabric | str) -> Plan:
    """What a framework without a scheduler does: a message a tensor, sent as soon as it is ready.

    On parameter servers a push and a pull each, pulled in the order of the
    forward pass, which begins as parameters come in; on collectives an
    all-reduce each, and the forward pass waits for the last (Network Operator
    Edition, 3.2).
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
    """Run a plan on a fabric, every transfer on every link.

    `workload` is every worker's, or a sequence of one a worker, which differ in
    times only. Without a plan it is `plain_plan`. `iterations` None is 1 where
    workers begin in step (a barrier, or identical workers), and 3 elsewhere.
    `symmetry` False simulates every worker even where one stands for all;
    `keep_transfers` False drops what only `FlowResult.timeline` needs.

    Raises `InputError` on arguments that make no sense, and `PlanError` on a
    plan that does not fit the workload or waits for itself.
    """
    unrolled = compile_flow(workload, plan, fabric, network, iterations=iterations, symmetry=symmetry)
    services = unrolled.graph.freeze(unrolled.topology.num_links)
    done = _run(services, unrolled.topology)
    if done < len(services.records):
        left = len(services.records) - done
        raise PlanError(f"the plan waits for itself: {left} transfers or ops never begin")
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
    """The graph that `simulate_flow` runs. Arguments and errors are the same."""
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
    graph = Graph()
    graph.check_room(iterations * size * len(plan.messages))  # every worker hands over, or gets, every message
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
    """One workload, if all have the same; otherwise one a worker."""
    if isinstance(workload, Workload):
        return [workload]
    if len(workload) != network.workers:
        raise InputError(f"{len(workload)} workloads for {network.workers} workers (expected one each)")
    check_alike(workload)
    return workload


def _run(services: Services, topology: Topology) -> int:
    """How many services the engine that the network's sharing asks for could run."""
    if topology.network.sharing == "fair":
        from legato.simulator.flow.fair import run_fair

        return run_fair(services, topology.s_per_byte())
    from legato.simulator.flow.engine import run_services

    return int(run_services(*services))
