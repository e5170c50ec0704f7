"""The loops for many workers that take turns on servers (`staggered.py`); numba compiles them on first use.

Each loop does, for all workers, what the engine does on the services of one
link or one stream, with the same sums in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

__all__ = ["Job", "serve_pushes", "serve_turns", "turns_of", "work"]

Numbers = NDArray[np.int64]
Times = NDArray[np.float64]


class Job(NamedTuple):
    """What every worker does in an iteration; a *part* is the share of a fragment that one server holds.

    Sequences of sequences are flat: those of i are at `first[i]` to `first[i + 1]`.
    """

    latency_s: float  # without the time for which the sender is busy
    cut_through: bool
    parts: int  # of each fragment
    sent_s: Times  # [pulled part]: on the server's link
    pulled_s: Times  # [pulled part]: on the worker's link
    reads: Numbers  # the fragments that a forward segment waits for
    first_read: Numbers
    forward_s: Times  # [segment]
    backward_s: Times  # [segment]
    pushes: Numbers  # messages that are pushed, in the plan's order
    after: Numbers  # [pushed message]: the backward segment that makes it ready
    message: Numbers  # [pushed fragment]
    pushed_s: Times  # [pushed part]: on the worker's link


@numba.njit(cache=True)
def serve_turns(ready_s, first, parts, sent_s, free_s, workers, block, checkpoint):  # type: ignore[no-untyped-def]
    """Send rounds to all workers, one after another; return when the link is free.

    Round g sends `parts[first[g]:first[g + 1]]` to each worker in turn, from
    `ready_s[g]` on. `checkpoint[g, b]` becomes the moment at which the link is
    free for worker b * block.
    """
    for g in range(len(ready_s)):
        free_s = max(ready_s[g], free_s)
        for b in range(checkpoint.shape[1]):
            checkpoint[g, b] = free_s
            for _ in range(b * block, min(workers, (b + 1) * block)):
                for k in range(first[g], first[g + 1]):
                    free_s += sent_s[parts[k]]
    return free_s


@numba.njit(cache=True)
def turns_of(first, parts, sent_s, checkpoint, begin_s):  # type: ignore[no-untyped-def]
    """Fill in `begin_s[part, worker]`: when a server begins to send to each worker of a block."""
    for g in range(len(checkpoint)):
        free_s = checkpoint[g]
        for w in range(begin_s.shape[1]):
            for k in range(first[g], first[g + 1]):
                begin_s[parts[k], w] = free_s
                free_s += sent_s[parts[k]]


@numba.njit(cache=True)
def work(job, sent_begin_s, state, received, forward, backward, launched, begin_s):  # type: ignore[no-untyped-def]
    """Run an iteration of a block of workers; return whether each receives, and launches, after all that was before.

    `sent_begin_s[part, worker]` is when the servers begin to send to each. `state[worker]` is carried from
    iteration to iteration: when the last transfer that was received became ready, when the links in and out are
    free, when the last op ended, and when the last message was launched. All else is filled in: `received[fragment,
    worker]`, `launched[message, worker]`, when segments begin, and `begin_s[part, worker]`, when pushes begin.
    """
    pulled, latency_s = len(job.sent_s), job.latency_s
    order = np.arange(pulled)
    ready, tail = np.empty(pulled), np.empty(pulled)
    for w in range(len(state)):
        for e in range(pulled):
            end = sent_begin_s[e, w] + job.sent_s[e] + latency_s
            tail[e] = end
            ready[e] = sent_begin_s[e, w] + latency_s if job.cut_through else end
        for k in range(1, pulled):  # the order of the worker before is almost always right
            e, at = order[k], k
            while at > 0 and (
                ready[e] < ready[order[at - 1]] or (ready[e] == ready[order[at - 1]] and e < order[at - 1])
            ):
                order[at] = order[at - 1]
                at -= 1
            order[at] = e
        last, in_free, out_free = state[w, 0], state[w, 1], state[w, 2]
        op_end, launch = state[w, 3], state[w, 4]
        if pulled and ready[order[0]] <= last:
            return False
        received[:, w] = 0.0
        for k in range(pulled):
            e = order[k]
            last = ready[e]
            in_free = max(last, in_free) + job.pulled_s[e]
            end = max(in_free, tail[e]) if job.cut_through else in_free
            received[e // job.parts, w] = max(received[e // job.parts, w], end)
        for f in range(len(job.forward_s)):
            for k in range(job.first_read[f], job.first_read[f + 1]):
                op_end = max(op_end, received[job.reads[k], w])
            forward[f, w] = op_end
            op_end += job.forward_s[f]
        for f in range(len(job.backward_s)):
            backward[f, w] = op_end
            op_end += job.backward_s[f]
        for k in range(len(job.pushes)):
            f = job.after[k]
            if k == 0 and backward[f, w] + job.backward_s[f] <= launch:
                return False
            launch = max(launch, backward[f, w] + job.backward_s[f])
            launched[job.pushes[k], w] = launch
        for e in range(len(job.pushed_s)):
            begin = max(launched[job.message[e // job.parts], w], out_free)
            out_free = begin + job.pushed_s[e]
            begin_s[e, w] = begin
        state[w, 0], state[w, 1], state[w, 2], state[w, 3], state[w, 4] = last, in_free, out_free, op_end, launch
    return True


@numba.njit(cache=True)
def serve_pushes(begin_s, pushed_s, latency_s, cut_through, parts, work_s, free_s, copies, end_s):  # type: ignore[no-untyped-def]
    """Receive what all workers push to one server, in the order in which it becomes ready.

    `begin_s[part, worker]` is when they begin to push, `copies` times each, and is sorted for each of the server's
    `parts`. `end_s[part]` becomes the end of its last push. Returns when the first push becomes ready, when the last
    one does, and when the link is free.
    """
    count, workers = len(parts), begin_s.shape[1]
    taken = np.zeros(count, np.int64)
    # The next push of each part, in order, from `front` to `back`.
    capacity = 8 * count + 8
    times, which = np.empty(capacity), np.empty(capacity, np.int64)
    front, back = 0, 0
    for p in range(count):
        row = begin_s[parts[p]]
        for w in range(1, workers):
            if row[w] < row[w - 1]:
                row.sort()
                break
        time = row[0] + latency_s if cut_through else row[0] + pushed_s[parts[p]] + latency_s
        at = back
        while at > 0 and time < times[at - 1]:
            times[at], which[at] = times[at - 1], which[at - 1]
            at -= 1
        times[at], which[at] = time, p
        back += 1
    first = times[0] if count else 0.0
    last = first
    while front < back:
        p, time = which[front], times[front]
        e = parts[p]
        pushed, taking = pushed_s[e], work_s[p]
        first_of_all = True  # whether the part's next push comes before those of all other parts
        while first_of_all and taken[p] < workers:
            tail = begin_s[e, taken[p]] + pushed + latency_s
            last, end = time, 0.0
            for _ in range(copies):
                free_s = max(time, free_s) + taking
                end = max(free_s, tail) if cut_through else free_s
            end_s[p] = end
            taken[p] += 1
            if taken[p] < workers:
                begin = begin_s[e, taken[p]]
                time = begin + latency_s if cut_through else begin + pushed + latency_s
                other = front + 1
                first_of_all = other == back or time < times[other] or (time == times[other] and p < which[other])
        if first_of_all:  # the part has no more
            front += 1
            continue
        low, high = front + 2, back  # where the next push belongs; it comes after the one behind the front
        if times[back - 1] < time:  # often
            low = back
        while low < high:
            middle = (low + high) >> 1
            if times[middle] < time or (times[middle] == time and which[middle] < p):
                low = middle + 1
            else:
                high = middle
        if low - front <= back - low:
            for k in range(front, low - 1):
                times[k], which[k] = times[k + 1], which[k + 1]
            times[low - 1], which[low - 1] = time, p
            continue
        if back == capacity:
            for k in range(front, back):
                times[k - front], which[k - front] = times[k], which[k]
            front, back, low = 0, back - front, low - front
        for k in range(back, low, -1):
            times[k], which[k] = times[k - 1], which[k - 1]
        times[low], which[low] = time, p
        front += 1
        back += 1
    return first, last, free_s
