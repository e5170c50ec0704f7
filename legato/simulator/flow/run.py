"""The flow simulation of a workload, a plan, a fabric and a network: build the graph, run it, read the result."""

from __future__ import annotations

from collections.abc import Sequence

from legato.core.errors import InputError
from legato.core.plan import Message, Plan, Slice, check_plan
from legato.core.text import count
from legato.core.workload import Workload
from legato.simulator.flow.case import Case
from legato.simulator.flow.compute import check_alike
from legato.simulator.flow.disturbances import check_numbers
from legato.simulator.flow.fabrics import fabric as fabric_named
from legato.simulator.flow.fabrics.protocol import Fabric
from legato.simulator.flow.fabrics.servers import creation_order
from legato.simulator.flow.network import Network
from legato.simulator.flow.result import FlowResult
from legato.simulator.flow.unroll import Unrolled

__all__ = ["check_flow", "check_flow_plan", "check_iterations", "compile_flow", "plain_plan", "simulate_flow"]

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
    if they are identical) or the network is disturbed, else 3. `keep_transfers` False drops the data that only
    the link lanes of `FlowResult.timeline` need; then identical workers in a ring, a
    shuffle or doublings take little time and memory. `symmetry` False simulates every
    worker even if few can stand for all.

    Raises `InputError` on arguments out of range or that contradict each other,
    and `PlanError` on a plan that does not fit the workload or waits for itself.
    """
    case = _case(workload, plan, fabric, network, iterations)
    try:
        return case.simulate(symmetry=symmetry, keep_transfers=keep_transfers)
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
    """Raise what `simulate_flow` would raise before it simulates, if it kept no transfers; arguments are the same."""
    _case(workload, plan, fabric, network, iterations).topology(symmetry=True, keep_transfers=False)


def compile_flow(
    workload: Workload | Sequence[Workload],
    plan: Plan | None,
    fabric: Fabric | str,
    network: Network,
    *,
    iterations: int | None = None,
    symmetry: bool = True,
) -> Unrolled:
    """Build the graph that `simulate_flow` runs if it keeps transfers. Arguments and errors are the same."""
    case = _case(workload, plan, fabric, network, iterations)
    return case.unroll(case.topology(symmetry=symmetry, keep_transfers=True))


def check_flow_plan(plan: Plan) -> None:
    """Raise `InputError` on a plan that has a meaning at collective fidelity only: with shards or wire formats."""
    if plan.shard != "none":
        raise InputError(
            f"shard: {plan.shard!r} at flow fidelity (expected a plan without shards: --fidelity collective)"
        )
    if any(message.wire is not None for message in plan.messages):
        raise InputError("wire: a plan with wire formats at flow fidelity (expected none: --fidelity collective)")


def check_iterations(iterations: int) -> None:
    """Raise `InputError` on a number of iterations that cannot be simulated."""
    if not 1 <= iterations <= _MOST_ITERATIONS:
        raise InputError(f"iterations: {iterations} (expected 1 to {_MOST_ITERATIONS})")


def _case(
    workload: Workload | Sequence[Workload],
    plan: Plan | None,
    fabric: Fabric | str,
    network: Network,
    iterations: int | None,
) -> Case:
    workloads = _per_worker(workload, network)
    job, found = workloads[0], fabric_named(fabric) if isinstance(fabric, str) else fabric
    plan = plain_plan(job, found) if plan is None else plan
    check_plan(plan, job)
    check_flow_plan(plan)
    check_numbers(network.disturbances, {"server": found.servers})
    alike = network.uniform and all(other is job or other == job for other in workloads)
    if iterations is None:
        alone = found.synchronous or (alike and not found.servers) or network.disturbed
        iterations = 1 if alone else 3
    check_iterations(iterations)
    return Case(workloads, plan, found, network, iterations, alike)


def _per_worker(workload: Workload | Sequence[Workload], network: Network) -> Sequence[Workload]:
    """Return one workload if all workers have the same, otherwise one per worker."""
    if isinstance(workload, Workload):
        return [workload]
    if len(workload) != network.workers:
        workers = count(network.workers, "worker")
        raise InputError(f"{count(len(workload), 'workload')} for {workers} (expected one each)")
    check_alike(workload)
    return workload
