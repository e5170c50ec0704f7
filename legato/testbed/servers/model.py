"""What parameter servers are predicted to take: the flow simulator, with legato's runtime as its fabric.

A worker and a server have one connection, and it carries one message after
another (`legato.pytorch.servers.protocol`); all connections of a link share it
evenly, as TCP does. A server waits for every worker's gradients of its own
parameters, and for no other server's; then it updates them in the order of the
pulls, and each can be handed out from then on. In random order every worker has
an order of its own.

[Note: what a message costs] A message keeps its connection busy for as long as
so many more bytes would (`ServerCosts.message_s`). So the simulated tensors are
that much larger.
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
from legato.simulator.flow import FlowResult, Network, simulate_flow
from legato.simulator.flow.fabrics.servers import Servers
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.graph import Ids
from legato.simulator.flow.topology import Topology
from legato.zoo import scale_compute

__all__ = ["Prediction", "ServerCosts", "own_updates", "predict"]

#: Random orders that are simulated; the median counts.
_DRAWS = 9
#: A read that takes less than this is not waited for (`legato.testbed.accelerator`).
_AT_ONCE_S = 200e-6


class ServerCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What pushes and pulls cost between these hosts, through legato's runtime.

    `bandwidth_bps` is what a host's link carries of them in one direction (bits
    per second), `message_s` what a message takes of a link beside its bytes,
    `turn_s` what goes by between the last gradient and the first value,
    `copy_s_per_byte` what it takes to put a value where it belongs.
    """

    bandwidth_bps: float
    message_s: float
    turn_s: float
    copy_s_per_byte: float

    def cluster(self, workers: int, servers: int) -> Cluster:
        """As planners see it: a push and a pull, the slowest links all the time in use."""
        copies = max(1.0, workers / servers)
        cost = LinearCost(2 * copies * self.message_s, 2 * copies * 8 / self.bandwidth_bps)
        return Cluster(workers, {PARAMETER_SERVER: cost}, servers)


class Prediction(msgspec.Struct, frozen=True):
    """Seconds of an iteration, its pushes and pulls alone (the paper's N), and what it looks like."""

    iteration_s: float
    communication_s: float
    timeline: Timeline


def own_updates(workload: Workload) -> Workload:
    """The workload with an optimizer op for each tensor, by its bytes: each server updates what it holds."""
    kept = [i for i, op in enumerate(workload.ops) if op.phase != "optimizer"]
    if any(workload.ops[d].phase == "optimizer" for i in kept for d in workload.ops[i].deps):
        raise InputError(f"{workload.name}: an op of the model waits for an optimizer op (expected none to)")
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
    """What the plan takes; a plan called `random` stands for random orders, each worker's its own.

    `workload` as `own_updates` makes it. Every message has to be a whole tensor.
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
        return simulate_flow(one, padded, fabric, network, keep_transfers=False)

    runs = [run(job, seed) for seed in (range(_DRAWS) if plan.scheduler == "random" else (None,))]
    typical = sorted(runs, key=lambda result: result.iteration_s)[len(runs) // 2]
    return Prediction(
        statistics.median(result.iteration_s for result in runs),
        run(scale_compute(job, 1e6), None).iteration_s,
        _without_header(typical.timeline(name=plan.scheduler), header),
    )


def _worker_part(workload: Workload, costs: ServerCosts, header: int) -> Workload:
    """What workers do: no updates; a parameter is put in its place by the first op that reads it."""
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
    """`legato.pytorch.servers`. `update_s` by tensor, until it can be handed out; `seed` of random orders, or None."""

    turn_s: float = 0.0
    update_s: Mapping[str, float] = field(default_factory=dict)
    seed: int | None = None

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        """One connection between each worker and server: a gradient goes out when the one before it is there."""
        graph = topology.graph
        turn = graph.add((len(fragments), topology.size))
        graph.edge(ready, turn)
        servers = topology.server(fragments.server)[:, None]
        sent = topology.send(topology.ranks, servers, fragments.nbytes[:, None], [turn], key=fragments.order[:, None])
        for mine in self._by_server(fragments):
            graph.edge(sent[mine[:-1]], turn[mine[1:]])
        return graph.join(sent)[:, None]

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        """What is updated can go; to each worker, in its order, when what goes before is there."""
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
