"""The loop for one worker that stands for all: runs trips in the order in which they become ready (`alone.py`).

A *trip* is a transfer from the worker's outgoing link to its own incoming link.
Both links serve trips in the same order, so a trip is run as a whole, and there
is one queue. numba compiles this module on first use and keeps the result on disk.
"""

from __future__ import annotations

import numba
import numpy as np

from legato.simulator.flow.engine import _before, _sift_down, _sift_up

__all__ = ["run_trips"]

_LAST = -1


@numba.njit(cache=True)
def run_trips(records, successors, laps, sent, received, sending_s, on_the_way_s, cut_through):  # type: ignore[no-untyped-def]
    """Run all services that can run, fill in `begin_s` and `end_s`, and return how many ran.

    Service i is a trip if it has a link. It is made `laps[i]` times, each time
    when the time before has ended, and each time carries `sent[i]` transfers of
    `work_s + sending_s` seconds on the outgoing link, one after another, and `received[i]`
    on the incoming link: as many, or several that one multicast sends.
    """
    total = len(records)
    out_free = in_free = 0.0
    # Trips that become ready in order form a linked list; the others are in a heap.
    head = tail = _LAST
    size = depth = done = 0
    heap = times, keys, ids = np.empty(total), np.empty(total, np.int64), np.empty(total, np.int32)
    stack = np.empty(total, np.int32)
    ready = np.empty(total, np.int32)  # services that have just become ready
    count = 0
    for i in range(total):
        if records[i].missing == 0:
            ready[count] = i
            count += 1
    while True:
        for k in range(count):
            i = ready[k]
            if records[i].link < 0:
                stack[depth] = i
                depth += 1
                continue
            records[i].next = _LAST
            if head < 0:
                head = tail = i
            elif _before(records[tail].begin_s, records[tail].key, tail, records[i].begin_s, records[i].key, i):
                records[tail].next = i
                tail = i
            else:
                _sift_up(heap, size, records[i].begin_s, records[i].key, i)
                size += 1
        count = 0
        if depth > 0:
            depth -= 1
            i = stack[depth]
            service = records[i]
            end = max(service.begin_s + service.work_s, service.end_s)
        else:
            if head >= 0 and (
                size == 0 or _before(records[head].begin_s, records[head].key, head, times[0], keys[0], ids[0])
            ):
                i = head
                head = records[i].next
            elif size > 0:
                i = ids[0]
                size -= 1
                if size > 0:
                    _sift_down(heap, size, times[size], keys[size], ids[size])
            else:
                break
            service = records[i]
            work = service.work_s
            end = first = last = 0.0
            for k in range(received[i]):
                if k < sent[i]:
                    begin = max(service.begin_s, out_free)
                    out_free = begin + (work + sending_s)
                    last = out_free + on_the_way_s
                    first = begin + on_the_way_s if cut_through else last
                begin = max(first, in_free)
                in_free = begin + work
                end = max(in_free, last) if cut_through else in_free
            laps[i] -= 1
            if laps[i] > 0:
                service.begin_s = end + service.delay_s
                ready[0] = i
                count = 1
                continue
        service.end_s = end
        done += 1
        release = end + service.delay_s
        for e in range(service.first, service.first + service.count):
            j = successors[e] >> 1
            other = records[j]
            other.begin_s = max(other.begin_s, release)
            other.missing -= 1
            if other.missing == 0:
                ready[count] = j
                count += 1
    return done
