"""The exact optimum of MG-WFBP's own problem, in O(L) for L tensors.

Idea: with the gradients in ready order, let f(j) be the earliest moment at which the
first j of them can have arrived. The last message carries those from i to j, for some
i, and starts when the ones before have arrived and gradient j is ready:

    f(j) = min over i < j of  max(f(i), ready(j)) + alpha + beta * bytes(i..j),   f(0) = 0

Merging neighbours in ready order loses nothing. Any other grouping, order or
partitioning can be turned into such messages that end no later, by moving every byte
into the first message that starts after the byte is ready.
Paper: the problem is equation 23 of MG-WFBP (Shi, Chu, Li, INFOCOM 2019), whose
Algorithm 1 does not solve it. The recurrence is ours.
Units: seconds and bytes.

The recurrence is evaluated in O(L), not O(L^2). Both f and ready grow, so the i with
f(i) <= ready(j), for which the message waits for its gradient, are a prefix that only
grows with j. The best of them is the last, since it leaves the least to send. For all
other i the message waits for the network, and the best i has the least
f(i) - beta * bytes(0..i). This is the first of them, because that value never falls:
f(j) - beta * bytes(0..j) is alpha plus the least of terms that all grow with j, or
alpha more than an earlier value.

Of several plans that end at the same time, the one with fewer messages is taken.

A cost with a floor (`LinearCost.floor_s`) allows no such shortcut, and the recurrence
is evaluated in O(L^2). Its result is then the best way to merge neighbours in ready
order. It does not move bytes into a message below the floor, where they would travel
for free.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.basics.compose import compose, message_of, ready_order, release_times, resolve_collective

__all__ = ["earliest_finishes", "merge_neighbours", "merge_optimal"]


def merge_optimal(workload: Workload, cluster: Cluster, *, collective: str | None = None) -> Plan:
    """The fastest plan without forward overlap. Raises `InputError` on a collective the cluster lacks."""
    name = resolve_collective(cluster, collective)
    order, ready = ready_order(workload), release_times(workload)
    nbytes = [workload.tensors[t].nbytes for t in order]
    _, groups = merge_neighbours([ready[t] for t in order], nbytes, cluster.cost(name))
    messages = [message_of(workload, order[start:stop], name) for start, stop in groups]
    return compose("merge-optimal", messages, workload, cluster)


def merge_neighbours(
    release_s: Sequence[float], nbytes: Sequence[int], cost: LinearCost
) -> tuple[float, list[tuple[int, int]]]:
    """The pair (f(n), messages as (start, stop) ranges), for gradients whose `release_s` never decreases.

    Raises `ValueError` when the sequences differ in length or hold nothing.
    """
    if not release_s or len(release_s) != len(nbytes):
        counts = f"{len(release_s)} release times and {len(nbytes)} sizes"
        raise ValueError(f"{counts} (expected equal numbers, at least one)")
    finish, split = (_with_floor if cost.floor_s else earliest_finishes)(release_s, nbytes, cost)
    groups, stop = [], len(nbytes)
    while stop:
        groups.append((split[stop], stop))
        stop = split[stop]
    return finish[-1], groups[::-1]


def earliest_finishes(
    release_s: Sequence[float], nbytes: Sequence[int], cost: LinearCost
) -> tuple[list[float], list[int]]:
    """The values f(0) to f(n), and the best i for each; ignores a floor of the cost."""
    sent = [cost.beta_s_per_byte * total for total in accumulate(nbytes, initial=0)]  # time of bytes 0..j without alpha
    finish, count, split = [0.0], [0], [0]  # f(j); the number of messages; where the last of them begins
    waiting, idle = 0, 0  # the first i with f(i) > ready(j); the best i before it
    for j, ready in enumerate(release_s, start=1):
        while waiting < j and finish[waiting] <= ready:
            if sent[waiting] > sent[idle] or count[waiting] < count[idle]:
                idle = waiting
            waiting += 1
        i, start = idle, ready
        if waiting < j:
            later = (finish[waiting] - sent[waiting]) - (ready - sent[idle])
            if later < 0 or (later == 0 and count[waiting] < count[idle]):
                i, start = waiting, finish[waiting]
        finish.append(start + cost.alpha_s + (sent[j] - sent[i]))
        count.append(count[i] + 1)
        split.append(i)
    return finish, split


def _with_floor(release_s: Sequence[float], nbytes: Sequence[int], cost: LinearCost) -> tuple[list[float], list[int]]:
    """The same as `earliest_finishes`, for a cost with a floor."""
    upto = np.concatenate([[0.0], np.cumsum(np.asarray(nbytes, dtype=float))])
    finish, count, split = np.zeros(len(upto)), np.zeros(len(upto), dtype=int), [0]
    for j, ready in enumerate(release_s, start=1):
        seconds = np.maximum(cost.floor_s, cost.alpha_s + cost.beta_s_per_byte * (upto[j] - upto[:j]))
        ends = np.maximum(finish[:j], ready) + seconds
        best = np.flatnonzero(ends == ends.min())
        i = int(best[np.argmin(count[best])])
        finish[j], count[j] = ends[i], count[i] + 1
        split.append(i)
    return finish.tolist(), split
