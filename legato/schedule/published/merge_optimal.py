"""The exact optimum of MG-WFBP's own problem, in O(L) for L tensors.

Idea: sort the gradients by the time at which they are ready, and call f(j) the earliest moment at which the first j
gradients can have arrived. The last message carries gradients i + 1 to j, for some i. This message starts when the
first i gradients have arrived and gradient j is ready:

    f(j) = min over i < j of  max(f(i), ready(j)) + alpha + beta * bytes(i..j),   f(0) = 0

It is enough to merge neighbours in ready order. Any plan with another grouping, order or partitioning can be turned
into such messages that end no later: move every byte into the first message that starts after the byte is ready.
Paper: the problem is equation 23 of MG-WFBP (Shi, Chu, Li, INFOCOM 2019). MG-WFBP's Algorithm 1 does not solve this
problem. The recurrence is ours.
Units: seconds and bytes.

The recurrence is evaluated in O(L), not O(L^2). Neither f nor ready ever falls, so the i with f(i) <= ready(j) are the
first ones, and their number only grows with j. For these i, the message waits for gradient j, and the largest i is
best, since it leaves the fewest bytes to send. For all larger i, the message waits for the network, and the best i has
the smallest difference f(i) - beta * bytes(0..i). The first of these i is the best, because the difference f(j) - beta
* bytes(0..j) never falls as j grows: it is alpha plus the least of the terms max(f(i), ready(j)) - beta * bytes(0..i).
No term falls as j grows, and the new term, for i = j - 1, is at least the difference for j - 1.

If several plans end at the same time, the plan with the fewest messages is taken.

A cost may have a floor (`LinearCost.floor_s`), the least time of a message. If i is large enough, a message costs just
the floor. The first such i, which never falls as j grows, is the best one. For smaller i, the choice is as for costs
without a floor, except that f(i) - beta * bytes(0..i) may fall. So a monotone queue keeps the least such value in a
window that only moves forward, and the recurrence still takes O(L). For up to `_FEW` gradients, the recurrence is
evaluated for every i, which is as fast and rounds less. With a floor, the result is only the best plan that merges
neighbours in ready order: a plan that moves a part of a tensor into an earlier message may be faster, because a message
below the floor carries more bytes for free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.basics.compose import (
    compose,
    message_limit,
    message_of,
    ready_order,
    release_times,
    resolve_collective,
)

__all__ = ["earliest_finishes", "merge_neighbours", "merge_optimal"]

#: Up to this number of gradients, a cost with a floor is tried for every pair of gradients.
_FEW = 4096


def merge_optimal(
    workload: Workload, cluster: Cluster, *, collective: str | None = None, max_message_bytes: int | None = None
) -> Plan:
    """Return the fastest plan without forward overlap.

    With `max_message_bytes`, the result is the fastest plan that merges neighbours in ready order into messages of at
    most this size; a larger tensor is a message of its own. Raises `InputError` if the limit is below 16 bytes or the
    cluster lacks the collective.
    """
    name, most = resolve_collective(cluster, collective), message_limit(max_message_bytes)
    order, ready = ready_order(workload), release_times(workload)
    nbytes = [workload.tensors[t].nbytes for t in order]
    _, groups = merge_neighbours([ready[t] for t in order], nbytes, cluster.cost(name), most)
    messages = [message_of(workload, order[start:stop], name) for start, stop in groups]
    return compose("merge-optimal", messages, workload)


def merge_neighbours(
    release_s: Sequence[float], nbytes: Sequence[float], cost: LinearCost, most: float = math.inf
) -> tuple[float, list[tuple[int, int]]]:
    """Return f(n), and the messages as (start, stop) ranges of gradients; `release_s` must never decrease.

    A message of several gradients has at most `most` bytes. Raises `ValueError` if the sequences differ in length or
    are empty.
    """
    if not release_s or len(release_s) != len(nbytes):
        counts = f"{len(release_s)} release times and {len(nbytes)} sizes"
        raise ValueError(f"{counts} (expected equal numbers, at least one)")
    with_floor = _with_floor if len(nbytes) <= _FEW else _with_floor_of_many
    cost = cost if len(nbytes) <= _FEW else cost.line
    bent = cost.floor_s or cost.points
    finish, split = (with_floor if bent else earliest_finishes)(release_s, nbytes, cost, most)
    groups, stop = [], len(nbytes)
    while stop:
        groups.append((split[stop], stop))
        stop = split[stop]
    return finish[-1], groups[::-1]


def earliest_finishes(
    release_s: Sequence[float], nbytes: Sequence[float], cost: LinearCost, most: float = math.inf
) -> tuple[list[float], list[int]]:
    """Return f(0) to f(n), and for each j the best i, after which the last message begins; ignore any floor."""
    upto = list(accumulate(nbytes, initial=0))
    sent = [cost.beta_s_per_byte * total for total in upto]  # time of bytes 0..j without alpha
    finish, count, split = [0.0], [0], [0]  # f(j); the number of messages; where the last message begins
    waiting, idle = 0, 0  # the first i with f(i) > ready(j); the best i before it
    first, limited = 0, upto[-1] > most  # the first i with at most `most` bytes from i to j
    alpha_s = cost.alpha_s
    for j, ready in enumerate(release_s, start=1):
        while waiting < j and finish[waiting] <= ready:
            if sent[waiting] > sent[idle] or count[waiting] < count[idle]:
                idle = waiting
            waiting += 1
        busy = waiting
        if limited:
            while upto[j] - upto[first] > most and first < j - 1:
                first += 1
            if idle < first < waiting:
                idle = waiting - 1
            busy = max(waiting, first)
        i, start = idle, ready
        if busy < j:
            later = (finish[busy] - sent[busy]) - (ready - sent[idle])
            if later < 0 or (later == 0 and count[busy] < count[idle]) or idle < first:
                i, start = busy, finish[busy]
        finish.append(start + alpha_s + (sent[j] - sent[i]))
        count.append(count[i] + 1)
        split.append(i)
    return finish, split


def _with_floor(
    release_s: Sequence[float], nbytes: Sequence[float], cost: LinearCost, most: float
) -> tuple[list[float], list[int]]:
    """Return the same as `earliest_finishes`, but for a cost with a floor or with measured points."""
    upto = np.concatenate([[0.0], np.cumsum(np.asarray(nbytes, dtype=float))])
    finish, count, split = np.zeros(len(upto)), np.zeros(len(upto), dtype=int), [0]
    first = 0
    for j, ready in enumerate(release_s, start=1):
        while upto[j] - upto[first] > most and first < j - 1:
            first += 1
        seconds = _seconds(cost, upto[j] - upto[first:j])
        ends = np.maximum(finish[first:j], ready) + seconds
        best = np.flatnonzero(ends == ends.min())
        i = first + int(best[np.argmin(count[first:j][best])])
        finish[j], count[j] = ends[i - first], count[i] + 1
        split.append(i)
    return finish.tolist(), split


def _seconds(cost: LinearCost, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `cost.cost` for each number of bytes."""
    if not cost.points:
        return np.maximum(cost.floor_s, cost.alpha_s + cost.beta_s_per_byte * nbytes)
    beyond = max(float(nbytes.max()), 2 * cost.points[-1][0])
    sizes, seconds = zip(*cost.points, (beyond, cost.cost(beyond)), strict=True)
    return np.interp(nbytes, sizes, seconds)


