"""PACE's balanced tensor fusion: how many groups, and which neighbours in each.

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
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from legato.core.cluster import LinearCost
from legato.schedule.jackson import jackson

__all__ = ["Chain", "balanced", "fuse", "preemptive"]

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
