"""Predict training with parameter servers, by the flow simulator with a fabric that models legato's runtime.

A worker and a server have one connection, which carries one message after another (`legato.lab.servers.protocol`).
The connections of a link share its bandwidth evenly, as with TCP. A server waits for every worker's gradients of its
own parameters, but not for other servers. Then the server updates its parameters in the order of the pulls, and sends
each parameter as soon as it is updated. Without a planned order, each worker pulls in a different random order.

[Note: cost of a message] The fixed time of a message (`ServerCosts.message_s`)
is simulated by additional bytes: every simulated tensor is larger by the number of bytes
that the link carries in this time.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from legato.core.cluster import PARAMETER_SERVER, Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.plan import Plan, Slice
from legato.core.timeline import Timeline
from legato.core.workload import Op, Tensor, Workload
from legato.lab.hypothetical import scale_compute
from legato.simulator.flow import FlowResult, Network, simulate_flow
from legato.simulator.flow.engine.services import Ids
from legato.simulator.flow.fabrics.servers import Servers
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.network.topology import Topology

__all__ = ["Prediction", "ServerCosts", "own_updates", "predict"]

#: The number of random orders that are simulated; the prediction is their median.
_DRAWS = 9
#: Waits shorter than this many seconds do not delay the emulated device (`legato.lab.testbed.accelerator`).
_AT_ONCE_S = 200e-6


class ServerCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The costs of pushes and pulls between these hosts with legato's runtime.

    `bandwidth_bps` is the payload that a host's link carries in one direction
    (bits per second). `message_s` is the time that each message takes in addition to its
    bytes, `turn_s` is the time from a server's last gradient to its first updated value, and `copy_s_per_byte` is the
    time to copy a value into its parameter.
    """

    bandwidth_bps: float
    message_s: float
    turn_s: float
    copy_s_per_byte: float

    def cluster(self, workers: int, servers: int) -> Cluster:
        """Return the cluster for planners, whose messages take as long as the busiest links need without pauses."""
        copies = max(1.0, workers / servers)
        cost = LinearCost(2 * copies * self.message_s, 2 * copies * 8 / self.bandwidth_bps)
        return Cluster(workers, {PARAMETER_SERVER: cost}, servers)


class Prediction(msgspec.Struct, frozen=True):
    """The seconds of an iteration, the seconds of only its pushes and pulls (TicTac's N), and its timeline."""

    iteration_s: float
    communication_s: float
    timeline: Timeline


def own_updates(workload: Workload) -> Workload:
    """Return the workload with one optimizer op per tensor, because each server updates only its tensors.

    The time of the optimizer is divided among the tensors in proportion to their bytes.
    """
    kept = [i for i, op in enumerate(workload.ops) if op.phase != "optimizer"]
    if any(workload.ops[d].phase == "optimizer" for i in kept for d in workload.ops[i].deps):
        raise InputError(f"{workload.name}: an op of the model waits for an optimizer op (expected none that does)")
    new = {old: i for i, old in enumerate(kept)}
    ops = [_moved(workload.ops[i], new) for i in kept]
    update_s = sum(workload.ops[i].duration_s for i in workload.phase_ops("optimizer"))
    tensors = []
    for tensor in workload.tensors:
        readers, ready = [new[r] for r in tensor.readers if r in new], new[tensor.ready_after]
        if update_s:
            readers.append(len(ops))
            ops.append(Op(f"update {tensor.name}", "optimizer", update_s * tensor.nbytes / workload.nbytes, (ready,)))
        tensors.append(Tensor(tensor.name, tensor.nbytes, ready, tuple(readers)))
    return msgspec.structs.replace(workload, ops=tuple(ops), tensors=tuple(tensors))


def _moved(op: Op, new: Mapping[int, int]) -> Op:
    return Op(op.name, op.phase, op.duration_s, tuple(new[d] for d in op.deps))


