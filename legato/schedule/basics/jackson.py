"""Jackson's preemptive schedule: at every moment, run the ready job with the longest tail.

There is one machine. Job i has a release time r_i, a processing time p_i, and then a tail q_i, which needs no machine.
How early can the last tail end? With preemption (1 | r_j, pmtn | L_max in delivery-time form) this greedy rule is
optimal. The last tail then ends at the largest value, over all sets S of jobs, of

    min r(S) + sum p(S) + min q(S)

(Horn 1974; Carlier 1982, who calls the release time a head). PACE solves this scheduling problem (section IV), with the
network as the machine, gradients as jobs, and the remaining computation as tails. PACE uses a linear program.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["jackson"]


def jackson(
    release: Sequence[float], processing: Sequence[float], tail: Sequence[float]
) -> list[tuple[int, float, float]]:
    """Return the schedule as pieces (job, start, stop) in time order. All times must have the same unit.

    Takes O(n log n). A job is preempted only when another job is released. A job that needs no time gets one piece of
    length 0. If two jobs have equal tails, the job with the lower index runs first. Raises `ValueError` if the
    sequences differ in length.
    """
    arriving = sorted(range(len(release)), key=lambda i: release[i], reverse=True)
    left = [p for _, p, _ in zip(release, processing, tail, strict=True)]
    ready: list[tuple[float, int]] = []
    pieces: list[tuple[int, float, float]] = []
    now = 0.0
    while arriving or ready:
        if not ready:
            now = max(now, release[arriving[-1]])
        while arriving and release[arriving[-1]] <= now:
            i = arriving.pop()
            heapq.heappush(ready, (-tail[i], i))
        i = ready[0][1]
        stop = now + left[i]
        if arriving and release[arriving[-1]] < stop:
            stop = release[arriving[-1]]
            left[i] -= stop - now
        else:
            heapq.heappop(ready)
            left[i] = 0.0
        if pieces and pieces[-1][0] == i and pieces[-1][2] == now:
            pieces[-1] = (i, pieces[-1][1], stop)
        else:
            pieces.append((i, now, stop))
        now = stop
    return pieces
