"""PACE: fuse small gradients into balanced groups, and let urgent ones preempt others at any moment.

Paper: Preemptive All-reduce Scheduling for Expediting Distributed DNN Training
(Bao, Peng, Chen, Wu, INFOCOM 2020).
Units: seconds and bytes.

*The schedule* (section IV). When a more urgent all-reduce becomes ready, it interrupts the all-reduce that is being
sent, so the network never sends a gradient that can wait while a more urgent gradient is ready. The paper looks for
x_i(t), which says whether operator i has the network in time slot t. PACE minimises max(y_i + L_i), where y_i is the
arrival and L_i is the longest path of computation after it (Theorem 1). For this, PACE solves an integer program with T
N variables and coefficients of (T N)^t. PACE's problem is 1 | r_j, pmtn | L_max, for which Jackson's rule is exactly
optimal in O(n log n), without slots (`jackson.py`).

In the paper, partitioning costs nothing, and a fused tensor pays the startup time once. In the plan, every piece of the
schedule is a message that pays its own startup time, so the iteration takes longer than in the paper's problem.

*Balanced tensor fusion* (section V, Algorithm 1). Small tensors are fused first, since their startup times would cost
more than preemption saves. Tensors that are ready at about the same time form groups of about the same size: for a
number R of groups, the chain of tensors in ready order is divided so that the smallest group is as large as possible.
Finally, the R is taken for which the preemptive schedule of the fused tensors is best.

The recursion for R groups tries every first group of a chain,

    MaxMinSize(i, R) = max over k > i of  min(bytes(i..k), MaxMinSize(k, R - 1))

and takes the shortest group that attains the maximum. A longer first group holds more bytes, and leaves fewer bytes for
the other groups. So the maximum is at the k where the two arguments of min cross. This k grows with i, so one search
for sorted values in a sorted sequence fills a row of the table. All rows together take O(N R) instead of O(N^2 R). The
groups are the same.

Deviations:
- `compute`: the paper assumes "unlimited" devices, on which every op runs as soon as it can. The default is "one"
  stream that runs the ops in the captured order. On one stream, the first op that reads a gradient and all later ops
  run after the gradient's arrival, and the schedule is still exactly optimal.
- The paper combines the gradients of one op before fusion. Here fusion decides whether to combine these gradients,
  since different ops may read them.
- Tensors are partitioned at multiples of 16 bytes, rounded down, so that no element is divided. A partition that
  becomes empty is not sent.
- Constraint 7 of the paper lets a gradient be sent in the slot in which it is still being computed (t < z is a misprint
  of t <= z).
- The cost of a fused tensor is the linear model that the paper fits to its measurements, including the constant.
  Equation 1 has no constant, and without a constant, fusion never helps.
- For "large" N the paper searches R at random (a momentum method that it does not describe). Here every R up to 399 is
  tried (the paper's models have up to 164 tensors), and after that R grows in steps of R / 200. The search stops when
  no larger R can be better, because computation already hides all communication, or because R startup times make the
  iteration longer. The search also stops when the table has 2^27 entries, for example, for 100,000 tensors, at
  1,342 groups.
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


#: Every number of groups R up to twice this is tried; after that, R grows in steps of R / _DENSE.
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
    """Return a plan that sends each piece of the optimal preemptive schedule as one message, with forward overlap.

    For N tensors, computing a schedule takes O(N log N), and fusing the tensors into up to R groups takes O(N R).
    Without `fusion`, the tensors are scheduled as they are (only section IV). Pieces of more than `max_message_bytes`
    are sent as several messages. Raises `InputError` if the compute setting is unknown, the limit is below 16 bytes, or
    the cluster lacks the collective.
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
    return compose("pace", divided(messages, most), workload, forward_overlap=True)


def _heads_tails(workload: Workload, compute: Compute) -> HeadsTails:
    """Return release times and tails. On one stream, tails include the optimizer ops in the order of execution."""
    if compute != "one":
        return heads_tails(workload, compute, "captured")
    return HeadsTails(release_times(workload), tails(workload, workload.iteration_order()), workload.compute_s)


@dataclass(frozen=True)
class Chain:
    """All-reduce operators in ready order: release times, sizes, and the computation after each (PACE's z, S, L)."""

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
        """Return the chain of groups with these ends.

        A group is ready when its last tensor is ready, and its tail is the longest tail of its tensors.
        """
        begins = [0, *ends[:-1]]
        return Chain(
            [self.release_s[end - 1] for end in ends],
            [self._upto[b] - self._upto[a] for a, b in zip(begins, ends, strict=True)],
            np.maximum.reduceat(self._tails, begins).tolist(),
        )


def preemptive(chain: Chain, cost: LinearCost) -> tuple[float, list[tuple[int, float, float]]]:
    """Return the best preemptive schedule: the largest arrival + tail (seconds), and pieces (operator, start, stop)."""
    pieces = jackson(chain.release_s, [cost.cost(nbytes) for nbytes in chain.nbytes], chain.tail_s)
    return max(stop + chain.tail_s[i] for i, _, stop in pieces), pieces


def fuse(chain: Chain, cost: LinearCost, compute_s: float) -> list[int]:
    """Return where the groups end in the best fused chain (Algorithm 1).

    `compute_s` is the time of an iteration if communication takes no time. If several chains have the same iteration
    time, the chain with the fewest groups is taken.
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
    """Yield, for R = 1, ..., N, where R groups of neighbours end if their smallest group is as large as possible."""
    count = len(nbytes)
    sums = [*accumulate(nbytes, initial=0)]
    upto = np.array(sums, dtype=np.int64 if sums[-1] < 2**63 else object)
    least = upto[count] - upto[:count]  # MaxMinSize(i, R) for the current R
    first_end = [np.full(count, count, np.uint32)]  # by R, i: end of the first group from i on
    for groups in range(1, count + 1):
        if groups > 1:
            least, row = _one_more_group(upto, least)
            first_end.append(row)
        ends = [0]
        for row in reversed(first_end):
            ends.append(row.item(ends[-1]))
        yield ends[1:]


def _one_more_group(upto: NDArray[Any], least: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.uint32]]:
    """Return, for all i, MaxMinSize(i, R) and the end of the first of R groups; `least` has MaxMinSize(i, R - 1)."""
    last = len(least) - 1  # the latest end of the first group
    before, starts = upto[:last], np.arange(last)
    # The shortest first group that is no smaller than the smallest group of the rest.
    ends = np.maximum(np.searchsorted(before - least[:last], before), 1)
    sizes = np.minimum(upto[ends] - before, least[ends])
    shorter = upto[ends - 1] - before
    better = (ends - 1 > starts) & (shorter >= sizes)  # a shorter first group is as good or better
    return np.where(better, shorter, sizes), np.where(better, ends - 1, ends).astype(np.uint32)


def _partition(
    groups: Sequence[Joined], pieces: Sequence[tuple[int, float, float]], cost: LinearCost
) -> list[tuple[Slice, ...]]:
    """Return the slices of each piece; a piece has the same share of its group's bytes as of the group's time."""
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
