"""The groups of tensors that follow from the bound "equal pairs"; if the bound is exact, they are the best groups.

If workers update only their shards, all reduce-scatters can be sent before all all-gathers. Let c be the moment when
the first all-gather begins. T is the time of the shortest iteration for which there is a c such that all
reduce-scatters fit before c and all all-gathers after c (`bound/arguments/equal_pairs.py`). Groups are formed one after
another, beginning with the bytes that are ready last and needed first. Each group has as many bytes as T and c allow.
If the workload is a chain of layers without optimizer ops, and the cluster has one collective, no plan that scatters
everything first is faster than these groups. If the two passes spend their time in different layers, it can be better
to gather some gradients before the last ones are scattered. Only the search finds such plans (`group_search.py`).
"""

from __future__ import annotations

import numpy as np

from legato.core.cluster import LinearCost
from legato.schedule.bound.arguments.equal_pairs import DividedPairs
from legato.schedule.bound.arguments.nested import Chain, NestedSets
from legato.schedule.search.in_halves.groups import Arranged, Groups, groups_between
from legato.schedule.search.in_halves.period import GroupedPeriod

__all__ = ["best_groups"]

#: The most sets of a chain. They take some tenths of a second, which, as for bounds, is not part of the budget.
_SETS = 1024
#: The relative precision of the least time.
_EXACT = 1e-4


def best_groups(
    period: GroupedPeriod, low_s: float, high_s: float, *, partition: bool
) -> tuple[Groups, Arranged] | None:
    """Return groups for the least time from `low_s` to `high_s`, or None if no time below `high_s` is possible.

    Without `partition`, no tensor is in several groups.
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
    # The chain begins with the tensors that are ready last, and groups begin with those that are ready first.
    groups = [group for group in groups_between(workload, order.tolist(), cuts, partition) if group][::-1]
    return groups, period.in_order(groups, [*range(len(groups)), *reversed(range(len(groups), 2 * len(groups)))])


def _work(sets: NestedSets, half_s: float, moment_s: float, seconds: float) -> list[float]:
    """Return, for each group but the last, the seconds to send one half of all bytes up to the group's end."""
    found: list[float] = []
    at, count = 0, len(sets.work_s)
    while at < count:
        room_s = min(moment_s - sets.release_s[at], seconds - moment_s - sets.tail_s[at])
        found.append(float(room_s - (len(found) + 1) * half_s))
        at = max(at + 1, int(np.searchsorted(sets.work_s / 2, found[-1], side="right")))
    return found[:-1]
