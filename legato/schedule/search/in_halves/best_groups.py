"""The groups that the bound "equal pairs" asks for: where it is exact, they are the best ones.

Where workers update their shards only, everything can be scattered before anything is gathered. Then the time of
an iteration is the moment c at which the first all-gather begins, plus what follows it. Here T is the least time for
which some c leaves enough time on both sides (`bound/arguments/equal_pairs.py`). Groups are taken from the end of the
line, from what is ready last and needed first. Each has as many bytes as it can have for this T and this c. For a
chain of layers without updates and one collective, this is the optimum of plans that scatter everything first. Where
the two passes take their time in different layers, it can be better to scatter last what is needed last, after
something has been gathered; only the search finds that (`group_search.py`).
"""

from __future__ import annotations

import numpy as np

from legato.core.cluster import LinearCost
from legato.schedule.bound.arguments.equal_pairs import DividedPairs
from legato.schedule.bound.arguments.nested import Chain, NestedSets
from legato.schedule.search.in_halves.groups import Arranged, Groups, groups_between
from legato.schedule.search.in_halves.period import GroupedPeriod

__all__ = ["best_groups"]

#: The most sets of a chain: some tenths of a second. Like bounds, they are no part of the budget.
_SETS = 1024
#: The relative precision of the least time.
_EXACT = 1e-4


def best_groups(
    period: GroupedPeriod, low_s: float, high_s: float, *, partition: bool
) -> tuple[Groups, Arranged] | None:
    """Groups for the least time between these two, or None if there are none for less than `high_s`.

    Without `partition`, no tensor is in several of them.
    """
    workload = period.workload
    alpha_s = 2 * period.half_s(0)
    line = LinearCost(alpha_s, (2 * period.half_s(workload.nbytes) - alpha_s) / workload.nbytes)
    if line.beta_s_per_byte <= 0:
        return None
    work_s = [line.beta_s_per_byte / 2 * tensor.nbytes for tensor in workload.tensors]
    chain = Chain(period.release_s, period.tail_s, work_s, line.alpha_s / 2, sends="pairs")
    order = chain.orders()[0]
    sets = chain.sets(order, chain.sizes(order, _SETS), strict=True)
    problem = DividedPairs(sets, line.alpha_s / 2, period.backward_s, apart=True)
    found_s, moment_s, trial = high_s, 0.0, low_s * (1 + _EXACT)  # the bound is often the optimum
    while low_s * (1 + _EXACT) <= trial < found_s * (1 - _EXACT):
        if problem.fits(trial):
            found_s, moment_s = trial, problem.moment_s
        else:
            low_s = trial
        trial = (low_s + found_s) / 2
    if found_s == high_s:
        return None
    until_s = _work(sets, line.alpha_s / 2, moment_s, found_s)
    cuts = [round(2 * seconds / line.beta_s_per_byte) for seconds in until_s]
    # the chain begins with what is ready last, and groups with what is ready first
    groups = [group for group in groups_between(workload, order.tolist(), cuts, partition) if group][::-1]
    return groups, period.in_order(groups, [*range(len(groups)), *reversed(range(len(groups), 2 * len(groups)))])


def _work(sets: NestedSets, half_s: float, moment_s: float, seconds: float) -> list[float]:
    """The work on one side up to the end of each group but the last, which takes the rest."""
    found: list[float] = []
    at, count = 0, len(sets.work_s)
    while at < count:
        room_s = min(moment_s - sets.release_s[at], seconds - moment_s - sets.tail_s[at])
        found.append(float(room_s - (len(found) + 1) * half_s))
        at = max(at + 1, int(np.searchsorted(sets.work_s / 2, found[-1], side="right")))
    return found[:-1]
