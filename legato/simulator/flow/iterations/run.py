"""The flow simulation of a workload, a plan, a fabric and a network: build the graph, run it, read the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import InputError, PlanError
from legato.core.plan import Message, Plan, Slice, check_plan
from legato.core.text import count
from legato.core.workload import Workload
from legato.simulator.flow.engine.graph import MOST_FAIR_SERVICES, Graph
from legato.simulator.flow.engine.services import Ids, Services
from legato.simulator.flow.fabrics import Fabric
from legato.simulator.flow.fabrics import fabric as fabric_named
from legato.simulator.flow.fabrics.servers import creation_order
from legato.simulator.flow.fragments import DISTRIBUTING, REDUCING, num_fragments
from legato.simulator.flow.iterations.result import FlowResult, IterationTimes
from legato.simulator.flow.iterations.unroll import Unrolled
from legato.simulator.flow.network.disturbances import Profiles, check_numbers
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.topology import Topology

__all__ = [
    "Case",
    "check_flow",
    "check_flow_plan",
    "check_iterations",
    "checked_plan",
    "compile_flow",
    "plain_plan",
    "run_graph",
    "simulate_flow",
]

_MOST_ITERATIONS = 1000


def plain_plan(workload: Workload, fabric: Fabric | str) -> Plan:
    """Return the plan of a framework without a scheduler: one message per tensor, sent once the tensor is ready.

    On parameter servers, each tensor has a push and a pull; pulls are in the
    order of the forward pass, which starts while parameters arrive. On
    collectives, each tensor has an all-reduce, and the forward pass waits for the
    last one (Network Operator Edition, 3.2).
    """
    found = fabric_named(fabric)
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
) -> FlowResult:
    """Simulate a plan on a fabric: every transfer on every link.

    `workload` is one workload for all workers, or a sequence with one per worker, which may differ only in the
    durations of ops. Without a plan, `plain_plan` is used. If `iterations` is None, one iteration is simulated if all
    workers start together (because of a barrier, or because they are identical) or if the network is disturbed.
    Otherwise, three iterations are simulated. By default, only a few of many identical workers are simulated; if
    `symmetry` is False, every worker is.

    Raises `InputError` on arguments that are out of range or contradict each other. Raises `PlanError` on a plan that
    does not fit the workload or can never finish.
    """
    case = _case(workload, plan, fabric, network, iterations)
    try:
        return case.simulate(symmetry=symmetry)
    except MemoryError:
        raise InputError(f"{network.workers} workers: too many transfers for this machine's memory") from None


def check_flow(
    workload: Workload | Sequence[Workload],
    plan: Plan | None,
    fabric: Fabric | str,
    network: Network,
    *,
    iterations: int | None = None,
) -> None:
    """Raise the errors that `simulate_flow` raises before it simulates."""
    _case(workload, plan, fabric, network, iterations).topology(symmetry=True)


def compile_flow(
    workload: Workload | Sequence[Workload],
    plan: Plan | None,
    fabric: Fabric | str,
    network: Network,
    *,
    iterations: int | None = None,
    symmetry: bool = True,
) -> Unrolled:
    """Return the graph that `simulate_flow` runs with these arguments; raise its errors."""
    case = _case(workload, plan, fabric, network, iterations)
    return case.unroll(case.topology(symmetry=symmetry))


def check_flow_plan(plan: Plan) -> None:
    """Raise `InputError` on a plan that only formulas can simulate: with shards or wire formats."""
    if plan.shard != "none":
        raise InputError(
            f"shard: {plan.shard!r} transfer by transfer (expected a plan without shards: --fidelity formulas)"
        )
    if plan.wires:
        raise InputError("wire: a plan with wire formats transfer by transfer (expected none: --fidelity formulas)")


def check_iterations(iterations: int) -> None:
    """Raise `InputError` on a number of iterations that cannot be simulated."""
    if not 1 <= iterations <= _MOST_ITERATIONS:
        raise InputError(f"iterations: {iterations} (expected 1 to {_MOST_ITERATIONS})")


def checked_plan(plan: Plan | None, workload: Workload, fabric: Fabric) -> Plan:
    """Return the plan, or `plain_plan` if it is None. Raises `InputError` on a plan that this simulator cannot run."""
    plan = plain_plan(workload, fabric) if plan is None else plan
    check_plan(plan, workload)
    check_flow_plan(plan)
    return plan


def _case(
    workload: Workload | Sequence[Workload],
    plan: Plan | None,
    fabric: Fabric | str,
    network: Network,
    iterations: int | None,
) -> Case:
    workloads = _per_worker(workload, network)
    job, found = workloads[0], fabric_named(fabric)
    plan = checked_plan(plan, job, found)
    check_numbers(network.disturbances, {"server": found.servers})
    alike = network.uniform and all(other is job or other == job for other in workloads)
    if iterations is None:
        alone = found.synchronous or (alike and not found.servers) or network.disturbed
        iterations = 1 if alone else 3
    check_iterations(iterations)
    return Case(workloads, plan, found, network, iterations, alike)


def _per_worker(workload: Workload | Sequence[Workload], network: Network) -> Sequence[Workload]:
    """Return one workload if all workers have the same workload, and otherwise one per worker."""
    if isinstance(workload, Workload):
        return [workload]
    if len(workload) != network.workers:
        workers = count(network.workers, "worker")
        raise InputError(f"{count(len(workload), 'workload')} for {workers} (expected one each)")
    _check_alike(workload)
    return workload


def _check_alike(workloads: Sequence[Workload]) -> None:
    """Raise `InputError` unless the workloads differ only in the durations of their ops."""
    first = workloads[0]
    for w, other in enumerate(workloads):
        if other is first:
            continue
        same = [(a.name, a.phase, a.deps) for a in other.ops] == [(b.name, b.phase, b.deps) for b in first.ops]
        if not same or other.tensors != first.tensors:
            raise InputError(
                f"workload of worker {w}: not worker 0's ops and tensors (expected only different durations)"
            )


@dataclass(frozen=True)
class Case:
    """The input of a simulation: workloads (one, or one per worker), a plan, a fabric, a network, and iterations.

    `alike` says whether all workers have the same workload, speed and link.
    """

    workloads: Sequence[Workload]
    plan: Plan
    fabric: Fabric
    network: Network
    iterations: int
    alike: bool

    def __post_init__(self) -> None:
        import_module("legato.simulator.flow.engine.loop")  # raises `InputError` if numba is not installed

    @property
    def symmetric(self) -> bool:
        """Return whether all workers are alike, and the network looks the same to the fabric from each worker."""
        return self.alike and self.network.sharing == "fifo" and self.fabric.symmetric(self.network)

    def _num_fragments(self, kinds: Sequence[str]) -> int:
        messages = [(i, message) for i, message in enumerate(self.plan.messages) if message.kind in kinds]
        return num_fragments(messages, self.fabric.placed(self.workloads[0]), self.fabric.message_bytes)

    def services(self, workers: int) -> int:
        """Return a lower bound on how many services all iterations have on the links of this number of workers."""
        reduce, distribute = self.fabric.services(self.network)
        total = self._num_fragments(REDUCING) * reduce + self._num_fragments(DISTRIBUTING) * distribute
        return self.iterations * total * workers // self.network.workers

    def topology(self, *, symmetry: bool) -> Topology:
        """Return the links of all workers; with `symmetry`, only of the fewest workers that can represent all workers.

        Raises `TooLargeError` if these workers have too many transfers.
        """
        fabric, network = self.fabric, self.network
        size = fabric.simulated(network)
        if not (symmetry and self.symmetric):
            size = network.workers
        graph = Graph(MOST_FAIR_SERVICES) if network.sharing == "fair" else Graph()
        # Every worker launches every message, and the times of all its ops are computed.
        launches = self.iterations * max(size * len(self.plan.messages), 1 if self.symmetric else network.workers)
        graph.check_room(max(self.services(size), launches))
        Graph().check_room(size * len(self.workloads[0].ops))
        return Topology(graph, network, size, fabric.servers, fabric.host_shape(network))

    def unroll(self, topology: Topology, begin: Ids | None = None) -> Unrolled:
        """Return the graph to simulate on a topology. The first iteration waits for the service `begin`."""
        size = topology.size
        durations = np.array([[op.duration_s for op in one.ops] for one in self.workloads[:size]])
        if len(durations) < size:
            durations = np.broadcast_to(durations, (size, durations.shape[1]))
        slowdown = self.network.slowdown(self.iterations, size if self.symmetric else None)
        return Unrolled(self.workloads[0], self.plan, self.fabric, topology, durations, slowdown).build(begin)

    def simulate(self, *, symmetry: bool) -> FlowResult:
        """Simulate all iterations. Raises `TooLargeError`, and `PlanError` on a plan that can never finish."""
        topology = self.topology(symmetry=symmetry)
        unrolled = self.unroll(topology)
        services = unrolled.graph.freeze(topology.num_links)
        run_graph(services, topology, unrolled.profiles, unrolled.computing)
        runs = [IterationTimes.of(run, services.records) for run in unrolled.iterations]
        return FlowResult.of(unrolled, runs)


def run_graph(
    services: Services,
    topology: Topology,
    profiles: Profiles,
    computing: Sequence[tuple[Ids, NDArray[np.int64]]],
    priority: NDArray[np.int64] | None = None,
) -> None:
    """Simulate all services with the engine for the topology. Raises `PlanError` if a plan can never finish.

    `profiles` describe when links and workers are slower, and `computing` has the services that compute
    (`Unrolled.computing`). `priority` has a number for each service; links serve higher numbers first.
    """
    found = profiles.of_services(services.records["link"], computing)
    if topology.network.sharing == "fair":
        from legato.simulator.flow.engine.fair import run_fair

        done = run_fair(services, topology.s_per_byte(), found, profiles.changes(), priority)
    else:
        from legato.simulator.flow.engine.loop import run_services

        done = run_services(*services, found, priority)
    if left := len(services.records) - done:
        raise PlanError(f"the plan waits for itself: {left} transfers or ops never start")
