"""Groups of gradients that are each sent in two halves: when each half goes, and each update runs.

Idea: a group is scattered once and gathered once. Given the groups and a rank for every half,
list scheduling gives a good plan in one pass over the
iteration: whenever the network is free, it takes the half with the lowest rank among those
that can go, and whenever the stream is free, it takes the update that is needed first among
those whose gradients have arrived, or else the next forward op. An update never makes the
iteration longer than a forward op in its place would, since it is all that a later gather
waits for. As in a training step, updates follow the backward pass.

This is how sharded plans are made. Where nothing is sharded, but every all-reduce is sent in two
halves, a group can be gathered as soon as it is scattered, and updates keep their places.

Source: ours; list scheduling is Graham's (1969). Units: seconds and bytes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from legato.core.plan import Message, Slice
from legato.core.workload import Workload
from legato.schedule.search.budget import Budget
from legato.simulator.period import Period

__all__ = ["Arranged", "GroupedPeriod", "Groups", "Part", "groups_of"]

#: Bytes of a tensor (its index): from a start to a stop.
Part = tuple[int, int, int]
#: What is scattered together and gathered together.
Groups = list[list[Part]]

#: What it costs to arrange an iteration: for each half, each op and each part.
_EVENT_S = 1e-6


class Arranged(NamedTuple):
    """An iteration: its seconds, its halves as they begin (k scatters group k, and k + the number of groups gathers
    it), and the order of its ops.
    """

    seconds: float
    halves: tuple[int, ...]
    op_order: tuple[int, ...]


class GroupedPeriod:
    """A period whose halves and updates can be arranged; `order` has the backward and the forward ops in their order.

    `half_s(nbytes)` is the cost of a half. If not `sharded`, gradients are gathered and not parameters: a half can go
    as soon as its group is scattered, and updates stay where `order` has them, between the forward ops.
    """

    def __init__(
        self,
        workload: Workload,
        workers: int,
        half_s: Callable[[int], float],
        order: Sequence[int],
        budget: Budget,
        *,
        sharded: bool = True,
    ) -> None:
        ops, period = workload.ops, Period.of(workload)
        self.workload, self.half_s, self.budget = workload, half_s, budget
        self.backward = [op for op in order if ops[op].phase == "backward"]
        end: dict[int, float] = {}
        self.backward_s = 0.0
        for op in self.backward:
            self.backward_s += ops[op].duration_s
            end[op] = self.backward_s
        self.release_s = [end[op] for op in period.ready_op]
        self.gather_from_s = self.backward_s if sharded else 0.0
        self.forward = [op for op in order if ops[op].phase in (("forward",) if sharded else ("forward", "optimizer"))]
        self.reads = [period.reads[op] for op in self.forward]
        self.forward_s = [ops[op].duration_s for op in self.forward]
        self.read_by: list[list[int]] = [[] for _ in workload.tensors]
        for k, tensors in enumerate(self.reads):
            for t in tensors:
                self.read_by[t].append(k)
        self.first_read = [min(readers, default=len(self.forward)) for readers in self.read_by]
        self.updates = [op for op in order if ops[op].phase == "optimizer"] if sharded else []
        self.update_s = {op: ops[op].duration_s / workers for op in self.updates}
        self.update_reads = {op: period.reads[op] for op in self.updates}
        self.update_waits = {op: [dep for dep in period.waits[op] if dep in self.update_s] for op in self.updates}
        self.updates_of = period.updates if sharded else [[] for _ in workload.tensors]
        self.followers: dict[int, list[int]] = {op: [] for op in self.updates}
        for op in self.updates:
            for dep in self.update_waits[op]:
                self.followers[dep].append(op)
        self.urgency: dict[int, int] = {}  # by update: the first forward op that waits for it
        for op in reversed(self.updates):
            own = (self.first_read[t] for t in self.update_reads[op])
            self.urgency[op] = min(
                (*own, *(self.urgency[after] for after in self.followers[op])), default=len(self.forward)
            )

    def ranks(self, groups: Groups) -> list[list[tuple[int, int]]]:
        """Ways to rank the halves of groups, in the order of `Arranged.halves`."""
        read = [min(self.first_read[t] for t, _, _ in group) for group in groups]
        numbers = range(len(groups))
        return [
            [(0, k) for k in numbers] + [(1, read[k]) for k in numbers],
            [(0, read[k]) for k in numbers] + [(1, read[k]) for k in numbers],
            [(1, read[k]) for k in numbers] + [(0, read[k]) for k in numbers],
            [(read[k], 0) for k in numbers] + [(read[k], 1) for k in numbers],
        ]

    def arrange(self, groups: Groups, rank: Sequence[tuple[int, int]]) -> Arranged:
        """Arrange an iteration by the ranks of halves."""
        return _Arrangement(self, groups, rank).run()

    def in_order(self, groups: Groups, halves: Sequence[int], updates: Sequence[int]) -> Arranged:
        """The iteration with halves and updates in these orders; infinite seconds if it waits for itself."""
        return _Arrangement(self, groups, None, halves, updates).run()

    def messages(self, groups: Groups, arranged: Arranged) -> Iterator[Message]:
        """The halves as messages, without collectives."""
        slices = [self.slices(group) for group in groups]
        for half in arranged.halves:
            gathers, k = divmod(half, len(groups))
            yield Message(slices[k], "all_gather" if gathers else "reduce_scatter")

    def slices(self, group: Iterable[Part]) -> tuple[Slice, ...]:
        """The slices of a group; parts of a tensor that follow one another are one slice."""
        joined: list[Part] = []
        for t, start, stop in group:
            if joined and joined[-1][0] == t and joined[-1][2] == start:
                joined[-1] = (t, joined[-1][1], stop)
            else:
                joined.append((t, start, stop))
        return tuple(Slice(self.workload.tensors[t].name, start, stop) for t, start, stop in joined)


class _Arrangement:
    """One pass over an iteration: the network and the stream, each with what it can do next."""

    def __init__(
        self,
        period: GroupedPeriod,
        groups: Groups,
        rank: Sequence[tuple[int, int]] | None,
        halves: Sequence[int] = (),
        updates: Sequence[int] = (),
    ) -> None:
        """By `rank`, or, without one, with halves and updates in these orders."""
        self.period, self.count = period, len(groups)
        self.rank, self.fixed, self.fixed_updates = rank, list(halves)[::-1], list(updates)[::-1]
        self.cost_s = [period.half_s(sum(stop - start for _, start, stop in group)) for group in groups]
        self.tensors = [list(dict.fromkeys(t for t, _, _ in group)) for group in groups]
        number = len(period.release_s)
        self.unscattered, self.ungathered = [0] * number, [0] * number  # by tensor: groups
        for tensors in self.tensors:
            for t in tensors:
                self.unscattered[t] += 1
                self.ungathered[t] += 1
        self.waits = {op: len(period.update_reads[op]) + len(period.update_waits[op]) for op in period.updates}
        self.since = dict.fromkeys(period.updates, period.backward_s)  # when an update can run
        self.unupdated = [len(of) for of in period.updates_of]  # by tensor: its updates
        self.groups_with: list[list[int]] = [[] for _ in range(number)]
        for k, tensors in enumerate(self.tensors):
            for t in tensors:
                self.groups_with[t].append(k)
        self.gather_waits = [len(tensors) for tensors in self.tensors]  # tensors still to be updated
        self.can_go = [max(period.release_s[t] for t in tensors) for tensors in self.tensors]
        self.can_go += [period.gather_from_s] * self.count  # parameters when nothing reads the old ones
        self.forward_waits = [len(tensors) for tensors in period.reads]
        self.forward_since = [period.backward_s] * len(period.reads)
        self.coming = [(moment, k) for k, moment in enumerate(self.can_go[: self.count])]  # halves, by when they can go
        self.there: list[tuple[tuple[int, int], int]] = []  # halves that can go, by rank
        heapq.heapify(self.coming)
        self.known = [True] * self.count + [False] * self.count  # whether `can_go` is known
        self.updates_coming: list[tuple[float, int, int]] = []
        self.updates_there: list[tuple[int, int]] = []
        self.network = 0.0
        self.stream = period.backward_s
        self.halves: list[int] = []
        self.op_order = list(period.backward)
        self.next_forward = 0
        for op, waits in self.waits.items():
            if not waits:
                self._update_can_run(op)

    def run(self) -> Arranged:
        period = self.period
        halves, ops = 2 * self.count, len(period.backward) + len(period.updates) + len(period.forward)
        period.budget.spend(_EVENT_S * (halves + ops + len(period.release_s)))
        while len(self.halves) < halves or len(self.op_order) < ops:
            network, stream = self._network_at(), self._stream_at()
            if network <= stream:
                if network == math.inf:
                    return Arranged(math.inf, tuple(self.halves), tuple(self.op_order))
                self._send(network)
            else:
                self._compute(stream)
        return Arranged(max(self.network, self.stream), tuple(self.halves), tuple(self.op_order))

    def _network_at(self) -> float:
        """When the next half begins."""
        if self.rank is None:
            if not self.fixed or not self.known[self.fixed[-1]]:
                return math.inf
            return max(self.network, self.can_go[self.fixed[-1]])
        if self.there:
            return self.network
        return max(self.network, self.coming[0][0]) if self.coming else math.inf

    def _stream_at(self) -> float:
        """When the next update or forward op begins."""
        if self.updates_there:
            return self.stream
        at = self._next_update_at()
        k = self.next_forward
        if k < len(self.forward_waits) and not self.forward_waits[k]:
            at = min(at, self.forward_since[k])
        return max(self.stream, at)

    def _next_update_at(self) -> float:
        if self.rank is None:
            known = self.fixed_updates and not self.waits[self.fixed_updates[-1]]
            return self.since[self.fixed_updates[-1]] if known else math.inf
        return self.updates_coming[0][0] if self.updates_coming else math.inf

    def _send(self, now: float) -> None:
        if self.rank is None:
            half = self.fixed.pop()
        else:
            while self.coming and self.coming[0][0] <= now:
                half = heapq.heappop(self.coming)[1]
                heapq.heappush(self.there, (self.rank[half], half))
            half = heapq.heappop(self.there)[1]
        self.halves.append(half)
        gathers, k = divmod(half, self.count)
        self.network = now = now + self.cost_s[k]
        for t in self.tensors[k]:
            if gathers:
                self.ungathered[t] -= 1
                if not self.ungathered[t]:
                    for reader in self.period.read_by[t]:
                        self.forward_waits[reader] -= 1
                        self.forward_since[reader] = max(self.forward_since[reader], now)
            else:
                self.unscattered[t] -= 1
                if not self.unscattered[t]:
                    for op in self.period.updates_of[t]:
                        self._one_less(op, now)
                    if not self.unupdated[t]:
                        self._updated(t, now)

    def _one_less(self, op: int, now: float) -> None:
        """An update waits for one thing less, since now."""
        self.waits[op] -= 1
        self.since[op] = max(self.since[op], now)
        if not self.waits[op]:
            self._update_can_run(op)

    def _update_can_run(self, op: int) -> None:
        heapq.heappush(self.updates_coming, (self.since[op], self.period.urgency[op], op))

    def _updated(self, t: int, now: float) -> None:
        """A tensor has its new value, of which each group gathers a part."""
        for k in self.groups_with[t]:
            self.gather_waits[k] -= 1
            half = k + self.count
            self.can_go[half] = max(self.can_go[half], now)
            if not self.gather_waits[k]:
                self.known[half] = True
                heapq.heappush(self.coming, (self.can_go[half], half))

    def _compute(self, now: float) -> None:
        period = self.period
        if self.rank is None:
            if self._next_update_at() <= now:
                self.updates_there.append((0, self.fixed_updates.pop()))
        else:
            while self.updates_coming and self.updates_coming[0][0] <= now:
                _, urgency, op = heapq.heappop(self.updates_coming)
                heapq.heappush(self.updates_there, (urgency, op))
        if not self.updates_there:
            self.op_order.append(period.forward[self.next_forward])
            self.stream = now + period.forward_s[self.next_forward]
            self.next_forward += 1
            return
        op = heapq.heappop(self.updates_there)[1]
        self.op_order.append(op)
        self.stream = now = now + period.update_s[op]
        for after in period.followers[op]:
            self._one_less(after, now)
        for t in period.update_reads[op]:
            self.unupdated[t] -= 1
            if not self.unupdated[t]:
                self._updated(t, now)


def groups_of(messages: Iterable[Message], workload: Workload) -> Groups:
    """The groups of a sharded plan, in the order in which they are scattered."""
    tensor_id = Period.of(workload).tensor_id
    return [
        [(tensor_id[piece.tensor], piece.start, piece.stop) for piece in message.slices]
        for message in messages
        if message.kind == "reduce_scatter"
    ]