def _with_floor_of_many(
    release_s: Sequence[float], nbytes: Sequence[float], cost: LinearCost, most: float
) -> tuple[list[float], list[int]]:
    """Return what `_with_floor` returns, up to rounding, in O(L)."""
    upto = list(accumulate(nbytes, initial=0))
    finish, count, split = [0.0], [0], [0]
    first = waiting = large = 0  # the first i: within `most`; with f(i) > ready(j); with a message at the floor
    idle, busy, idle_small, busy_small = (_Window() for _ in range(4))
    for j, ready in enumerate(release_s, start=1):
        while upto[j] - upto[first] > most and first < j - 1:
            first += 1
        while large < j and cost.alpha_s + cost.beta_s_per_byte * (upto[j] - upto[large]) > cost.floor_s:
            busy.add(large, (finish[large] - cost.beta_s_per_byte * upto[large], count[large]))
            large += 1
        while waiting < j and finish[waiting] <= ready:
            idle_small.add(waiting, (count[waiting],))
            waiting += 1
        busy_small.add(j - 1, (finish[j - 1], count[j - 1]))
        for i in range(idle.end, min(large, waiting)):
            idle.add(i, (-cost.beta_s_per_byte * upto[i], count[i]))
        small = max(first, large)
        chosen = [idle.least(first), busy.least(max(first, waiting))]
        chosen += [idle_small.least(small), busy_small.least(max(small, waiting))]
        finish_j, count_j, i = min(
            (max(finish[i], ready) + cost.cost(upto[j] - upto[i]), count[i], i) for i in chosen if i >= first
        )
        finish.append(finish_j)
        count.append(count_j + 1)
        split.append(i)
    return finish, split


class _Window:
    """A window over keys that only moves forward; it finds the least key, and the first one if keys are equal."""

    def __init__(self) -> None:
        self.kept: deque[tuple[tuple[float, ...], int]] = deque()  # rising keys, each the least from its place on
        self.end = 0

    def add(self, place: int, key: tuple[float, ...]) -> None:
        """Add the key of `place`, and let the window end after `place`."""
        while self.kept and self.kept[-1][0] > key:
            self.kept.pop()
        self.kept.append((key, place))
        self.end = place + 1

    def least(self, begin: int) -> int:
        """Let the window begin at `begin`, and return the place of its least key, or -1 if the window is empty."""
        while self.kept and self.kept[0][1] < begin:
            self.kept.popleft()
        return self.kept[0][1] if self.kept else -1
