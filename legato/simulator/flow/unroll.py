"""Iterations of training as one graph of services: computation, messages, and what holds what back.

On parameter servers an iteration runs from barrier to barrier (distribution,
forward, backward, aggregation), so that workers which got their parameters
late start the backward pass late. On collectives it is the period of
`simulate.period`: backward, all-reduce, next forward.

A worker's messages go out in the plan's order: one is handed to the network
when the one before it has been, and its tensors are ready. What the servers do
is not the worker's business: they send what is complete, or, behind a barrier,
everything once everything is complete.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.simulator.flow.compute import Stream, first_reads
from legato.simulator.flow.fabrics.protocol import Fabric
from legato.simulator.flow.graph import Graph, Ids
from legato.simulator.flow.parcels import REDUCING, SPREADING, Parcels, cut, overlaps
from legato.simulator.flow.wiring import Wiring

__all__ = ["Iteration", "Unrolled"]


@dataclass(frozen=True)
class Iteration:
    """Ids of services: `forward` and `backward` [segment, rank]; when a worker hands a message to the network
    (`handed` [message, rank]), its sum is complete (`held` [reducing parcel, ...]), may be handed out (`released`
    [spreading parcel, ...]), and is there (`received` [spreading parcel, rank])."""

    forward: Ids
    backward: Ids
    handed: Ids
    held: Ids
    released: Ids
    received: Ids


class Unrolled:
    """`iterations` iterations of a plan on a fabric, in `wiring.graph`."""

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        fabric: Fabric,
        wiring: Wiring,
        op_duration_s: NDArray[np.float64],
        slowdown: NDArray[np.float64],
    ) -> None:
        self.workload, self.plan, self.fabric, self.wiring = workload, plan, fabric, wiring
        self.graph: Graph = wiring.graph
        self.slowdown = slowdown
        placement = fabric.placed(workload)
        indexed = list(enumerate(plan.messages))
        self.reducing = cut([m for m in indexed if m[1].kind in REDUCING], placement, fabric.message_bytes)
        self.forward = Stream.forward(workload, plan, op_duration_s)
        spreading = [m for m in indexed if m[1].kind in SPREADING]
        if fabric.servers and all(message.kind == "all_reduce" for _, message in spreading):
            spreading.sort(key=lambda m: self._first_use(m[0]))
        self.spreading = cut(spreading, placement, fabric.message_bytes)
        self.backward = Stream.backward(workload, plan, self.reducing, op_duration_s)
        self.reads = first_reads(workload, plan, self.forward.ops)
        self.readable = self.parcels_of_tensor(self.spreading)
        self._shared = overlaps(self.reducing, self.spreading)
        self._last_op: Ids | None = None
        self._gates: list[Ids] = []  # of all messages that workers send, one after another
        self._done: list[Ids] = []  # services that end when such a message is through
        self.iterations: list[Iteration] = []

    def build(self) -> Unrolled:
        """Add everything to the graph; returns itself."""
        if self.fabric.servers:
            held = np.broadcast_to(self.graph.add((1, 1)), (len(self.spreading), 1))
            for k in range(len(self.slowdown)):
                received = self._spread(k, held)
                forward = self._compute(self.forward, k)
                self._wait_for_reads(forward, received)
                backward = self._compute(self.backward, k)
                gates, sums = self._reduce(k, backward)
                self.iterations.append(Iteration(forward, backward, gates, sums, held, received))
                held = self._handed_over(sums)
        else:
            for k in range(len(self.slowdown)):
                backward = self._compute(self.backward, k)
                gates, sums = self._reduce(k, backward)
                held = self._gated_spread(self._handed_over(sums), gates)
                received = self._spread(k, held)
                self._close_window(k, sums, received)
                forward = self._compute(self.forward, k)
                self._wait_for_reads(forward, received)
                self.iterations.append(Iteration(forward, backward, gates, sums, held, received))
        return self

    def parcels_of_tensor(self, parcels: Parcels) -> list[list[int]]:
        """For each tensor, the parcels that carry some of it."""
        index = {tensor.name: t for t, tensor in enumerate(self.workload.tensors)}
        found: list[list[int]] = [[] for _ in index]
        for i, slices in enumerate(parcels.slices):
            for t in sorted({index[piece.tensor] for piece in slices}):
                found[t].append(i)
        return found

    def _first_use(self, message: int) -> int:
        names = {piece.tensor for piece in self.plan.messages[message].slices}
        at, never = self.forward.at, len(self.forward.ops)
        return min(
            (at[r] for tensor in self.workload.tensors if tensor.name in names for r in tensor.readers), default=never
        )

    def _compute(self, stream: Stream, k: int) -> Ids:
        """The segments of a stream, behind what the workers ran before."""
        size = self.wiring.size
        self.graph.tag = np.array([-1])
        work_s = stream.duration_s.T * self.slowdown[k, :size]
        segments = self.graph.add((stream.segments, size), work_s=work_s)
        self.graph.edge(segments[:-1], segments[1:])
        if len(segments):
            if self._last_op is not None:
                self.graph.edge(self._last_op, segments[0])
            self._last_op = segments[-1]
        return segments

    def _wait_for_reads(self, forward: Ids, received: Ids) -> None:
        for k, tensors in self.reads.items():
            if k < len(self.forward.ops):
                parcels = sorted({i for t in tensors for i in self.readable[t]})
                self.graph.edge(received[parcels], forward[self.forward.segment[k]][None, :])

    def _reduce(self, k: int, backward: Ids) -> tuple[Ids, Ids]:
        """Hand the messages to the network as they become ready: when that is, and when their sums are there."""
        gates = self._open_gates(backward)
        self._tag(k, self.reducing)
        return gates, self.fabric.reduce(self.wiring, self.reducing, gates[self.reducing.message])

    def _open_gates(self, backward: Ids) -> Ids:
        """[message, rank]: when the worker hands each of its messages to the network."""
        graph, ops = self.graph, self.backward
        sends = REDUCING if self.fabric.servers else (*REDUCING, *SPREADING)
        ready_op = {tensor.name: ops.at[tensor.ready_after] for tensor in self.workload.tensors}
        graph.tag = np.array([-1])
        gates = graph.add((len(self.plan.messages), self.wiring.size))
        for i, message in enumerate(self.plan.messages):
            if message.kind not in sends:
                continue
            if message.kind in REDUCING:
                last = max(ready_op[piece.tensor] for piece in message.slices)
                graph.edge(backward[ops.segment[last]], gates[i])
            if self._gates:
                graph.edge(self._gates[-1], gates[i])
            self._gates.append(gates[i])
        return gates

    def _handed_over(self, sums: Ids) -> Ids:
        """[spreading parcel, ...]: when everything that it hands out is summed."""
        first, second = self._shared
        if len(first) == len(sums) == len(self.spreading) and (first == second).all():
            return sums
        self.graph.tag = np.array([-1])
        held = self.graph.add((len(self.spreading), *sums.shape[1:]))
        self.graph.edge(sums[first], held[second])
        return held

    def _gated_spread(self, held: Ids, gates: Ids) -> Ids:
        """[spreading parcel, rank]: what is a message of its own also waits for its turn."""
        separate = [i for i, m in enumerate(self.spreading.message) if self.plan.messages[m].kind != "all_reduce"]
        if not separate:
            return held
        held = np.broadcast_to(held, (len(held), self.wiring.size)).copy()
        mine = gates[self.spreading.message[separate]]
        # Handed to the network is what is there: the next message waits for that.
        self.graph.edge(held[separate], mine)
        held[separate] = mine
        return held

    def _close_window(self, k: int, sums: Ids, received: Ids) -> None:
        """No more than `in_flight` messages at once."""
        if self.fabric.in_flight is None:
            return
        count = len(self.plan.messages)
        for i, message in enumerate(self.plan.messages):
            parcels, ends = (self.spreading, received) if message.kind in SPREADING else (self.reducing, sums)
            self._done.append(ends[np.flatnonzero(parcels.message == i)])
        for at in range(k * count, (k + 1) * count):
            if at >= self.fabric.in_flight:
                self.graph.edge(self._done[at - self.fabric.in_flight], self._gates[at][None, :])

    def _spread(self, k: int, held: Ids) -> Ids:
        self._tag(k, self.spreading)
        return self.fabric.spread(self.wiring, self.spreading, held)

    def _tag(self, k: int, parcels: Parcels) -> None:
        self.graph.tag = k * len(self.plan.messages) + parcels.message
