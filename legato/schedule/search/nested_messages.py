"""The messages that follow from the bound "nested". If the bound can be reached, they are the best messages.

For an iteration of T seconds, `bound/arguments/nested.py` finds the moments at which messages should begin (release
times) and end (the latest arrivals: T minus a tail). Here T is the least time for which there are such moments. Each
message then fills the time from one moment to the next with those ready bytes that are needed first. Even if the
network is free earlier, the message waits for its moment, at which some of its bytes become ready. For a chain of
layers and one collective, no other messages are faster with these tails.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from legato.schedule.basics.joined import ALIGNMENT
from legato.schedule.bound.arguments.nested import Chain, NestedSets
from legato.schedule.search.budget import Budget
from legato.schedule.search.fill import Filled, Instance

__all__ = ["nested_messages"]

#: The most sets of a chain.
_SETS = 128
#: The relative precision of the least time.
_EXACT = 2e-4
#: The work to try a time, for each set, and for each pair of ends of a set.
_PER_SET_S, _PER_PAIR_S = 1.2e-5, 2.5e-9


def nested_messages(instance: Instance) -> Filled:
    """Return the messages that follow from the bound, or a single message if that is faster.

    Each message uses the collective that is cheapest for its size.
    """
    single = instance.fill([sum(instance.nbytes)])
    seconds, moments = single.seconds, list[float]()
    for line in instance.collectives.costs:
        work_s = line.beta_s_per_byte / 2 * np.array(instance.nbytes)
        chain = Chain(instance.release_s, instance.tail_s, work_s, line.alpha_s / 2, sends="all_reduces")
        order = chain.orders()[0]
        sets = chain.sets(order, chain.sizes(order, _SETS), strict=True)
        found_s = _least_s(sets, instance.bound_s, seconds, instance.budget)
        if found_s < seconds:
            seconds, moments = found_s, _moments(sets, found_s)
    if not moments:
        return single
    sizes, not_before_s = zip(*_sizes(moments, instance), strict=True)
    return min(single, instance.fill(sizes, not_before_s=not_before_s), key=lambda filled: filled.seconds)


def _least_s(sets: NestedSets, low_s: float, high_s: float, budget: Budget) -> float:
    """Return the least iteration time above `low_s` that messages can reach, or `high_s` if none below it is found."""
    trial = high_s * (1 - _EXACT)  # first try whether there is anything better
    while low_s < trial and not budget.spent:
        budget.spend(len(sets.work_s) * (_PER_SET_S + _PER_PAIR_S * len(sets.work_s) ** 2))
        if sets.fits(trial):
            high_s = trial
        else:
            low_s = trial
        if high_s - low_s <= _EXACT * high_s:
            break
        trial = (low_s + high_s) / 2
    return high_s


def _moments(sets: NestedSets, seconds: float) -> list[float]:
    """Return the moments at which messages begin, followed by the moment at which the last message ends."""
    tables = [paid.copy() for paid in sets.messages(seconds)]
    i, j = divmod(int(tables[-1].argmin()), len(tables))
    begins, ends = {float(sets.release_s[i])}, {seconds - float(sets.tail_s[j])}
    for t in range(len(tables) - 1, 0, -1):
        inside = tables[t - 1]
        if i == t and j == t:
            i, j = divmod(int(inside.argmin()), t)
        elif i == t:
            i = int(inside[:, j].argmin())
        elif j == t:
            j = int(inside[i].argmin())
        begins.add(float(sets.release_s[i]))
        ends.add(seconds - float(sets.tail_s[j]))
    return [*sorted(begins), *sorted(ends)]


def _sizes(moments: Sequence[float], instance: Instance) -> list[tuple[int, float]]:
    """Return (bytes, moment) for a message at each moment: the ready bytes that can be sent before the next moment.

    The last message takes all remaining bytes.
    """
    release_s, nbytes, costs = instance.release_s, instance.nbytes, instance.collectives.costs
    by_release = sorted(range(len(nbytes)), key=release_s.__getitem__)
    ready, total = np.cumsum([nbytes[t] for t in by_release]), sum(nbytes)
    times = np.array([release_s[t] for t in by_release])
    sizes: list[tuple[int, float]] = []
    sent = 0
    for begin, end in itertools.pairwise(moments):
        count = int(np.searchsorted(times, begin, side="right"))
        there = int(ready[count - 1]) - sent if count else 0
        beta = [cost.beta_s_per_byte for cost in costs]
        room = max((end - begin - cost.alpha_s) / b if b else total for cost, b in zip(costs, beta, strict=True))
        size = min(there, -(-int(room) // ALIGNMENT) * ALIGNMENT)
        if size > 0:
            sizes.append((size, begin))
            sent += size
    if not sizes:
        return [(total, 0.0)]
    return [*sizes[:-1], (sizes[-1][0] + total - sent, sizes[-1][1])]
