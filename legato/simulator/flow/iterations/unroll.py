"""Iterations of training as one graph of services: computation, messages, and their dependencies.

On parameter servers, an iteration runs from barrier to barrier (distribution, forward, backward, aggregation), so
workers that receive their parameters late start the backward pass late. On collectives, an iteration is the period of
`legato.simulator.period`: backward, all-reduce, next forward.

A worker launches its messages in the plan's order. It launches a message as soon as the previous message has been
launched and the gradients of this message are ready. Servers do not follow the plan's order: they send each sum when it
is complete, or, with a barrier, all sums when all are complete.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.simulator.flow.engine.graph import Graph
from legato.simulator.flow.engine.services import Ids
from legato.simulator.flow.fabrics.protocol import Fabric
from legato.simulator.flow.fragments import DISTRIBUTING, REDUCING, Fragments, fragment, overlaps
from legato.simulator.flow.iterations.compute import Stream, first_reads
from legato.simulator.flow.network.disturbances import Profile, Profiles
from legato.simulator.flow.network.topology import Topology

__all__ = ["Iteration", "Unrolled"]


@dataclass(frozen=True)
class Iteration:
    """The ids of the services of an iteration.

    Services in `forward` and `backward` [segment, rank] are computation of a worker. Services in `launched` [message,
    rank] end when a worker launches a message. Services in `summed` [reducing fragment, ...] end when a sum is
    complete. Services in `released` [distributing fragment, ...] end when a sum may be distributed. Services in
    `received` [distributing fragment, rank] end when a sum has arrived at a worker.
    """

    forward: Ids
    backward: Ids
    launched: Ids
    summed: Ids
    released: Ids
    received: Ids


class Unrolled:
    """A graph (`topology.graph`) of iterations of a plan on a fabric; `slowdown` scales the computation of each."""

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        fabric: Fabric,
        topology: Topology,
        op_duration_s: NDArray[np.float64],
        slowdown: NDArray[np.float64],
    ) -> None:
        self.workload, self.plan, self.fabric, self.topology = workload, plan, fabric, topology
        self.graph: Graph = topology.graph
        self.slowdown = slowdown
        self.profiles = Profiles.of(topology.network.disturbances, topology.links_of)
        placement = fabric.placed(workload)
        indexed = list(enumerate(plan.messages))
        self.reducing = fragment([m for m in indexed if m[1].kind in REDUCING], placement, fabric.message_bytes)
        self.forward = Stream.forward(workload, plan, op_duration_s)
        distributing = [m for m in indexed if m[1].kind in DISTRIBUTING]
        if fabric.servers and all(message.kind == "all_reduce" for _, message in distributing):
            first_use = self._first_uses()
            distributing.sort(key=lambda m: min(first_use[piece.tensor] for piece in m[1].slices))
        self.distributing = fragment(distributing, placement, fabric.message_bytes)
        self.backward = Stream.backward(workload, plan, self.reducing, op_duration_s)
        self.reads = first_reads(workload, plan, self.forward.ops)
        self.readable = self.fragments_of_tensor(self.distributing)
        self.shared = overlaps(self.reducing, self.distributing)
        self._ready_after = {tensor.name: tensor.ready_after for tensor in workload.tensors}
        self._last_op: Ids | None = None
        self._launched: list[Ids] = []  # all messages that workers send, in the order in which they are launched
        self._done: list[Ids] = []  # services that end when such a message has arrived on all workers
        self.iterations: list[Iteration] = []

    def build(self, begin: Ids | None = None) -> Unrolled:
        """Add all iterations to the graph, and return self. The first iteration waits for the service `begin`."""
        if begin is not None:
            self._last_op = np.broadcast_to(begin, self.topology.size)
        if self.fabric.servers:
            first = self.graph.add((1, 1)) if begin is None else begin
            released = np.broadcast_to(first, (len(self.distributing), 1))
            for k in range(len(self.slowdown)):
                received = self.fabric.distribute(self.topology, self.distributing, released)
                forward = self._compute(self.forward, k)
                self._wait_for_reads(forward, received)
                backward = self._compute(self.backward, k)
                launched = self._launch(backward)
                summed = self.fabric.reduce(self.topology, self.reducing, launched[self.reducing.message])
                self.iterations.append(Iteration(forward, backward, launched, summed, released, received))
                released = self._summed_for(summed)
        else:
            for k in range(len(self.slowdown)):
                backward = self._compute(self.backward, k)
                launched = self._launch(backward)
                summed = self.fabric.reduce(self.topology, self.reducing, launched[self.reducing.message])
                released = self._launch_distributing(self._summed_for(summed), launched)
                received = self.fabric.distribute(self.topology, self.distributing, released)
                self._limit_in_flight(k, summed, received)
                forward = self._compute(self.forward, k)
                self._wait_for_reads(forward, received)
                self.iterations.append(Iteration(forward, backward, launched, summed, released, received))
        return self

    @property
    def computing(self) -> list[tuple[Ids, NDArray[np.int64]]]:
        """Return the ids [segment, rank] of all computation, with the number of each rank's worker in the network."""
        return [(half, self.topology.numbers) for run in self.iterations for half in (run.forward, run.backward)]

    @property
    def disturbed(self) -> dict[int, Profile]:
        """Return, for each rank with disturbances, how much they lengthen its computation over time."""
        compute, numbers = self.profiles.compute, self.topology.numbers.tolist()
        return {rank: compute[number] for rank, number in enumerate(numbers) if number in compute}

    def fragments_of_tensor(self, fragments: Fragments) -> list[list[int]]:
        """Return, for each tensor, the fragments that carry some of its bytes."""
        index = {tensor.name: t for t, tensor in enumerate(self.workload.tensors)}
        found: list[list[int]] = [[] for _ in index]
        for i, slices in enumerate(fragments.slices):
            for t in sorted({index[piece.tensor] for piece in slices}):
                found[t].append(i)
        return found

    def _first_uses(self) -> dict[str, int]:
        """Return, for each tensor, the place of its first reader in the forward pass, or the end of the pass."""
        at, never = self.forward.at, len(self.forward.ops)
        return {t.name: min((at[r] for r in t.readers), default=never) for t in self.workload.tensors}

    def _compute(self, stream: Stream, k: int) -> Ids:
        """Add the segments of a stream, after the earlier computation of the workers."""
        work_s = stream.duration_s.T * self.slowdown[k, : self.topology.size]
        segments = self.graph.add((stream.segments, self.topology.size), work_s=work_s)
        self.graph.edge(segments[:-1], segments[1:])
        if len(segments):
            if self._last_op is not None:
                self.graph.edge(self._last_op, segments[0])
            self._last_op = segments[-1]
        return segments

    def _wait_for_reads(self, forward: Ids, received: Ids) -> None:
        for k, tensors in self.reads.items():
            if k < len(self.forward.ops):
                fragments = sorted({i for t in tensors for i in self.readable[t]})
                self.graph.edge(received[fragments], forward[self.forward.segment[k]][None, :])

    def _launch(self, backward: Ids) -> Ids:
        """Return services that end when each worker launches each of its messages, as [message, rank]."""
        graph = self.graph
        sends = REDUCING if self.fabric.servers else (*REDUCING, *DISTRIBUTING)
        launched = graph.add((len(self.plan.messages), self.topology.size))
        for i, message in enumerate(self.plan.messages):
            if message.kind not in sends:
                continue
            if message.kind in REDUCING:
                graph.edge(backward[self._ready_segment(i)], launched[i])
            if self._launched:
                graph.edge(self._launched[-1], launched[i])
            self._launched.append(launched[i])
        return launched

    def _ready_segment(self, i: int) -> int:
        """Return the segment of the backward pass that makes message i ready."""
        ops = self.backward
        return int(ops.segment[max(ops.at[self._ready_after[piece.tensor]] for piece in self.plan.messages[i].slices)])

    def _summed_for(self, summed: Ids) -> Ids:
        """Return services that end when all sums of a fragment are complete, as [distributing fragment, ...]."""
        first, second = self.shared
        if len(first) == len(summed) == len(self.distributing) and (first == second).all():
            return summed
        complete = self.graph.add((len(self.distributing), *summed.shape[1:]))
        self.graph.edge(summed[first], complete[second])
        return complete

    def _launch_distributing(self, complete: Ids, launched: Ids) -> Ids:
        """Return services that end when fragments may be distributed, as [distributing fragment, rank].

        Fragments of all_gather and pull messages also wait until a worker launches their message.
        """
        separate = [i for i, m in enumerate(self.distributing.message) if self.plan.messages[m].kind != "all_reduce"]
        if not separate:
            return complete
        released = np.broadcast_to(complete, (len(complete), self.topology.size)).copy()
        mine = launched[self.distributing.message[separate]]
        # A message with a separate launch is launched when its sums are complete, and the next message waits for this
        # launch.
        self.graph.edge(released[separate], mine)
        released[separate] = mine
        return released

    def _limit_in_flight(self, k: int, summed: Ids, received: Ids) -> None:
        """Allow at most `in_flight` messages at once. A message is in flight until it has ended on all workers."""
        if self.fabric.in_flight is None:
            return
        count = len(self.plan.messages)
        for i, message in enumerate(self.plan.messages):
            distributes = message.kind in DISTRIBUTING
            fragments, ends = (self.distributing, received) if distributes else (self.reducing, summed)
            self._done.append(self.graph.join(ends[np.flatnonzero(fragments.message == i)].reshape(1, -1)))
        for at in range(k * count, (k + 1) * count):
            if at >= self.fabric.in_flight:
                self.graph.edge(self._done[at - self.fabric.in_flight], self._launched[at])
