"""The messages of `legato`: sizes and contents improved in turn, for given moments and deadlines.

What is to be sent is a list of tensors, each with the moment its gradient is
ready, the computation that follows its arrival (tail), and its bytes. Nothing
here knows about ops.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from legato.core.cluster import LinearCost
from legato.schedule.basics.jackson import jackson
from legato.schedule.search.fill import ALIGNMENT, Piece, Refilled, refill
from legato.schedule.search.merge_deadlines import group

__all__ = ["Job", "Network", "search"]

#: Pieces that tensors are cut into before they are merged, about so many in all.
_PIECES = 256


class Network(NamedTuple):
    """The ways a message can take, each a collective and a depth, and what it costs there."""

    ways: tuple[tuple[str, int], ...]
    costs: tuple[LinearCost, ...]

    def cost(self, nbytes: Any) -> Any:
        """Seconds of messages by their bytes, whatever the shape: the cheapest way for each."""
        best: Any = np.inf
        for cost in self.costs:
            seconds = cost.alpha_s + cost.beta_s_per_byte * nbytes
            best = np.minimum(best, np.maximum(cost.floor_s, seconds) if cost.floor_s else seconds)
        return best

    def way(self, nbytes: int) -> tuple[str, int]:
        """The cheapest collective and depth for a message."""
        seconds = [cost.cost(nbytes) for cost in self.costs]
        return self.ways[seconds.index(min(seconds))]


class Job(NamedTuple):
    """What is to be sent, by tensor; `whole_below` as in `refill`."""

    ready_s: list[float]
    tail_s: list[float]
    nbytes: list[int]
    network: Network
    bound_s: float
    whole_below: int | None = None

    def cost(self, nbytes: int) -> float:
        return float(self.network.cost(nbytes))

    def deal(self, sizes: Sequence[int], first_come: int = 0) -> Refilled:
        return refill(
            sizes,
            self.ready_s,
            self.tail_s,
            self.nbytes,
            self.cost,
            first_come=first_come,
            whole_below=self.whole_below,
        )


def search(job: Job, *, gap: float, rounds: int, stop_at: float, seed: int) -> Refilled:
    """The best messages found until they are within `gap` of the bound, or rounds or time (`perf_counter`) are up."""
    enough_s = job.bound_s * (1 + gap)
    return _improve(_best_start(job, enough_s, stop_at), job, enough_s, rounds, stop_at, random.Random(seed))


def _best_start(job: Job, enough_s: float, stop_at: float) -> Refilled:
    """The best of several starts, each brought to where the two steps change nothing any more, or the first enough."""
    total = sum(job.nbytes)
    starts = []
    for count in (1, 2, 4, 8, 16, 32, 64, 128):
        sizes = [total * (k + 1) // count - total * k // count for k in range(count)]
        starts.append(job.deal([size for size in sizes if size]))
        if time.perf_counter() > stop_at:
            break
    in_ready_order = [Piece(t, 0, job.nbytes[t]) for t in sorted(range(len(job.nbytes)), key=job.ready_s.__getitem__)]
    for pieces in (_jackson_pieces(job), in_ready_order):
        if time.perf_counter() < stop_at and min(starts, key=_rank).seconds > enough_s:
            starts.append(_in_turns(_cut(pieces, job), job, stop_at))
    best = min(starts, key=_rank)
    if best.seconds <= enough_s:
        return best
    return _in_turns([piece for message in best.messages for piece in message], job, stop_at, best)


def _rank(plan: Refilled) -> tuple[float, int]:
    return plan.seconds, len(plan.messages)


def _in_turns(pieces: Sequence[Piece], job: Job, stop_at: float, best: Refilled | None = None) -> Refilled:
    """Merge, deal, merge, ... until it does not get better, or time is up."""
    while best is None or time.perf_counter() < stop_at:
        found = group(
            [job.ready_s[p.tensor] for p in pieces],
            [job.tail_s[p.tensor] for p in pieces],
            [p.nbytes for p in pieces],
            job.network.cost,
            at_least_s=job.bound_s,
            at_most_s=np.inf if best is None else best.seconds,
            stop_at=stop_at,
        )
        if found is None:
            assert best is not None
            return best
        dealt = job.deal([sum(p.nbytes for p in pieces[start:stop]) for start, stop in found.messages])
        if best is not None and _rank(dealt) >= _rank(best):
            return best
        best = dealt
        pieces = _cut([piece for message in dealt.messages for piece in message], job)
    return best


def _cut(pieces: Sequence[Piece], job: Job) -> list[Piece]:
    """Pieces of a length that leaves a choice where to divide, and none that an alpha makes pointless."""
    alpha = min(cost.startup_s for cost in job.network.costs)
    beta = max(cost.beta_s_per_byte for cost in job.network.costs)
    least = alpha / beta / 2 if beta > 0 else np.inf
    longest = int(max(sum(job.nbytes) / _PIECES, min(least, sum(job.nbytes)), ALIGNMENT)) // ALIGNMENT * ALIGNMENT
    return [
        Piece(t, at, min(longest, start + nbytes - at))
        for t, start, nbytes in pieces
        for at in range(start, start + nbytes, longest)
    ]


def _jackson_pieces(job: Job) -> list[Piece]:
    """What goes out when, were messages free: at every moment what is needed first."""
    slope = job.cost(sum(job.nbytes)) / sum(job.nbytes)
    if slope == 0:
        return [Piece(t, 0, n) for t, n in enumerate(job.nbytes)]
    sent = [0] * len(job.nbytes)
    pieces = []
    scheduled = jackson(job.ready_s, [slope * n for n in job.nbytes], job.tail_s)
    last = {t: k for k, (t, _, _) in enumerate(scheduled)}
    for k, (t, start, stop) in enumerate(scheduled):
        left = job.nbytes[t] - sent[t]
        take = left if last[t] == k else min(left, int((stop - start) / slope) // ALIGNMENT * ALIGNMENT)
        if take:
            pieces.append(Piece(t, sent[t], take))
            sent[t] += take
    return pieces


def _improve(best: Refilled, job: Job, enough_s: float, rounds: int, stop_at: float, rng: random.Random) -> Refilled:
    """Change one or two sizes at random and deal anew, as long as there is something to win."""
    for _ in range(rounds):
        if best.seconds <= enough_s or time.perf_counter() > stop_at:
            break
        sizes = _changed([sum(piece.nbytes for piece in message) for message in best.messages], rng)
        dealt = job.deal(sizes)
        if _rank(dealt) < _rank(best):
            best = dealt
    return best


def _changed(sizes: list[int], rng: random.Random) -> list[int]:
    """Merge two neighbours, halve one, or move some bytes across a border."""
    k = rng.randrange(len(sizes))
    choice = rng.random()
    if choice < 0.35 and k + 1 < len(sizes):
        return [*sizes[:k], sizes[k] + sizes[k + 1], *sizes[k + 2 :]]
    if choice < 0.6 and sizes[k] > 2 * ALIGNMENT:
        part = int(sizes[k] * rng.uniform(0.2, 0.8)) // ALIGNMENT * ALIGNMENT
        return [*sizes[:k], part, sizes[k] - part, *sizes[k + 1 :]] if part else sizes
    if k + 1 < len(sizes):
        moved = int(rng.uniform(-sizes[k], sizes[k + 1]) * rng.random()) // ALIGNMENT * ALIGNMENT
        both = (sizes[k] + moved, sizes[k + 1] - moved)
        return [*sizes[:k], *(size for size in both if size > 0), *sizes[k + 2 :]]
    return sizes
