"""PACE: fuse small gradients into balanced groups, and let urgent ones preempt others at any moment.

Paper: Preemptive All-reduce Scheduling for Expediting Distributed DNN Training
(Bao, Peng, Chen, Wu, INFOCOM 2020).
Units: seconds and bytes.

*The schedule* (section IV). An all-reduce that is under way is interrupted the
moment a more urgent one becomes ready, so the network never works on a gradient
that can wait. The paper looks for the x_i(t), which operator has the network in
which time slot, that minimise max(y_i + L_i): arrival plus the longest path of
computation after it (Theorem 1). It solves an integer program with T N variables
and coefficients of (T N)^t. This is the problem 1 | r_j, pmtn | L_max, for which
Jackson's rule is exactly optimal in O(n log n), without slots (`jackson.py`).

A partition costs nothing in the paper; only a fused tensor pays a startup time. In
the plan, every piece of the schedule is a message and pays its own, so the
iteration takes longer than the paper's oracle believes.

*Balanced tensor fusion* (section V, Algorithm 1). Small tensors are fused first,
since their startup times would cost more than preemption gains. Tensors that are
ready at about the same time form groups of about the same size: for a number R of
groups, the chain of tensors in ready order is divided so that the smallest group
is as large as possible. Of all R, the one is taken whose fused tensors the
preemptive schedule delivers best.

The recursion for R groups tries every first group of a chain,

    MaxMinSize(i, R) = max over k > i of  min(bytes(i..k), MaxMinSize(k, R - 1))

and takes the shortest group that attains the maximum. A longer first group holds
more and leaves less, so the maximum is where the two cross, and the crossing moves
to the right with i. So a row of the table is one search for rising values in a rising
sequence: O(N R) where the recursion takes O(N^2 R). The groups are the same.

Deviations:
- `compute`: the paper assumes "unlimited" devices, on which every op runs as soon
  as it can. The default is "one" stream that runs the ops in the captured order.
  The computation after an arrival is then everything from its first reader on,
  and the schedule is still exactly optimal.
- The paper combines the gradients of one op beforehand. They may have different
  readers, so fusion decides this here.
- Tensors are partitioned at multiples of 16 bytes, rounded down, so that no element
  is divided. A partition that becomes empty is not sent.
- As printed, constraint 7 lets a gradient be sent in the slot in which it is still
  being computed (t < z should read t <= z).
- A fused tensor costs what the linear model says that the paper fits to its
  measurements, including its constant. Equation 1 has no constant, and without one
  fusion never helps.
- For "large" N the paper searches R at random (a momentum method that it does not
  describe). Here every R up to 399 is tried (the paper's models have up to 164
  tensors), then one in R / 200. The search stops where nothing better can come,
  because all communication is hidden already or R startup times alone take longer. It
  also stops where the table has 2^27 entries: at 1,342 groups of 100,000 tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Workload
from legato.schedule.basics.compose import (
    check_partitions,
    compose,
    message_limit,
    release_times,
    resolve_collective,
    tails,
)
from legato.schedule.basics.heads_tails import HeadsTails, heads_tails
from legato.schedule.basics.jackson import jackson
from legato.schedule.basics.joined import Joined, divided
from legato.simulator.period import Compute

__all__ = ["Chain", "balanced", "fuse", "pace", "preemptive"]


#: Every number of groups R is tried up to twice this, then one in R / _DENSE.
_DENSE = 200

#: The most entries of the table of groups. They take half a gigabyte.
_MOST_ENTRIES = 2**27


def pace(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    compute: Compute = "one",
    fusion: bool = True,
    max_message_bytes: int | None = None,
) -> Plan:
    """Send one message for each piece of the optimal preemptive schedule, with forward overlap.

    For N tensors, the schedule takes O(N log N) and R groups take O(N R). Without
    `fusion`, the tensors are scheduled as they are (section IV alone). Pieces of more
    than `max_message_bytes` are divided. Raises `InputError` on an unknown compute
    setting, a limit below 16 bytes or a collective the cluster lacks.
    """
    name, most = resolve_collective(cluster, collective), message_limit(max_message_bytes)
    check_partitions(workload, "max_message_bytes", most)
    cost = cluster.cost(name)
    times = _heads_tails(workload, compute)
    order = sorted(range(len(workload.tensors)), key=lambda t: (times.release_s[t], workload.tensors[t].ready_after))
    chain = Chain(
        [times.release_s[t] for t in order],
        [workload.tensors[t].nbytes for t in order],
        [times.tail_s[t] for t in order],
    )
    ends = fuse(chain, cost, times.compute_s) if fusion else list(range(1, len(order) + 1))
    groups = [Joined([workload.tensors[t] for t in order[a:b]]) for a, b in pairwise([0, *ends])]
    _, pieces = preemptive(chain.fused(ends), cost)
    messages = [Message(slices, collective=name) for slices in _partition(groups, pieces, cost)]
    return compose("pace", divided(messages, most), workload, cluster, forward_overlap=True)


def _heads_tails(workload: Workload, compute: Compute) -> HeadsTails:
    """Release times and tails; on one stream, a tail includes the optimizer ops where the plan will have them."""
    if compute != "one":
        return heads_tails(workload, compute, "captured")
    return HeadsTails(release_times(workload), tails(workload, workload.iteration_order()), workload.compute_s)


@dataclass(frozen=True)
class Chain:
    """All-reduce operators in ready order: release time, size, and the computation after (PACE's z, S and L)."""

    release_s: list[float]
    nbytes: list[int]
    tail_s: list[float]

    @cached_property
    def _upto(self) -> list[int]:
        return [*accumulate(self.nbytes, initial=0)]

    @cached_property
    def _tails(self) -> NDArray[np.float64]:
        return np.array(self.tail_s)

    def fused(self, ends: Sequence[int]) -> Chain:
        """The chain of groups with these ends: ready with the last tensor, as urgent as the most urgent one."""
        begins = [0, *ends[:-1]]
        return Chain(
            [self.release_s[end - 1] for end in ends],
            [self._upto[b] - self._upto[a] for a, b in zip(begins, ends, strict=True)],
            np.maximum.reduceat(self._tails, begins).tolist(),
        )


def preemptive(chain: Chain, cost: LinearCost) -> tuple[float, list[tuple[int, float, float]]]:
    """The best preemptive schedule: its latest arrival plus tail (seconds) and its pieces (operator, start, stop)."""
    pieces = jackson(chain.release_s, [cost.cost(nbytes) for nbytes in chain.nbytes], chain.tail_s)
    return max(stop + chain.tail_s[i] for i, _, stop in pieces), pieces


def fuse(chain: Chain, cost: LinearCost, compute_s: float) -> list[int]:
    """Where the groups end in the best fused chain: Algorithm 1.

    `compute_s` is the time of an iteration when communication is free. Of equal
    iteration times, the one with the fewest groups is taken.
    """
    best_s, best = math.inf, [len(chain.nbytes)]
    unavoidable = chain.release_s[0] + cost.beta_s_per_byte * sum(chain.nbytes) + min(chain.tail_s)
    untried = 1
    for groups, ends in enumerate(balanced(chain.nbytes), start=1):
        if max(compute_s, unavoidable + groups * cost.alpha_s) >= best_s:
            break
        if groups * len(chain.nbytes) > _MOST_ENTRIES:
            break
        if groups < untried and groups < len(chain.nbytes):
            continue
        untried = groups + max(1, groups // _DENSE)
        seconds = max(compute_s, preemptive(chain.fused(ends), cost)[0])
        if seconds < best_s:
            best_s, best = seconds, ends
    return best


def balanced(nbytes: Sequence[int]) -> Iterator[list[int]]:
    """For R = 1, 2, ..., N: where R groups of neighbours end, with the smallest group as large as possible."""
    count = len(nbytes)
    sums = [*accumulate(nbytes, initial=0)]
    upto = np.array(sums, dtype=np.int64 if sums[-1] < 2**63 else object)
    least = upto[count] - upto[:count]  # MaxMinSize(i, R) for the current R
    first_end = [np.full(count, count, np.uint32)]  # for every R, where the first group of the chain from i on ends
    for groups in range(1, count + 1):
        if groups > 1:
            least, row = _one_more_group(upto, least)
            first_end.append(row)
        ends = [0]
        for row in reversed(first_end):
            ends.append(row.item(ends[-1]))
        yield ends[1:]


def _one_more_group(upto: NDArray[Any], least: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.uint32]]:
    """MaxMinSize(., R) from MaxMinSize(., R - 1), and where the first of the R groups ends."""
    last = len(least) - 1  # the first group can go up to here
    before, starts = upto[:last], np.arange(last)
    ends = np.maximum(np.searchsorted(before - least[:last], before), 1)  # the first where the group is no smaller
    sizes = np.minimum(upto[ends] - before, least[ends])
    shorter = upto[ends - 1] - before
    better = (ends - 1 > starts) & (shorter >= sizes)  # there the group is still the smaller side
    return np.where(better, shorter, sizes), np.where(better, ends - 1, ends).astype(np.uint32)


def _partition(
    groups: Sequence[Joined], pieces: Sequence[tuple[int, float, float]], cost: LinearCost
) -> list[tuple[Slice, ...]]:
    """The slices that each piece carries: its share of the group's bytes is its share of the group's time."""
    last = {i: k for k, (i, _, _) in enumerate(pieces)}
    busy, sent = [0.0] * len(groups), [0] * len(groups)
    messages = []
    for k, (i, start, stop) in enumerate(pieces):
        group, end = groups[i], groups[i].nbytes
        busy[i] += stop - start
        if k != last[i]:
            end = group.aligned(min(int(end * busy[i] / cost.cost(end)), end))
        if end > sent[i]:
            messages.append(group.slices(sent[i], end))
            sent[i] = end
    return messages