def predict(workload: Workload, plan: Plan, costs: ServerCosts, workers: int, servers: int) -> Prediction:
    """Predict an iteration with a plan; in an unordered plan, each worker has its own random order.

    `workload` is a result of `own_updates`. Every message must be a whole tensor.
    """
    header = round(costs.message_s * costs.bandwidth_bps / 8)
    job, padded = _worker_part(workload, costs, header), _padded(plan, header)
    network = Network(workers=workers, bandwidth_bps=costs.bandwidth_bps, sharing="fair")
    update_s = {
        t.name: sum(workload.ops[r].duration_s for r in t.readers if workload.ops[r].phase == "optimizer")
        + costs.copy_s_per_byte * t.nbytes
        for t in workload.tensors
    }

    def run(one: Workload, seed: int | None) -> FlowResult:
        fabric = _RuntimeFabric(servers=servers, barrier=False, turn_s=costs.turn_s, update_s=update_s, seed=seed)
        return simulate_flow(one, padded, fabric, network)

    runs = [run(job, seed) for seed in (range(_DRAWS) if plan.carrier == "unordered" else (None,))]
    typical = sorted(runs, key=lambda result: result.iteration_s)[len(runs) // 2]
    return Prediction(
        statistics.median(result.iteration_s for result in runs),
        run(scale_compute(job, 1e6), None).iteration_s,
        _without_header(typical.timeline(name=plan.scheduler), header),
    )


def _worker_part(workload: Workload, costs: ServerCosts, header: int) -> Workload:
    """Return the part of the workload that workers run: they copy received values, but do not update parameters.

    The first op that reads a parameter also copies its value.
    """
    without = msgspec.structs.replace(
        workload,
        ops=tuple(op for op in workload.ops if op.phase != "optimizer"),
        tensors=tuple(
            Tensor(t.name, t.nbytes + header, t.ready_after, tuple(r for r in t.readers if _reads(workload, r)))
            for t in workload.tensors
        ),
    )
    longer = [op.duration_s for op in without.ops]
    for t in workload.tensors:
        readers = [r for r in t.readers if _reads(workload, r)]
        copy_s = costs.copy_s_per_byte * t.nbytes
        if readers and copy_s > _AT_ONCE_S:
            longer[min(readers)] += copy_s
    ops = tuple(Op(op.name, op.phase, s, op.deps) for op, s in zip(without.ops, longer, strict=True))
    return msgspec.structs.replace(without, ops=ops)


def _reads(workload: Workload, op: int) -> bool:
    return workload.ops[op].phase != "optimizer"


def _padded(plan: Plan, header: int) -> Plan:
    messages = []
    for message in plan.messages:
        (piece,) = message.slices
        whole = (Slice(piece.tensor, piece.start, piece.stop + header),)
        messages.append(msgspec.structs.replace(message, slices=whole))
    return msgspec.structs.replace(plan, messages=tuple(messages))


def _without_header(timeline: Timeline, header: int) -> Timeline:
    spans = tuple(
        span if span.nbytes is None else msgspec.structs.replace(span, nbytes=span.nbytes - header)
        for span in timeline.spans
    )
    return msgspec.structs.replace(timeline, spans=spans)


@dataclass(frozen=True, kw_only=True)
class _RuntimeFabric(Servers):
    """A fabric that models `legato.lab.servers`.

    `update_s` has the time to update each tensor, and `seed` determines random orders.
    """

    turn_s: float = 0.0
    update_s: Mapping[str, float] = field(default_factory=dict)
    seed: int | None = None

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        """Push the gradients: each connection sends a gradient when the previous gradient has arrived."""
        graph = topology.graph
        turn = graph.add((len(fragments), topology.size))
        graph.edge(ready, turn)
        servers = topology.server(fragments.server)[:, None]
        sent = topology.send(topology.ranks, servers, fragments.nbytes[:, None], [turn], key=fragments.order[:, None])
        for mine in self._by_server(fragments):
            graph.edge(sent[mine[:-1]], turn[mine[1:]])
        return graph.join(sent)[:, None]

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        """Send each worker the updated parameters in its order, each when the previous parameter has arrived."""
        graph = topology.graph
        turn = graph.add((len(fragments), topology.size))
        servers = topology.server(fragments.server)[:, None]
        sent = topology.send(servers, topology.ranks, fragments.nbytes[:, None], [turn], key=fragments.order[:, None])
        for s, mine in enumerate(self._by_server(fragments)):
            everything = graph.add((1,), work_s=self.turn_s)
            graph.edge(held[mine, 0], everything)
            names = [fragments.slices[i][0].tensor for i in mine]
            updated = graph.add((len(mine),), work_s=[self.update_s[name] for name in names])
            graph.edge(everything, updated[:1])
            graph.edge(updated[:-1], updated[1:])
            graph.edge(updated[:, None], turn[mine])
            for worker in range(topology.size):
                order = self._order(mine, worker, s)
                graph.edge(sent[order[:-1], worker], turn[order[1:], worker])
        return sent

    def _by_server(self, fragments: Fragments) -> list[list[int]]:
        return [np.flatnonzero(fragments.server == s).tolist() for s in range(self.servers)]

    def _order(self, mine: Sequence[int], worker: int, server: int) -> list[int]:
        order = list(mine)
        if self.seed is not None:
            random.Random(f"{self.seed} {worker} {server}").shuffle(order)
        return order
