"""An iteration with a sharded optimizer: when each half goes, and each update runs.

Idea: given the groups and a rank for every half, list scheduling gives a good plan in one pass over the
iteration: whenever the network is free, it takes the half with the lowest rank among those
that can go, and whenever the stream is free, it takes the update that is needed first among
those whose gradients have arrived, or else the next forward op. An update never makes the
iteration longer than a forward op in its place would, since it is all that a later gather
waits for. As in a training step, updates follow the backward pass.

Source: ours; list scheduling is Graham's (1969). Units: seconds and bytes.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence

from legato.core.workload import Workload
from legato.schedule.search.budget import Budget
from legato.schedule.search.in_halves.groups import EVENT_S, Arranged, GroupedPeriod, Groups, move_one
from legato.simulator.period import Period

__all__ = ["ShardedPeriod"]


class ShardedPeriod(GroupedPeriod):
    """Parameters are gathered after the backward pass, when their updates are done."""

    def __init__(
        self, workload: Workload, workers: int, half_s: Callable[[int], float], order: Sequence[int], budget: Budget
    ) -> None:
        super().__init__(workload, half_s, order, budget)
        self.update_s = {op: workload.ops[op].duration_s / workers for op in self.updates}
        self.updates_of = Period.of(workload).updates
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

    def arrange(self, groups: Groups, rank: Sequence[tuple[int, int]]) -> Arranged:
        return _Arrangement(self, groups, rank).run()

    def in_order(self, groups: Groups, halves: Sequence[int], updates: Sequence[int] | None = None) -> Arranged:
        """The iteration with halves and updates in these orders; infinite seconds if it waits for itself.

        Without `updates`, each runs when it can.
        """
        return _Arrangement(self, groups, None, halves, updates).run()

    def again(self, groups: Groups, arranged: Arranged) -> Arranged:
        return self.in_order(groups, arranged.halves, [op for op in arranged.op_order if op in self.update_s])

    def moved(self, groups: Groups, arranged: Arranged, rng: random.Random) -> Arranged:
        halves, updates = list(arranged.halves), [op for op in arranged.op_order if op in self.update_s]
        move_one(updates if len(updates) > 1 and rng.random() < 0.5 else halves, rng)
        return self.in_order(groups, halves, updates)


class _Arrangement:
    """One pass over an iteration: the network and the stream, each with what it can do next."""

    def __init__(
        self,
        period: ShardedPeriod,
        groups: Groups,
        rank: Sequence[tuple[int, int]] | None,
        halves: Sequence[int] = (),
        updates: Sequence[int] | None = None,
    ) -> None:
        """By `rank`, or, without one, with halves in this order; with updates in this order, or when they can run."""
        self.period, self.count = period, len(groups)
        self.rank, self.fixed = rank, list(halves)[::-1]
        self.fixed_updates = None if updates is None else list(updates)[::-1]
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
        self.unupdated = [len(updates) for updates in period.updates_of]  # by tensor: its updates
        self.groups_with: list[list[int]] = [[] for _ in range(number)]
        for k, tensors in enumerate(self.tensors):
            for t in tensors:
                self.groups_with[t].append(k)
        self.gather_waits = [len(tensors) for tensors in self.tensors]  # tensors still to be updated
        self.can_go = [max(period.release_s[t] for t in tensors) for tensors in self.tensors]
        self.can_go += [period.backward_s] * self.count  # parameters when nothing reads the old ones
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
        period.budget.spend(EVENT_S * (halves + ops + len(period.release_s)))
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
        if self.fixed_updates is not None:
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
        if self.fixed_updates is not None:
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
