"""The hot loop: services in the order in which they become ready (`graph.py` says what a service is).

Ties are decided by `(ready, key, id)`. What is on no link waits for nobody and
is run as soon as it is known when, and so is what comes to a link in order
already (`fed_links`); only other services on links go through the heap.
Compiled by numba on first use and kept on disk.
"""

from __future__ import annotations

import numba
import numpy as np

__all__ = ["link_edges", "run_services"]


@numba.njit(cache=True)
def link_edges(records, before, after):  # type: ignore[no-untyped-def]
    """Edges, grouped by the service that they leave; fills in `first`, `count` and `missing`."""
    for e in range(len(before)):
        records[before[e]].count += 1
        records[after[e] >> 1].missing += 1
    at = 0
    for i in range(len(records)):
        records[i].first = at
        at += records[i].count
        records[i].count = 0
    successors = np.empty(at, np.int64)
    for e in range(len(before)):
        i = before[e]
        successors[records[i].first + records[i].count] = after[e]
        records[i].count += 1
    return successors


@numba.njit(cache=True)
def fed_links(records, successors, num_links):  # type: ignore[no-untyped-def]
    """Which links get everything cut through from one other link, after the same delay.

    What is ready there is ready in the order in which that link served it: no need to sort it again.
    """
    feeder = np.full(num_links, -2, np.int64)  # -2: nobody yet, -1: several, or something else
    delay = np.zeros(num_links)
    takes_time = np.ones(num_links, np.bool_)  # what takes none is served at the same moment as the next
    for i in range(len(records)):
        link = records[i].link
        if link >= 0 and records[i].work_s <= 0:
            takes_time[link] = False
        if link >= 0 and records[i].missing != 1:
            feeder[link] = -1
        for e in range(records[i].first, records[i].first + records[i].count):
            other = records[successors[e] >> 1].link
            if other < 0 or feeder[other] == -1:
                continue
            same = feeder[other] == -2 or (feeder[other] == link and delay[other] == records[i].delay_s)
            feeder[other] = link if same and link >= 0 and successors[e] & 1 else -1
            delay[other] = records[i].delay_s
    fed = np.zeros(num_links, np.bool_)
    for link in range(num_links):
        fed[link] = feeder[link] >= 0 and takes_time[feeder[link]]
    return fed


@numba.njit(cache=True)
def _before(records, s, i, t, j):  # type: ignore[no-untyped-def]
    """Whether (s, i) goes before (t, j)."""
    if s != t:
        return s < t
    a, b = records[i].key, records[j].key
    return a < b if a != b else i < j


@numba.njit(cache=True)
def _sift_down(records, times, ids, size, t, i):  # type: ignore[no-untyped-def]
    """Put (t, i) where the root is missing."""
    at, child = 0, 1
    while child < size:
        if child + 1 < size and _before(records, times[child + 1], ids[child + 1], times[child], ids[child]):
            child += 1
        if not _before(records, times[child], ids[child], t, i):
            break
        times[at], ids[at] = times[child], ids[child]
        at, child = child, 2 * child + 1
    times[at], ids[at] = t, i


@numba.njit(cache=True)
def _sift_up(records, times, ids, at, t, i):  # type: ignore[no-untyped-def]
    """Put (t, i) where the last leaf is missing."""
    while at > 0:
        parent = (at - 1) >> 1
        if not _before(records, t, i, times[parent], ids[parent]):
            break
        times[at], ids[at] = times[parent], ids[parent]
        at = parent
    times[at], ids[at] = t, i


@numba.njit(cache=True)
def run_services(records, successors, num_links):  # type: ignore[no-untyped-def]
    """Run everything that can run; returns how many services did. Fills in `begin_s` and `end_s`."""
    total = len(records)
    free = np.zeros(num_links)  # from when on a link is free
    fed = fed_links(records, successors, num_links)
    times = np.empty(total + 1)
    ids = np.empty(total + 1, np.int32)
    stack = np.empty(total + 1, np.int32)
    size = 0
    for i in range(total):
        if records[i].missing == 0:
            # What is on no link goes first: it may make others ready at 0.
            _sift_up(records, times, ids, size, -1.0 if records[i].link < 0 else 0.0, i)
            size += 1
    done = 0
    while size > 0:
        stack[0], depth = ids[0], 1
        root_missing = True  # the first service that this one makes ready takes its place
        while depth > 0:
            depth -= 1
            service = records[stack[depth]]
            begin, work, link = service.begin_s, service.work_s, service.link
            if link >= 0:
                begin = max(begin, free[link])
                free[link] = begin + work
            end = max(begin + work, service.end_s)
            service.begin_s, service.end_s = begin, end
            done += 1
            head, tail = begin + service.delay_s, end + service.delay_s
            for e in range(service.first, service.first + service.count):
                j = successors[e] >> 1
                other = records[j]
                if successors[e] & 1:
                    other.begin_s = max(other.begin_s, head)
                    other.end_s = max(other.end_s, tail)
                else:
                    other.begin_s = max(other.begin_s, tail)
                other.missing -= 1
                if other.missing == 0:
                    if other.link < 0 or fed[other.link]:
                        stack[depth] = j
                        depth += 1
                    elif root_missing:
                        _sift_down(records, times, ids, size, other.begin_s, j)
                        root_missing = False
                    else:
                        _sift_up(records, times, ids, size, other.begin_s, j)
                        size += 1
        if root_missing:
            size -= 1
            if size > 0:
                _sift_down(records, times, ids, size, times[size], ids[size])
    return done
