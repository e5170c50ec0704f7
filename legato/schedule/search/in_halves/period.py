"""An iteration that sends gradients in two halves: when to send each half, and when to run each update.

Idea: given the groups and a ranking of their halves, list scheduling finds a good plan in one pass over the iteration.
Whenever the network is free, it looks at the halves that can be sent, and sends the half that comes first in the
ranking. Whenever the stream is free, it runs the most urgent update that can run, or the next forward op if no update
can run. As in a training step, all updates run after the backward pass.

With a sharded optimizer, each worker updates its own part of the scattered gradients, and a parameter is gathered after
its update. With shards, the stream should run an update before a forward op, since later gathers wait for updates, but
not for forward ops. Without shards, a gradient can be gathered once all of its tensor is scattered. Gathers do not wait
for the stream, and updates wait for gathers. Without shards, all orders of updates are equally good, if the stream is
never idle while something can run.

Source: ours; list scheduling is Graham's (1969). Units: seconds and bytes.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from legato.core.plan import Message, Slice
from legato.core.workload import Workload
from legato.schedule.search.budget import Budget
from legato.schedule.search.in_halves.groups import Arranged, Groups, Part
from legato.simulator.period import Period

__all__ = ["GroupedPeriod"]

#: The work to arrange an iteration, for each half, op and part.
_EVENT_S = 1e-6


class GroupedPeriod:
    """An iteration whose halves and updates can be arranged; `order` has all ops, with updates last.

    `half_s(nbytes)` is the cost of a half. If the optimizer is sharded, `sharded_among` is the number of workers that
    share the updates.
    """

    def __init__(
        self,
        workload: Workload,
        half_s: Callable[[int], float],
        order: Sequence[int],
        budget: Budget,
        *,
        sharded_among: int | None = None,
    ) -> None:
        period = Period.of(workload)
        seconds = period.duration_s
        self.workload, self.half_s, self.budget = workload, half_s, budget
        self.is_sharded = sharded_among is not None
        self.backward, self.forward, self.updates = (
            [op for op in order if workload.ops[op].phase == phase] for phase in ("backward", "forward", "optimizer")
        )
        end: dict[int, float] = {}
        self.backward_s = 0.0
        for op in self.backward:
            self.backward_s += seconds[op]
            end[op] = self.backward_s
        self.release_s = [end[op] for op in period.ready_op]
        self.first_read = [len(self.forward)] * len(workload.tensors)
        for k, op in reversed([*enumerate(self.forward)]):
            for t in period.reads[op]:
                self.first_read[t] = k
        until_s = [*accumulate(map(seconds.__getitem__, self.forward), initial=0.0)]
        self.tail_s = [until_s[-1] - until_s[first] for first in self.first_read]  # only forward ops
        self.update_reads = {op: period.reads[op] for op in self.updates}
        self.update_waits = {op: [dep for dep in period.waits[op] if dep in self.update_reads] for op in self.updates}
        self.update_s = {op: seconds[op] / (sharded_among or 1) for op in self.updates}
        self.updates_of = period.updates
        self._link_updates()
        self._divide_forward(until_s)

    def _link_updates(self) -> None:
        """Find the updates that wait for each update, and the first forward op that waits for it (`urgency`)."""
        self.followers: dict[int, list[int]] = {op: [] for op in self.updates}
        for op in self.updates:
            for dep in self.update_waits[op]:
                self.followers[dep].append(op)
        self.urgency: dict[int, int] = {}
        for op in reversed(self.updates):
            own = (self.first_read[t] for t in self.update_reads[op])
            after = (self.urgency[follower] for follower in self.followers[op])
            self.urgency[op] = min((*own, *after), default=len(self.forward))

    def _divide_forward(self, until_s: Sequence[float]) -> None:
        """Divide the forward pass into runs of ops; `until_s` has 0 and then the times at which its ops end."""
        # Forward ops run in order, so an op that reads no new tensor joins the run of the previous op. If
        # gathers wait for updates, each op is a run, since an update may be more urgent than the next op.
        starts = set(range(len(self.forward)) if self.is_sharded and self.updates else (0, *self.first_read))
        borders = sorted(starts | {len(self.forward)})
        self.runs = [self.forward[start:stop] for start, stop in pairwise(borders)]
        self.run_s = [until_s[stop] - until_s[start] for start, stop in pairwise(borders)]
        run_at = {start: k for k, start in enumerate(borders)}
        self.reader = [run_at[first] for first in self.first_read]  # by tensor: its first run, or their number
        self.new_reads = [0] * len(borders)
        for reader in self.reader:
            self.new_reads[reader] += 1

    def ranks(self, groups: Groups) -> list[list[tuple[int, int]]]:
        """Return several rankings: each has a rank for every half; halves are numbered as in `Arranged.halves`."""
        read = [min(self.first_read[t] for t, _, _ in group) for group in groups]
        numbers = range(len(groups))
        return [
            [(0, k) for k in numbers] + [(1, read[k]) for k in numbers],
            [(0, read[k]) for k in numbers] + [(1, read[k]) for k in numbers],
            [(1, read[k]) for k in numbers] + [(0, read[k]) for k in numbers],
            [(read[k], 0) for k in numbers] + [(read[k], 1) for k in numbers],
        ]

    def arrange(self, groups: Groups, rank: Sequence[tuple[int, int]]) -> Arranged:
        """Arrange an iteration by the ranks of its halves, and return it."""
        return _Arrangement(self, groups, rank).run()

    def in_order(self, groups: Groups, halves: Sequence[int], updates: Sequence[int] | None = None) -> Arranged:
        """Return the iteration with halves and updates in these orders; on a deadlock, its seconds are infinite.

        Without `updates`, each update runs as soon as possible.
        """
        return _Arrangement(self, groups, None, halves, updates).run()

    def again(self, groups: Groups, arranged: Arranged) -> Arranged:
        """Return the iteration with the same number of other groups, and with halves and updates in the same order."""
        return self.in_order(groups, arranged.halves, self._updates_in(arranged))

    def moved(self, groups: Groups, arranged: Arranged, rng: random.Random) -> Arranged:
        """Move a half or an update at random, and return the iteration; on a deadlock, its seconds are infinite."""
        halves, updates = list(arranged.halves), self._updates_in(arranged)
        move_updates = updates is not None and len(updates) > 1 and rng.random() < 0.5
        order = updates if updates and move_updates else halves
        order.insert(rng.randrange(len(order)), order.pop(rng.randrange(len(order))))
        return self.in_order(groups, halves, updates)

    def _updates_in(self, arranged: Arranged) -> list[int] | None:
        return [op for op in arranged.op_order if op in self.update_s] if self.is_sharded else None

    def messages(self, groups: Groups, arranged: Arranged) -> Iterator[Message]:
        """Yield the halves as messages; their `collective` is not chosen yet.

        If each group is gathered right after it is scattered, and the optimizer is not sharded, the messages are
        all-reduces.
        """
        first, second = arranged.halves[::2], arranged.halves[1::2]
        if not self.is_sharded and all(k + len(groups) == half for k, half in zip(first, second, strict=True)):
            yield from (Message(self.slices(groups[k])) for k in first)
            return
        slices = [self.slices(group) for group in groups]
        for half in arranged.halves:
            gathers, k = divmod(half, len(groups))
            yield Message(slices[k], "all_gather" if gathers else "reduce_scatter")

    def slices(self, group: Iterable[Part]) -> tuple[Slice, ...]:
        """Return the slices of a group; adjacent parts of a tensor become one slice."""
        joined: list[Part] = []
        for t, start, stop in group:
            if joined and joined[-1][0] == t and joined[-1][2] == start:
                joined[-1] = (t, joined[-1][1], stop)
            else:
                joined.append((t, start, stop))
        return tuple(Slice(self.workload.tensors[t].name, start, stop) for t, start, stop in joined)


class _Arrangement:
    """The state of one pass over an iteration: what the network and the stream have done, and what they can do next."""

    def __init__(
        self,
        period: GroupedPeriod,
        groups: Groups,
        rank: Sequence[tuple[int, int]] | None,
        halves: Sequence[int] = (),
        updates: Sequence[int] | None = None,
    ) -> None:
        """Send halves by `rank`, or else in the order of `halves`; without `updates`, updates run once they can."""
        self.period, self.count = period, len(groups)
        self.rank, self.fixed = rank, list(halves)[::-1]
        self.fixed_updates = None if updates is None else list(updates)[::-1]
        self.cost_s = [period.half_s(sum(stop - start for _, start, stop in group)) for group in groups]
        self.tensors = [list(dict.fromkeys(t for t, _, _ in group)) for group in groups]
        self.waits = {op: len(period.update_reads[op]) + len(period.update_waits[op]) for op in period.updates}
        self.since = dict.fromkeys(period.updates, period.backward_s)  # when an update can run
        self.unupdated = list(map(len, period.updates_of))  # by tensor: how many of its updates are left
        self.groups_with: list[list[int]] = [[] for _ in period.release_s]
        for k, tensors in enumerate(self.tensors):
            for t in tensors:
                self.groups_with[t].append(k)
        self.unscattered = list(map(len, self.groups_with))  # by tensor: groups that are not scattered yet
        self.ungathered = list(self.unscattered)
        self.gather_waits = list(map(len, self.tensors))  # by group: tensors that cannot be gathered yet
        self.can_go = [max(period.release_s[t] for t in tensors) for tensors in self.tensors]
        # Parameters can be gathered once no op reads their old values.
        self.can_go += [period.backward_s if period.is_sharded else 0.0] * self.count
        self.run_waits = list(period.new_reads)
        self.run_since = [period.backward_s] * len(self.run_waits)
        self.coming = list(zip(self.can_go, range(self.count), strict=False))  # halves, by when they can be sent
        self.there: list[tuple[tuple[int, int], int]] = []  # halves that can be sent now, by rank
        heapq.heapify(self.coming)
        self.known = [True] * self.count + [False] * self.count  # whether `can_go` is known
        self.updates_coming: list[tuple[float, int, int]] = []
        self.updates_there: list[tuple[int, int]] = []
        self.network = 0.0
        self.stream = period.backward_s
        self.halves: list[int] = []
        self.op_order = list(period.backward)
        self.next_run = 0
        for op, waits in self.waits.items():
            if not waits:
                self._update_can_run(op)

    def run(self) -> Arranged:
        period = self.period
        halves, ops = 2 * self.count, len(period.backward) + len(period.updates) + len(period.forward)
        period.budget.spend(_EVENT_S * (halves + len(period.runs) + len(period.updates) + len(period.release_s)))
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
        """Return when the next half begins."""
        if self.rank is None:
            if not self.fixed or not self.known[self.fixed[-1]]:
                return math.inf
            return max(self.network, self.can_go[self.fixed[-1]])
        if self.there:
            return self.network
        return max(self.network, self.coming[0][0]) if self.coming else math.inf

    def _stream_at(self) -> float:
        """Return when the next update or forward op begins."""
        if self.updates_there:
            return self.stream
        at = self._next_update_at()
        k = self.next_run
        if k < len(self.period.runs) and not self.run_waits[k]:
            at = min(at, self.run_since[k])
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
        left = self.ungathered if gathers else self.unscattered
        for t in self.tensors[k]:
            left[t] -= 1
            if not left[t]:
                self._arrived(t, gathers=bool(gathers), now=now)

    def _arrived(self, t: int, *, gathers: bool, now: float) -> None:
        """Record that all bytes of a tensor are scattered, or gathered."""
        if gathers != self.period.is_sharded:
            for op in self.period.updates_of[t]:
                self._one_less(op, now)
        if gathers:
            self._may_be_read(t, now)
        elif not (self.period.is_sharded and self.unupdated[t]):
            self._may_be_gathered(t, now)

    def _may_be_read(self, t: int, now: float) -> None:
        """Let the forward pass read a tensor if the tensor is gathered and updated."""
        if not (self.ungathered[t] or self.unupdated[t]):
            reader = self.period.reader[t]
            self.run_waits[reader] -= 1
            self.run_since[reader] = max(self.run_since[reader], now)

    def _one_less(self, op: int, now: float) -> None:
        """Record one event for which an update waits: a tensor has arrived, or another update has ended."""
        self.waits[op] -= 1
        self.since[op] = max(self.since[op], now)
        if not self.waits[op]:
            self._update_can_run(op)

    def _update_can_run(self, op: int) -> None:
        heapq.heappush(self.updates_coming, (self.since[op], self.period.urgency[op], op))

    def _may_be_gathered(self, t: int, now: float) -> None:
        """Record that a tensor may be gathered from now on, by each group that has a part of it."""
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
            self.op_order += period.runs[self.next_run]
            self.stream = now + period.run_s[self.next_run]
            self.next_run += 1
            return
        op = heapq.heappop(self.updates_there)[1]
        self.op_order.append(op)
        self.stream = now = now + period.update_s[op]
        for after in period.followers[op]:
            self._one_less(after, now)
        for t in period.update_reads[op]:
            self.unupdated[t] -= 1
            if self.period.is_sharded and not self.unupdated[t]:
                self._may_be_gathered(t, now)
            self._may_be_read(t, now)
