"""Merges neighbours of a sequence of pieces into messages so that nothing is late.

Given are pieces in the order in which they are sent, their release times and tails, and
the cost of a message. Wanted are messages of neighbouring pieces that make the iteration,
the latest arrival plus tail, as short as possible.

For an iteration time T, the earliest moment at which the first j pieces can have arrived
with nothing late is

    f(j) = min over i < j, if at most T - tail(i..j), of
               max(f(i), ready(i..j)) + cost(bytes(i..j)),            f(0) = 0

where ready(i..j) and tail(i..j) are the largest release time and tail among the pieces of
the message. An earlier arrival never delays what follows, so one number per j is enough.
This is the recurrence of `merge_optimal.py` with deadlines, and exact for a given order.
The least T comes from bisection; each feasible answer lowers T to what its messages really
take. A try takes O(n^2), one row at a time in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from legato.schedule.search.budget import Budget

__all__ = ["Grouping", "merge_with_deadlines"]

Floats = NDArray[np.float64]

#: What a try costs: for each piece, and for each pair of pieces.
_PER_ROW_S, _PER_CELL_S = 8e-6, 1.5e-9


class Grouping(NamedTuple):
    """Messages as (start, stop) ranges of pieces, and the latest arrival plus tail (seconds)."""

    seconds: float
    messages: list[tuple[int, int]]


def merge_with_deadlines(
    release_s: Sequence[float],
    tail_s: Sequence[float],
    nbytes: Sequence[int],
    cost: Callable[[Floats], Floats],
    *,
    at_least_s: float,
    at_most_s: float,
    precision: float = 1e-4,
    budget: Budget | None = None,
) -> Grouping | None:
    """The best messages for this order of pieces, or None if none takes less than `at_most_s`.

    `at_least_s` is a lower bound of the answer. The answer is within the relative
    `precision` of the best one, unless the budget is spent first.
    """
    ready, tail = np.asarray(release_s, dtype=float), np.asarray(tail_s, dtype=float)
    sent = np.concatenate([[0.0], np.cumsum(np.asarray(nbytes, dtype=float))])
    low, high, best = at_least_s, at_most_s, None
    limit = at_most_s  # first try whether anything better exists
    budget = budget or Budget()
    while True:
        budget.spend(len(ready) * (_PER_ROW_S + _PER_CELL_S * len(ready)))
        messages = _within(limit, ready, tail, sent, cost)
        if messages is None:
            if best is None:
                return None
            low = limit
        else:
            seconds = _takes(messages, ready, tail, sent, cost)
            if seconds >= high and best is None:
                return None
            if best is None or seconds < best.seconds:
                best = Grouping(seconds, messages)
            high = min(high, seconds)
        if high - low <= precision * high or budget.spent:
            return best
        limit = (low + high) / 2


def _within(
    limit: float, ready: Floats, tail: Floats, sent: Floats, cost: Callable[[Floats], Floats]
) -> list[tuple[int, int]] | None:
    """Messages of which none arrives after `limit` minus its tail, the last one as early as possible."""
    n = len(ready)
    finish = np.full(n + 1, np.inf)
    finish[0] = 0.0
    split = np.zeros(n + 1, dtype=np.intp)
    latest_ready, longest_tail = np.zeros(n), np.zeros(n)
    first = 0  # messages from earlier pieces to here are late
    for j in range(1, n + 1):
        at = slice(first, j)
        np.maximum(latest_ready[at], ready[j - 1], out=latest_ready[at])
        np.maximum(longest_tail[at], tail[j - 1], out=longest_tail[at])
        end = np.maximum(finish[at], latest_ready[at]) + cost(sent[j] - sent[at])
        in_time = end <= limit - longest_tail[at]
        earliest = int(in_time.argmax())
        if not in_time[earliest]:
            return None
        k = int(np.where(in_time, end, np.inf).argmin())
        finish[j], split[j] = end[k], first + k
        first += earliest
    messages, stop = [], n
    while stop:
        messages.append((int(split[stop]), stop))
        stop = int(split[stop])
    return messages[::-1]


def _takes(
    messages: Sequence[tuple[int, int]], ready: Floats, tail: Floats, sent: Floats, cost: Callable[[Floats], Floats]
) -> float:
    """The latest arrival plus tail of these messages."""
    now = worst = 0.0
    costs = cost(np.array([sent[stop] - sent[start] for start, stop in messages]))
    for (start, stop), seconds in zip(messages, costs, strict=True):
        now = max(now, float(ready[start:stop].max())) + float(seconds)
        worst = max(worst, now + float(tail[start:stop].max()))
    return worst
