"""PACE: fuse small gradients to balanced groups, and let the urgent overtake at any moment.

Idea: an all-reduce that is under way is cut the moment that a more urgent one
becomes ready, so the network never works on what can wait. Small tensors are
fused first, or their startup times would eat the gain.
Paper: Preemptive All-reduce Scheduling for Expediting Distributed DNN Training
(Bao, Peng, Chen, Wu, INFOCOM 2020). Section IV: the schedule; section V: the
fusion (`pace.py`).
Units: seconds and bytes.

Section IV wants the x_i(t), which operator has the network in which time slot,
that minimise max(y_i + L_i): arrival plus longest path of computation after it
(Theorem 1). The paper solves an integer program with T N variables and
coefficients of (T N)^t. It is the problem 1 | r_j, pmtn | L_max, for which
Jackson's rule is exactly optimal in O(n log n) (`jackson.py`), without slots.

A partition costs nothing in the paper, only what is fused counts a startup
time. In the plan every piece of the schedule is a message and costs its own, so
the iteration takes longer than the paper's oracle believes.

Deviations:
- `compute`: the paper assumes "unlimited" devices, every op runs as soon as it
  can. The default is "one" stream that runs the ops in the captured order; the
  computation after an arrival is then all from its first reader on, and the
  schedule is as exactly optimal.
- The paper combines the gradients of one op beforehand. They may have different
  readers, so here fusion decides.
- A cut falls on a multiple of 16 bytes of its tensor, the next one down, so
  that no element is divided; a piece that this leaves empty is not sent.
- As printed, constraint 7 lets a gradient be sent in the very slot in which it
  is still being computed (t < z should read t <= z).

PACE's balanced tensor fusion: how many groups, and which neighbours in each.

Idea: fuse tensors that are ready at about the same time, to groups of about the
same size. For a number R of groups, cut the chain of tensors in ready order so
that the smallest group is as large as possible; of all R, take the one whose
fused tensors the preemptive schedule delivers best.
Paper: PACE (Bao, Peng, Chen, Wu, INFOCOM 2020), section V, Algorithm 1.
Units: seconds and bytes.

The recursion for R groups tries every first group of a chain,

    MaxMinSize(i, R) = max over k > i of  min(bytes(i..k), MaxMinSize(k, R - 1))

and takes the shortest that attains it. A longer first group holds more and
leaves less, so the maximum is where the two cross, and the crossing moves to
the right with i: a row of the table takes one walk over the chain, O(N R) where
the recursion takes O(N^2 R). The groups are the same.

Deviations:
- What a fused tensor costs is the linear model that the paper fits to its
  measurements, with its constant. Equation 1 has none, and then no fusion is
  ever better than no fusion.
- For "large" N the paper searches R at random (a momentum method that it does
  not describe). We try every R up to 399 (its models have up to 164 tensors),
  then one in R / 200; and stop where nothing better can come, because all is
  hidden already or R startup times alone take longer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Tensor, Workload
from legato.schedule.basics.compose import compose, release_times, resolve_collective
from legato.schedule.basics.heads_tails import HeadsTails, heads_tails
from legato.schedule.basics.jackson import jackson
from legato.simulator.period import Compute

__all__ = ["Chain", "balanced", "fuse", "pace", "preemptive"]

_ALIGNMENT = 16


def pace(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    compute: Compute = "one",
    fusion: bool = True,
) -> Plan:
    """A message for each piece of the optimal preemptive schedule, with forward overlap.

    The schedule takes O(N log N) for N tensors, fusion O(N^2); with `fusion`
    off, the tensors are scheduled as they are (section IV alone). Raises
    `InputError` on a compute setting that does not exist or a collective the
    cluster lacks.
    """
    name = resolve_collective(cluster, collective)
    cost = cluster.cost(name)
    times = _heads_tails(workload, compute)
    order = sorted(range(len(workload.tensors)), key=lambda t: (times.release_s[t], workload.tensors[t].ready_after))
    chain = Chain(
        [times.release_s[t] for t in order],
        [workload.tensors[t].nbytes for t in order],
        [times.tail_s[t] for t in order],
    )
    ends = fuse(chain, cost, times.compute_s) if fusion else list(range(1, len(order) + 1))
    groups = [_Fused([workload.tensors[t] for t in order[a:b]]) for a, b in pairwise([0, *ends])]
    _, pieces = preemptive(chain.fused(ends), cost)
    messages = [Message(slices, collective=name) for slices in _cut(groups, pieces, cost)]
    return compose("pace", messages, workload, cluster, forward_overlap=True)


def _heads_tails(workload: Workload, compute: Compute) -> HeadsTails:
    """Heads and tails of the DAG; on one stream with the optimizer ops too where the plan will have them."""
    if compute != "one":
        return heads_tails(workload, compute, "captured")
    backwards = workload.iteration_order()[::-1]
    rest = dict(zip(backwards, accumulate(workload.ops[i].duration_s for i in backwards), strict=True))
    tails = [max((rest[r] for r in tensor.readers), default=0.0) for tensor in workload.tensors]
    return HeadsTails(release_times(workload), tails, workload.compute_s)


class _Fused:
    """Tensors laid end to end."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        *self.starts, self.nbytes = accumulate((tensor.nbytes for tensor in tensors), initial=0)

    def aligned(self, at: int) -> int:
        """The last place up to `at` where a tensor may be cut."""
        start = self.starts[bisect_right(self.starts, at) - 1]
        return start + (at - start) // _ALIGNMENT * _ALIGNMENT

    def slices(self, start: int, stop: int) -> tuple[Slice, ...]:
        """Bytes `start` to `stop` of the whole as slices of its tensors."""
        found = []
        k = bisect_right(self.starts, start) - 1
        while start < stop:
            begin, tensor = self.starts[k], self.tensors[k]
            end = min(stop, begin + tensor.nbytes)
            found.append(Slice(tensor.name, start - begin, end - begin))
            start, k = end, k + 1
        return tuple(found)


