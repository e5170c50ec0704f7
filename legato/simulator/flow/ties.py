"""Whether the order on some link depends on rounding; numba compiles this module on first use.

One worker stands for others whose times are equal up to rounding (`classes.py`).
If two transfers become ready on a link at the same time by coincidence, rounding
may put one or the other first, and not the same one for each of these workers.
It cannot if one event makes both ready, such as the end of an op, or if both
times are the same for all these workers to the last bit.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from legato.simulator.flow.graph import Services

__all__ = ["depends_on_rounding"]


def depends_on_rounding(services: Services, rounded: NDArray[np.bool_], rounding_s: float) -> bool:
    """Whether the order of two services, which have run, depends on rounding: times differ by at most `rounding_s`.

    `rounded[i]`: service i waits for something whose times are equal up to rounding only.
    """
    records, successors, _ = services
    wired = np.flatnonzero(records["link"] >= 0)
    wired = wired[np.lexsort((wired, records["key"][wired], records["begin_s"][wired], records["link"][wired]))]
    same_link = records["link"][wired[:-1]] == records["link"][wired[1:]]
    follower = np.full(len(records), -1, np.int64)
    follower[wired[:-1][same_link]] = wired[1:][same_link]
    ready_s, event, varies = _trace(records, successors, follower, rounded, rounding_s)
    wired = wired[np.lexsort((ready_s[wired], records["link"][wired]))]
    first, second = wired[:-1], wired[1:]
    near = (records["link"][first] == records["link"][second]) & (ready_s[second] - ready_s[first] <= rounding_s)
    first, second = first[near], second[near]
    return bool(((event[first] != event[second]) & (varies[first] | varies[second])).any())


@numba.njit(cache=True)
def _trace(records, successors, follower, rounded, rounding_s):  # type: ignore[no-untyped-def]
    """(when each service became ready, the event that made it ready, whether that moment is rounded).

    An event is the begin or the end of a service that takes time or has a link: 2 * id, plus 1 if it is the begin. A
    service that several events make ready at the same time is an event of its own. `follower[i]` is the next service
    on the link of service i, or -1.
    """
    total = len(records)
    ready_s, event, varies = np.zeros(total), np.full(total, -1), rounded.copy()
    latest_s, late = np.zeros(total), rounded.copy()  # of all that the times of a service depend on
    missing = np.zeros(total, np.int32)
    for at in successors:
        missing[at >> 1] += 1
    for j in follower:
        if j >= 0:
            missing[j] += 1
    stack = np.empty(total, np.int32)
    depth = 0
    for i in range(total):
        if missing[i] == 0:
            stack[depth] = i
            depth += 1
    while depth > 0:
        depth -= 1
        i = stack[depth]
        service = records[i]
        passes_on = service.link < 0 and service.work_s == 0.0 and event[i] >= 0
        for e in range(service.first, service.first + service.count):
            j, cut = successors[e] >> 1, successors[e] & 1
            time = (service.begin_s if cut else service.end_s) + service.delay_s
            caused = event[i] if passes_on else 2 * i + cut
            if time > ready_s[j] + rounding_s:
                varies[j] = late[i] or rounded[j]
            elif time >= ready_s[j] - rounding_s:
                varies[j] = varies[j] or late[i]
            if time > ready_s[j] or event[j] < 0:
                ready_s[j], event[j] = max(time, ready_s[j]), caused
            elif time == ready_s[j] and caused != event[j]:
                event[j] = 2 * j
            # What cuts through also holds up the end: it counts with both.
            if cut or time > latest_s[j] - rounding_s:
                late[j] = late[j] or late[i]
            latest_s[j] = max(latest_s[j], time)
            missing[j] -= 1
            if missing[j] == 0:
                stack[depth] = j
                depth += 1
        j = follower[i]
        if j >= 0:
            free_s = service.begin_s + service.work_s
            if free_s >= records[j].begin_s - rounding_s:
                late[j] = late[j] or late[i]
            missing[j] -= 1
            if missing[j] == 0:
                stack[depth] = j
                depth += 1
    return ready_s, event, varies
