"""Links that serve some transfers before others: strict priorities, one transfer after another.

A link that is free begins, of the transfers that are ready, the one with the highest
priority; of these the one that became ready first, then the one with the smallest key,
then with the smallest id. What has begun is not interrupted. Of the transfers of all links that
could begin at the same, earliest moment, the one with the highest priority begins
first: what it releases at this very moment counts for the others. The engine of
`engine.py` need not wait for a link to be free to know what it serves next; this one
must, so it is slower.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numba
import numpy as np

from legato.simulator.flow.engine import served

__all__ = ["run_by_priority"]

_NONE = -1


@numba.njit(cache=True)
def _before(records, priority, i, j):  # type: ignore[no-untyped-def]
    """Whether ready service i goes before ready service j."""
    if priority[i] != priority[j]:
        return priority[i] > priority[j]
    if records[i].begin_s != records[j].begin_s:
        return records[i].begin_s < records[j].begin_s
    return records[i].key < records[j].key if records[i].key != records[j].key else i < j


@numba.njit(cache=True)
def _merged(records, priority, left, right, a, b):  # type: ignore[no-untyped-def]
    """The root of two skew heaps merged into one (Sleator and Tarjan, 1986); their roots are a and b, or `_NONE`."""
    if a == _NONE:
        return b
    if b == _NONE:
        return a
    if _before(records, priority, b, a):
        a, b = b, a
    root = a
    while True:
        below = right[a]
        right[a] = left[a]
        if below == _NONE:
            left[a] = b
            return root
        if _before(records, priority, b, below):
            below, b = b, below
        left[a] = below
        a = below


@numba.njit(cache=True)
def run_by_priority(records, successors, num_links, priority, profiles=None):  # type: ignore[no-untyped-def]
    """Run all services that can run, fill in `begin_s` and `end_s`, and return how many ran.

    Service i has `priority[i]`, a whole number; services with a higher one go first. `profiles` are the
    `ServiceProfiles` of a disturbed simulation.
    """
    total = len(records)
    free = np.zeros(num_links)
    waiting = np.full(num_links, _NONE)  # root of the heap of the services that wait for the link
    woken = np.zeros(num_links, np.bool_)  # whether the heap of moments has one at which the link becomes free
    left, right = np.full(total, _NONE), np.full(total, _NONE)
    stack = np.empty(total, np.int64)  # services on no link that can run
    # (moment, whether a service may begin or else a link becomes free, -priority, ready, key, service or link)
    moments: list[tuple[float, bool, int, float, int, int]] = [(0.0, False, 0, 0.0, 0, 0)][:0]
    depth = done = 0
    for i in range(total):
        if records[i].missing == 0:
            if records[i].link < 0:
                stack[depth] = i
                depth += 1
            else:
                heappush(moments, (0.0, True, -priority[i], 0.0, records[i].key, i))
    while depth > 0 or len(moments) > 0:
        if depth > 0:
            depth -= 1
            i = stack[depth]
        else:
            now, begins, _, _, _, i = heappop(moments)
            if not begins:
                woken[i] = False
                best = waiting[i]
                if best != _NONE:
                    waiting[i] = _merged(records, priority, left, right, left[best], right[best])
                    left[best] = right[best] = _NONE
                    at = records[best]
                    heappush(moments, (now, True, -priority[best], at.begin_s, at.key, best))
                continue
            link = records[i].link
            if free[link] > now:
                waiting[link] = _merged(records, priority, left, right, waiting[link], i)
                if not woken[link]:
                    woken[link] = True
                    heappush(moments, (free[link], False, 0, 0.0, 0, np.int64(link)))  # type: ignore[misc]
                continue
            records[i].begin_s = now
        service = records[i]
        begin, link = service.begin_s, service.link
        stop = begin + service.work_s if profiles is None else served(profiles, i, begin, service.work_s)
        end = max(stop, service.end_s)
        if link >= 0:
            free[link] = stop
            if waiting[link] != _NONE and not woken[link]:
                woken[link] = True
                heappush(moments, (free[link], False, 0, 0.0, 0, np.int64(link)))  # type: ignore[misc]
        service.end_s = end
        done += 1
        head, tail = begin + service.delay_s, end + service.delay_s
        for e in range(service.first, service.first + service.count):
            j = np.int64(successors[e] >> 1)
            other = records[j]
            if successors[e] & 1:
                other.begin_s = max(other.begin_s, head)
                other.end_s = max(other.end_s, tail)
            else:
                other.begin_s = max(other.begin_s, tail)
            other.missing -= 1
            if other.missing > 0:
                continue
            if other.link < 0:
                stack[depth] = j
                depth += 1
            else:
                moment = (other.begin_s, True, -priority[j], other.begin_s, other.key, j)
                heappush(moments, moment)  # type: ignore[misc]
    return done
