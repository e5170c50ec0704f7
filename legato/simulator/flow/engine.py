"""The hot loop: runs services in the order in which they become ready (`graph.py` defines services).

Services are ordered by `(ready, key, id)`. A service on no link never queues; it
runs as soon as its start is known. numba compiles this module on first use and
keeps the result on disk. Where links or workers are disturbed (`disturbances.py`),
numba compiles the loop a second time; the other one does not look for disturbances.

[Note: queues]
The successors of a link's services become ready mostly in the order in which the
link served them; so do the services of a link that wait for streams and
barriers. Each of these sequences is a *queue*: its services form a linked list
(`next`), and only its head is in the heap. The heap therefore grows with the
number of links, not with the number of waiting transfers. A service that comes
before the end of its queue goes into the heap directly. The order of service is
the same as with one heap of all services.
"""

from __future__ import annotations

import numba
import numpy as np

__all__ = ["link_edges", "run_services", "served"]

#: Values of `next` that are not a service: it is the last one of its queue; it has run.
_LAST, _DONE = -1, -2


@numba.njit(cache=True)
def link_edges(records, before, after):  # type: ignore[no-untyped-def]
    """Group edges by the service they leave, and fill in `first`, `count` and `missing`."""
    total = len(records)
    count, missing = np.zeros(total, np.int32), np.zeros(total, np.int32)
    for e in range(len(before)):
        count[before[e]] += 1
        missing[after[e] >> 1] += 1
    at = 0
    for i in range(total):
        record = records[i]
        record.first, record.count, record.missing = at, count[i], missing[i]
        at += count[i]
        count[i] = record.first  # from here on: where the next edge goes
    successors = np.empty(at, np.int32)
    for e in range(len(before)):
        i = before[e]
        successors[count[i]] = after[e]
        count[i] += 1
    return successors


@numba.njit(cache=True)
def _before(s, a, i, t, b, j):  # type: ignore[no-untyped-def]
    """Whether (s, a, i) comes before (t, b, j)."""
    if s != t:
        return s < t
    return a < b if a != b else i < j


@numba.njit(cache=True)
def _sift_down(heap, size, t, key, i):  # type: ignore[no-untyped-def]
    """Insert (t, key, i) into a heap whose root is missing."""
    times, keys, ids = heap
    at, child = 0, 1
    while child < size:
        other = child + 1
        if other < size and _before(times[other], keys[other], ids[other], times[child], keys[child], ids[child]):
            child = other
        if not _before(times[child], keys[child], ids[child], t, key, i):
            break
        times[at], keys[at], ids[at] = times[child], keys[child], ids[child]
        at, child = child, 2 * child + 1
    times[at], keys[at], ids[at] = t, key, i


@numba.njit(cache=True)
def _sift_up(heap, at, t, key, i):  # type: ignore[no-untyped-def]
    """Insert (t, key, i) into a heap whose last leaf is missing."""
    times, keys, ids = heap
    while at > 0:
        parent = (at - 1) >> 1
        if not _before(t, key, i, times[parent], keys[parent], ids[parent]):
            break
        times[at], keys[at], ids[at] = times[parent], keys[parent], ids[parent]
        at = parent
    times[at], keys[at], ids[at] = t, key, i


@numba.njit(cache=True)
def served(profiles, i, begin, work):  # type: ignore[no-untyped-def]
    """When service i ends that begins at `begin`, and takes `work` seconds undisturbed."""
    p = profiles.of[i]
    if p < 0:
        return begin + work
    first, last = profiles.first[p], profiles.first[p + 1]
    start = first + np.searchsorted(profiles.start_s[first:last], begin, side="right") - 1
    for k in range(start, last):
        factor, until = profiles.factor[k], np.inf
        if k + 1 < last:
            until = profiles.start_s[k + 1]
        room = (until - begin) / factor
        if work <= room:
            return begin + work * factor if work > 0 else begin
        work -= room
        begin = until
    return begin


@numba.njit(cache=True)
def run_services(records, successors, num_links, profiles=None):  # type: ignore[no-untyped-def]
    """Run all services that can run, fill in `begin_s` and `end_s`, and return how many ran.

    `profiles` are the `ServiceProfiles` of a disturbed simulation.
    """
    total = len(records)
    free = np.zeros(num_links)  # when a link becomes free
    ends = np.full(2 * num_links, -1, np.int32)  # last service of each queue: after each link, and before it
    heap = times, keys, ids = np.empty(total), np.empty(total, np.int64), np.empty(total, np.int32)
    stack = np.empty(total, np.int32)  # services on no link that can run
    size = depth = done = 0
    for i in range(total):
        records[i].next = _LAST
        if records[i].missing == 0:
            if records[i].link < 0:
                stack[depth] = i
                depth += 1
            else:
                _sift_up(heap, size, 0.0, records[i].key, i)
                size += 1
    while depth > 0 or size > 0:
        if depth > 0:
            depth -= 1
            i = stack[depth]
        else:
            i = ids[0]
            follower = records[i].next
            if follower >= 0:
                _sift_down(heap, size, records[follower].begin_s, records[follower].key, follower)
            else:
                size -= 1
                if size > 0:
                    _sift_down(heap, size, times[size], keys[size], ids[size])
        service = records[i]
        begin, work, link = service.begin_s, service.work_s, service.link
        if link >= 0:
            begin = max(begin, free[link])
        stop = begin + work if profiles is None else served(profiles, i, begin, work)
        if link >= 0:
            free[link] = stop
        end = max(stop, service.end_s)
        service.begin_s, service.end_s, service.next = begin, end, _DONE
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
            if other.missing > 0:
                continue
            if other.link < 0:
                stack[depth] = j
                depth += 1
                continue
            queue = link if link >= 0 else num_links + other.link
            last = ends[queue]
            waits = last >= 0 and records[last].next == _LAST
            if waits and _before(records[last].begin_s, records[last].key, last, other.begin_s, other.key, j):
                records[last].next = j
                ends[queue] = j
                continue
            if not waits:
                ends[queue] = j
            _sift_up(heap, size, other.begin_s, other.key, j)
            size += 1
    return done