def _cut(
    groups: Sequence[_Fused], pieces: Sequence[tuple[int, float, float]], cost: LinearCost
) -> list[tuple[Slice, ...]]:
    """What each piece carries: the share of its group's bytes that it has of its group's time."""
    last = {i: k for k, (i, _, _) in enumerate(pieces)}
    busy, sent = [0.0] * len(groups), [0] * len(groups)
    cuts = []
    for k, (i, start, stop) in enumerate(pieces):
        group, end = groups[i], groups[i].nbytes
        busy[i] += stop - start
        if k != last[i]:
            end = group.aligned(min(int(end * busy[i] / cost.cost(end)), end))
        if end > sent[i]:
            cuts.append(group.slices(sent[i], end))
            sent[i] = end
    return cuts


#: Every number of groups is tried up to twice this one, then one in so many.
_DENSE = 200


class Chain(NamedTuple):
    """All-reduce operators in ready order: ready, size, and the computation after (PACE's z, S and L)."""

    release_s: list[float]
    nbytes: list[int]
    tail_s: list[float]

    def fused(self, ends: Sequence[int]) -> Chain:
        """The chain of groups that end at these places: ready with its last tensor, as urgent as its most urgent."""
        upto = list(accumulate(self.nbytes, initial=0))
        return Chain(
            [self.release_s[end - 1] for end in ends],
            [upto[b] - upto[a] for a, b in pairwise([0, *ends])],
            [max(self.tail_s[a:b]) for a, b in pairwise([0, *ends])],
        )


def preemptive(chain: Chain, cost: LinearCost) -> tuple[float, list[tuple[int, float, float]]]:
    """The best preemptive schedule: latest arrival plus tail in seconds, and its pieces (operator, start, stop)."""
    pieces = jackson(chain.release_s, [cost.cost(nbytes) for nbytes in chain.nbytes], chain.tail_s)
    return max(stop + chain.tail_s[i] for i, _, stop in pieces), pieces


def fuse(chain: Chain, cost: LinearCost, compute_s: float) -> list[int]:
    """Where the groups end in the best fused chain: Algorithm 1.

    `compute_s` is the time of an iteration when communication is free. Of equal
    iteration times, the fewest groups.
    """
    best_s, best = math.inf, [len(chain.nbytes)]
    unavoidable = chain.release_s[0] + cost.beta_s_per_byte * sum(chain.nbytes) + min(chain.tail_s)
    untried = 1
    for groups, ends in enumerate(balanced(chain.nbytes), start=1):
        if max(compute_s, unavoidable + groups * cost.alpha_s) >= best_s:
            break
        if groups < untried and groups < len(chain.nbytes):
            continue
        untried = groups + max(1, groups // _DENSE)
        seconds = max(compute_s, preemptive(chain.fused(ends), cost)[0])
        if seconds < best_s:
            best_s, best = seconds, ends
    return best


def balanced(nbytes: Sequence[int]) -> Iterator[list[int]]:
    """For R = 1, 2, ..., N in turn: where the R groups of neighbours end whose smallest is as large as possible."""
    count = len(nbytes)
    upto = list(accumulate(nbytes, initial=0))
    least = [upto[count] - start for start in upto[:count]]  # MaxMinSize(i, R), for the R at hand
    first_end = [[count] * count]  # for every R, where the first group of the chain from i on ends
    for groups in range(1, count + 1):
        if groups > 1:
            least, row = _one_more_group(upto, least)
            first_end.append(row)
        ends = [0]
        for row in reversed(first_end):
            ends.append(row[ends[-1]])
        yield ends[1:]


def _one_more_group(upto: list[int], least: list[int]) -> tuple[list[int], list[int]]:
    """From MaxMinSize(., R - 1): MaxMinSize(., R), and where the first of the R groups ends."""
    sizes, ends = [], []
    last = len(least) - 1  # the first group can go up to here
    k = 1
    for i in range(last):
        while k < last and upto[k] - upto[i] < least[k]:
            k += 1
        size, end = min(upto[k] - upto[i], least[k]), k
        if k - 1 > i and upto[k - 1] - upto[i] >= size:  # the group is still the smaller side there
            size, end = upto[k - 1] - upto[i], k - 1
        sizes.append(size)
        ends.append(end)
    return sizes, ends
