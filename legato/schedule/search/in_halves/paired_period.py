"""An iteration whose all-reduces are sent in two halves: when each half goes, and when everything has run.

The network does not wait for the stream: a reduce-scatter goes when its gradients are ready, an
all-gather when the same bytes are scattered. So halves are arranged first, by list scheduling with ranks or
in a given order. Then everything on the stream has a time from which on it can run: an update from the
arrival of all that it reads, a forward op from that of all that it and the ones before it read. If the
stream is never idle while something can run, the iteration takes

    max over arrivals of (the arrival + the time of all that cannot run before it),

and no order of updates is better. One that does is: what can run first comes first.

Source: ours; list scheduling is Graham's (1969). Units: seconds and bytes.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence

from legato.core.plan import Message
from legato.core.workload import Workload
from legato.schedule.search.budget import Budget
from legato.schedule.search.in_halves.groups import EVENT_S, Arranged, GroupedPeriod, Groups, move_one

__all__ = ["PairedPeriod"]


class PairedPeriod(GroupedPeriod):
    """Gradients are gathered as soon as they are scattered, and whole tensors are updated."""

    def __init__(
        self, workload: Workload, half_s: Callable[[int], float], order: Sequence[int], budget: Budget
    ) -> None:
        super().__init__(workload, half_s, order, budget)
        self.update_s = [workload.ops[op].duration_s for op in self.updates]
        place = {op: k for k, op in enumerate(self.updates)}
        self.update_of = [(self.update_reads[op], [place[dep] for dep in self.update_waits[op]]) for op in self.updates]
        for op in self.updates:
            for t in self.update_reads[op]:
                self.tail_s[t] += workload.ops[op].duration_s

    def arrange(self, groups: Groups, rank: Sequence[tuple[int, int]]) -> Arranged:
        return self._arranged(groups, _Network(self, groups).by_rank(rank))

    def in_order(self, groups: Groups, halves: Sequence[int]) -> Arranged:
        """The iteration with halves in this order; infinite seconds if it waits for itself."""
        return self._arranged(groups, _Network(self, groups).in_order(halves))

    def again(self, groups: Groups, arranged: Arranged) -> Arranged:
        return self.in_order(groups, arranged.halves)

    def moved(self, groups: Groups, arranged: Arranged, rng: random.Random) -> Arranged:
        halves = list(arranged.halves)
        move_one(halves, rng)
        return self.in_order(groups, halves)

    def messages(self, groups: Groups, arranged: Arranged) -> Iterator[Message]:
        """The halves as messages, without collectives; all-reduces if each group is gathered as soon as scattered."""
        first, second = arranged.halves[::2], arranged.halves[1::2]
        if all(half + len(groups) == gathers for half, gathers in zip(first, second, strict=True)):
            return (Message(self.slices(groups[k])) for k in first)
        return super().messages(groups, arranged)

    def _arranged(self, groups: Groups, network: _Network) -> Arranged:
        """What the stream does while these halves are sent."""
        count = len(groups)
        self.budget.spend(0.5 * EVENT_S * (2 * count + len(self.release_s) + len(self.updates)))
        if len(network.halves) < 2 * count:
            return Arranged(math.inf, tuple(network.halves), ())
        ends, last = self._arrivals(network)
        updates = self._updates(last)
        seconds = [0.0] * len(ends)  # by arrival: the updates that can run from it on
        for arrival, duration in zip(updates, self.update_s, strict=True):
            seconds[arrival] += duration
        for (reads, _), arrival in zip(self.update_of, updates, strict=True):  # forward ops wait for all updates
            for t in reads:
                last[t] = max(last[t], arrival)
        # by arrival: the first forward op that waits for it or for a later one
        first = [len(self.forward)] * (len(ends) + 1)
        for t, arrival in enumerate(last):
            first[arrival] = min(first[arrival], self.first_read[t])
        for arrival in reversed(range(len(ends))):
            first[arrival] = min(first[arrival], first[arrival + 1])
        left, longest = 0.0, 0.0
        for arrival in reversed(range(len(ends))):
            left += seconds[arrival]
            forward_s = self.until_s[-1] - self.until_s[first[arrival] if arrival else 0]
            longest = max(longest, ends[arrival] + left + forward_s)
        return Arranged(max(longest, network.now), tuple(network.halves), self._order(updates, first))

    def _arrivals(self, network: _Network) -> tuple[list[float], list[int]]:
        """The ends of the backward pass and of each all-gather; and by tensor, which of these completes it, from 1 on.

        No arrival counts before the end of the backward pass, and 0 is that of a tensor that nothing gathers.
        """
        ends, last = [self.backward_s], [0] * len(self.release_s)
        for half in network.halves:
            if half >= network.count:
                ends.append(max(network.end[half], self.backward_s))
                for t in network.tensors[half - network.count]:
                    last[t] = len(ends) - 1
        return ends, last

    def _updates(self, last: Sequence[int]) -> list[int]:
        """By update: the arrival after which it can run, where `last` is that which completes each tensor."""
        updates: list[int] = []
        for reads, waits in self.update_of:
            arrival = 0
            for t in reads:
                arrival = max(arrival, last[t])
            for dep in waits:
                arrival = max(arrival, updates[dep])
            updates.append(arrival)
        return updates

    def _order(self, updates: Sequence[int], first: Sequence[int]) -> tuple[int, ...]:
        """What can run first comes first: of each arrival, the updates and then the forward ops."""
        order, done = [*self.backward], 0
        by_arrival: list[list[int]] = [[] for _ in first]
        for op, arrival in zip(self.updates, updates, strict=True):
            by_arrival[arrival].append(op)
        for arrival in range(len(first) - 1):
            order += by_arrival[arrival]
            order += self.forward[done : max(done, first[arrival + 1])]
            done = max(done, first[arrival + 1])
        return tuple(order)


class _Network:
    """The halves one after another, each when it can go."""

    def __init__(self, period: PairedPeriod, groups: Groups) -> None:
        self.count, self.halves = len(groups), list[int]()
        cost_s = [period.half_s(sum(stop - start for _, start, stop in group)) for group in groups]
        self.cost_s = [*cost_s, *cost_s]
        self.tensors = [list(dict.fromkeys(t for t, _, _ in group)) for group in groups]
        self.can_go = [max(period.release_s[t] for t in tensors) for tensors in self.tensors]
        self.unscattered: dict[int, int] = {}  # by tensor: groups
        self.groups_with: dict[int, list[int]] = {}
        for k, tensors in enumerate(self.tensors):
            for t in tensors:
                self.groups_with.setdefault(t, []).append(k)
        self.unscattered = {t: len(groups) for t, groups in self.groups_with.items()}
        self.waits = [len(tensors) for tensors in self.tensors]  # tensors that are not scattered
        self.now, self.end = 0.0, [math.inf] * (2 * self.count)

    def by_rank(self, rank: Sequence[tuple[int, int]]) -> _Network:
        """Whenever it is free, the network takes the half with the lowest rank of those that can go.

        A group is gathered when all parts of its tensors are scattered: those of one tensor arrive together then.
        """
        coming = [(moment, k) for k, moment in enumerate(self.can_go)]
        heapq.heapify(coming)
        there: list[tuple[tuple[int, int], int]] = []
        while coming or there:
            while coming and (coming[0][0] <= self.now or not there):
                if not there:
                    self.now = max(self.now, coming[0][0])
                half = heapq.heappop(coming)[1]
                heapq.heappush(there, (rank[half], half))
            for half in self._send(heapq.heappop(there)[1]):
                heapq.heappush(there, (rank[half], half))
        return self

    def in_order(self, halves: Sequence[int]) -> _Network:
        """Ends early if a group would be gathered before it is scattered."""
        for half in halves:
            if half < self.count:
                self.now = max(self.now, self.can_go[half])
            elif self.end[half - self.count] == math.inf:
                break
            self._send(half)
        return self

    def _send(self, half: int) -> list[int]:
        """Returns the halves that can go now."""
        self.halves.append(half)
        self.now += self.cost_s[half]
        self.end[half] = self.now
        free = []
        for t in self.tensors[half] if half < self.count else ():
            self.unscattered[t] -= 1
            if not self.unscattered[t]:
                for k in self.groups_with[t]:
                    self.waits[k] -= 1
                    if not self.waits[k]:
                        free.append(k + self.count)
        return free
