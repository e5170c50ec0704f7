"""From a workload, a plan, a fabric and a network to what happens: build the graph, run it, read it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import InputError, PlanError
from legato.core.plan import Message, Plan, Slice, check_plan
from legato.core.workload import Workload
from legato.simulator.flow.compute import check_alike
from legato.simulator.flow.fabrics import fabric as fabric_named
from legato.simulator.flow.fabrics.protocol import Fabric
from legato.simulator.flow.fabrics.servers import creation_order
from legato.simulator.flow.graph import Graph, Ids, Services
from legato.simulator.flow.network import Network
from legato.simulator.flow.result import FlowResult, Journeys, Streams, Transfers
from legato.simulator.flow.unroll import Unrolled
from legato.simulator.flow.wiring import Wiring

__all__ = ["check_iterations", "compile_flow", "plain_plan", "simulate_flow"]

_MOST_ITERATIONS = 1000

Times = NDArray[np.float64]


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
    services = unrolled.graph.freeze(unrolled.wiring.num_links)
    done = _run(services, unrolled.wiring)
    if done < len(services.records):
        left = len(services.records) - done
        raise PlanError(f"the plan waits for itself: {left} transfers or ops never begin")
    return _read(unrolled, services.records, keep_transfers)


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
    wiring = Wiring(graph, network, size, found.servers, found.local_bandwidth_bps)
    durations = np.array([[op.duration_s for op in one.ops] for one in workloads[:size]])
    if len(durations) < size:
        durations = np.broadcast_to(durations, (size, durations.shape[1]))
    try:
        return Unrolled(job, plan, found, wiring, durations, network.slowdown(iterations)).build()
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


def _run(services: Services, wiring: Wiring) -> int:
    """How many services the engine that the network's sharing asks for could run."""
    if wiring.network.sharing == "fair":
        from legato.simulator.flow.fair import run_fair

        return run_fair(services, wiring.s_per_byte())
    from legato.simulator.flow.engine import run_services

    return int(run_services(*services))


def _read(unrolled: Unrolled, records: NDArray[np.void], keep_transfers: bool) -> FlowResult:
    """Collect what the iterations' services say."""
    begin, runs = records["begin_s"], unrolled.iterations

    def over(ids: Ids) -> Times:
        return np.asarray(records["end_s"][ids] + records["delay_s"][ids])

    streams = Streams(
        unrolled.forward,
        unrolled.backward,
        np.array([begin[run.forward] for run in runs]),
        np.array([begin[run.backward] for run in runs]),
        unrolled.slowdown,
    )
    summed = unrolled.parcels_of_tensor(unrolled.reducing)
    ready = [unrolled.backward.at[tensor.ready_after] for tensor in unrolled.workload.tensors]
    held = [over(run.held) for run in runs]
    received = [over(run.received) for run in runs]
    aggregated_s = np.array([[sums[parcels].max() for parcels in summed] for sums in held])
    received_s = np.array([[got[parcels].max(axis=0) for parcels in unrolled.readable] for got in received])
    if unrolled.fabric.servers:
        end_s = aggregated_s.max(axis=1)
    else:
        computed = [over(run.forward[-1:]).max(initial=0.0) for run in runs]
        end_s = np.maximum(received_s.max(axis=(1, 2)), computed)
    return FlowResult(
        workload=unrolled.workload,
        plan=unrolled.plan,
        servers=unrolled.fabric.servers,
        end_s=end_s,
        gradient_s=np.array([streams.op_times("backward", k)[1][:, ready] for k in range(len(runs))]),
        aggregated_s=aggregated_s,
        received_s=received_s.transpose(0, 2, 1),
        num_events=len(records),
        streams=streams,
        journeys=_journeys(unrolled, over(runs[-1].handed), held[-1], over(runs[-1].released), received[-1]),
        transfers=_transfers(records, unrolled.wiring.s_per_byte()) if keep_transfers else None,
    )


def _journeys(unrolled: Unrolled, handed: Times, held: Times, released: Times, received: Times) -> Journeys:
    """To the sum, and from the sum; a barrier lets go of everything at once."""
    reducing, spreading, size = unrolled.reducing, unrolled.spreading, unrolled.wiring.size
    summed = np.broadcast_to(held.max(axis=1, keepdims=True), (len(reducing), size))
    free = released.max() if unrolled.fabric.servers and unrolled.fabric.synchronous else released.min(axis=1)[:, None]
    return Journeys(
        message=np.concatenate([reducing.message, spreading.message]),
        nbytes=np.concatenate([reducing.nbytes, spreading.nbytes]),
        start_s=np.concatenate([handed[reducing.message], np.broadcast_to(free, received.shape)]),
        end_s=np.concatenate([summed, received]),
    )


def _transfers(records: NDArray[np.void], s_per_byte: Times) -> Transfers:
    wired = records["link"] >= 0
    link, tag, begin_s, end_s, work_s = (records[name][wired] for name in ("link", "tag", "begin_s", "end_s", "work_s"))
    return Transfers(link, tag, begin_s, end_s, work_s, s_per_byte)
