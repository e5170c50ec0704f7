"""The event loop, which runs services (`services.py`) as they become ready, under the discipline of the links.

- *First come, first served*: services run in the order `(ready, key, id)`. The loop need not wait for a link to become
  free, because the link's next service is already known.
- *Priorities*: a free link begins the ready service with the highest priority, and on a tie the first in the order
  `(ready, key, id)`. A service is never interrupted. If services of several links could begin at the same moment, the
  service with the highest priority begins first. When it ends, it may make other services ready at this moment, and
  these may go before the remaining services. With priorities, the loop goes through all moments at which a service
  becomes ready or a link becomes free, and is slower.

A service on no link never queues: it runs as soon as its start is known. numba compiles the loop on first use, once for
each discipline, and caches the result on disk.

[Note: queues] When a link has served its services, their successors mostly become ready in the same order. The services
on a link that wait for streams and barriers become ready mostly in order, too. Each such sequence of services is a
*queue*: its services form a linked list (`next`), and only its head is in the heap. The heap therefore grows with the
number of links, not with the number of waiting transfers. A service that becomes ready before the last service of its
queue goes directly into the heap. Services are served in the same order as with one heap of all services.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import missing_extra
from legato.simulator.flow.engine.services import NO_PROFILES, ServiceProfiles

try:
    import numba
    from numba.core import event
except ModuleNotFoundError:
    raise missing_extra("numba", "flow", "a simulation of every transfer") from None

__all__ = ["compiled", "compiled_s", "link_edges", "run_services", "served"]

compiled = numba.njit(cache=True)
#: Compiled without reference counts of arrays, which would take most of the time. Inlined functions do not need
#: reference counts, because they allocate nothing. `_nrt` is private to numba; without `_nrt`, results are the same,
#: but the loop takes several times as long.
_inlined = numba.njit(cache=True, forceinline=True, _nrt=False)  # pyrefly: ignore[no-matching-overload]

_timer = event.TimingListener()
event.register("numba:compile", _timer)

_NONE = -1
#: Values of `next` that are no service. They mean that a service is the last of its queue, or has left its queue.
_LAST, _DONE = -1, -2
#: Ids in the heap from this number down are links.
_FIRST_LINK = -2


#: The heap has services, with the moments at which they become ready, and links, with the moments at which they become
#: free.
_ENTRY = np.dtype([("moment_s", "f8"), ("key", "i8"), ("id", "i8")])
#: The time when a link becomes free. With priorities, also the root of the heap of services that wait for this moment,
#: and whether the main heap has the moment.
_LINK = np.dtype([("free_s", "f8"), ("root", "i8"), ("woken", "?")])


def compiled_s() -> float:
    """Return the seconds for which this process has compiled. Later processes load the results from disk."""
    return float(_timer.duration) if _timer.done else 0.0


def run_services(
    records: NDArray[Any],
    successors: NDArray[np.int32],
    num_links: int,
    profiles: ServiceProfiles = NO_PROFILES,
    priority: NDArray[np.int64] | None = None,
) -> int:
    """Run all services that can run, fill in `begin_s` and `end_s`, and return how many ran.

    A disturbed simulation has `profiles`. Service i has `priority[i]`, a whole number; higher priorities go first.
    """
    return int(_run(records, successors, num_links, profiles, priority))


@compiled
def link_edges(records, before, after):
    """Return edges in groups by the service at which they begin, and fill in `first`, `count` and `missing`."""
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
        count[i] = record.first  # from now on, `count` has the place of the next edge
    successors = np.empty(at, np.int32)
    for e in range(len(before)):
        i = before[e]
        successors[count[i]] = after[e]
        count[i] += 1
    return successors


@_inlined
def served(profiles, i, begin, work):
    """Return the end of service i, which begins at `begin` and would take `work` seconds without disturbances."""
    p = profiles.profile_of[i]
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


@compiled
def _run(records, successors, num_links, profiles, priority):
    total = len(records)
    # ready services on links, and on no link
    heap, stack = np.empty(total + num_links, _ENTRY), np.empty(total, np.int32)
    sizes = np.zeros(2, np.int64)  # the sizes of the heap and of the stack
    # the last services of the queues: for each link, a queue of its successors, and a queue of its own services
    ends = np.full(2 * num_links, _NONE, np.int32)
    links = np.zeros(num_links, _LINK)
    # the children of each service in the heap of its link
    below = np.full((0 if priority is None else total, 2), _NONE)
    for link in range(num_links):
        links[link].root = _NONE
    done = 0
    for i in range(total):
        records[i].next = _LAST
        if records[i].missing == 0:
            _put(records, priority, heap, stack, sizes, ends, i, num_links + records[i].link)
    while sizes[0] + sizes[1] > 0:
        now, i = _taken(records, priority, heap, stack, sizes)
        if priority is not None:
            i = _admitted(records, priority, heap, sizes, links, below, now, i)
            if i == _NONE:
                continue
        service = records[i]
        begin, stop = _serve(profiles, service, i, links)
        service.begin_s, service.end_s = begin, max(stop, service.end_s)
        done += 1
        _release(records, successors, priority, heap, stack, sizes, ends, i)
        if priority is not None and service.link >= 0:
            _wake(records, priority, heap, sizes, links, service.link)
    return done


@_inlined
def _serve(profiles, service, i, links):
    """Run service i, and return its start and end, between which its link (if any) is busy."""
    begin, link = service.begin_s, service.link
    if link >= 0:
        begin = max(begin, links[link].free_s)
    stop = begin + service.work_s if len(profiles.profile_of) == 0 else served(profiles, i, begin, service.work_s)
    if link >= 0:
        links[link].free_s = stop
    return begin, stop


@_inlined
def _release(records, successors, priority, heap, stack, sizes, ends, i):
    """Release the services that wait for service i, which has run."""
    service, num_links = records[i], len(ends) // 2
    head, tail = service.begin_s + service.delay_s, service.end_s + service.delay_s
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
            queue = service.link if service.link >= 0 else num_links + other.link
            _put(records, priority, heap, stack, sizes, ends, j, queue)


@_inlined
def _put(records, priority, heap, stack, sizes, ends, j, queue):
    """Add service j, which is ready: to a queue if it is on a link, and otherwise to the stack."""
    other = records[j]
    if other.link < 0:
        stack[sizes[1]] = j
        sizes[1] += 1
        return
    last = ends[queue]
    waits = last >= 0 and records[last].next == _LAST
    if waits:
        end = records[last]
        if _before(records, priority, end.begin_s, end.key, last, other.begin_s, other.key, j):
            end.next = j
            ends[queue] = j
            return
    else:
        ends[queue] = j
    _sift_up(records, priority, heap, sizes, other.begin_s, other.key, j)


@_inlined
def _taken(records, priority, heap, stack, sizes):
    """Remove and return the next moment and its service or link. Services on no link come before all others."""
    if sizes[1] > 0:
        sizes[1] -= 1
        return 0.0, np.int64(stack[sizes[1]])
    now, i = heap[0].moment_s, heap[0].id
    if i >= 0:
        follower = records[i].next
        records[i].next = _DONE
        if follower >= 0:
            _sift_down(records, priority, heap, sizes, records[follower].begin_s, records[follower].key, follower)
            return now, i
    sizes[0] -= 1
    if sizes[0] > 0:
        last = heap[sizes[0]]
        _sift_down(records, priority, heap, sizes, last.moment_s, last.key, last.id)
    return now, i


@_inlined
def _before(records, priority, s, a, i, t, b, j):
    """Return whether i (moment s, key a) comes before j (moment t, key b). On a tie, links precede services."""
    if s != t:
        return s < t
    if priority is not None:
        return i < j if i < 0 or j < 0 else _goes_first(records, priority, i, j)
    return a < b if a != b else i < j


@_inlined
def _goes_first(records, priority, i, j):
    """Return whether ready service i goes before ready service j on a free link."""
    if priority[i] != priority[j]:
        return priority[i] > priority[j]
    if records[i].begin_s != records[j].begin_s:
        return records[i].begin_s < records[j].begin_s
    return records[i].key < records[j].key if records[i].key != records[j].key else i < j


@_inlined
def _fill(entry, t, key, i):
    """Write an entry of the heap, field by field, because a copy of the whole entry takes longer."""
    entry.moment_s, entry.key, entry.id = t, key, i


@_inlined
def _sift_down(records, priority, heap, sizes, t, key, i):
    """Insert (t, key, i) into a heap whose root was removed."""
    at, child, size = 0, 1, sizes[0]
    while child < size:
        one = heap[child]
        if child + 1 < size:
            other = heap[child + 1]
            if _before(records, priority, other.moment_s, other.key, other.id, one.moment_s, one.key, one.id):
                child, one = child + 1, other
        if not _before(records, priority, one.moment_s, one.key, one.id, t, key, i):
            break
        _fill(heap[at], one.moment_s, one.key, one.id)
        at, child = child, 2 * child + 1
    _fill(heap[at], t, key, i)


@_inlined
def _sift_up(records, priority, heap, sizes, t, key, i):
    """Insert (t, key, i) into the heap."""
    at = sizes[0]
    sizes[0] += 1
    while at > 0:
        parent = (at - 1) >> 1
        one = heap[parent]
        if not _before(records, priority, t, key, i, one.moment_s, one.key, one.id):
            break
        _fill(heap[at], one.moment_s, one.key, one.id)
        at = parent
    _fill(heap[at], t, key, i)


@_inlined
def _admitted(records, priority, heap, sizes, links, below, now, i):
    """Return service i if it may begin now. Return `_NONE` if its link is busy, or if i is a link."""
    if i < 0:
        link = links[_FIRST_LINK - i]
        link.woken = False
        best = link.root
        if best != _NONE:
            link.root = _merged(records, priority, below, below[best, 0], below[best, 1])
            below[best] = _NONE
            _sift_up(records, priority, heap, sizes, now, records[best].key, best)
        return _NONE
    number = records[i].link
    if number < 0 or links[number].free_s <= now:
        return i
    links[number].root = _merged(records, priority, below, links[number].root, i)
    _wake(records, priority, heap, sizes, links, number)
    return _NONE


@_inlined
def _wake(records, priority, heap, sizes, links, number):
    """If a service waits for the link, add to the heap the moment at which the link becomes free."""
    link = links[number]
    if link.root != _NONE and not link.woken:
        link.woken = True
        _sift_up(records, priority, heap, sizes, link.free_s, 0, _FIRST_LINK - number)


@_inlined
def _merged(records, priority, below, a, b):
    """Merge two skew heaps (Sleator and Tarjan, 1986) with roots a and b (or `_NONE`), and return the root."""
    if a == _NONE:
        return b
    if b == _NONE:
        return a
    if _goes_first(records, priority, b, a):
        a, b = b, a
    root = a
    while True:
        right = below[a, 1]
        below[a, 1] = below[a, 0]
        if right == _NONE:
            below[a, 0] = b
            return root
        if _goes_first(records, priority, b, right):
            right, b = b, right
        below[a, 0] = right
        a = right
