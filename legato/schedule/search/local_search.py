"""The local search of `legato`: sizes and contents of messages improved in turns.

An instance is a list of tensors, each with its release time, its tail and its bytes.
Nothing here knows about ops.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from legato.schedule.basics.jackson import jackson
from legato.schedule.basics.joined import ALIGNMENT
from legato.schedule.search.budget import Budget
from legato.schedule.search.collectives import CheapestCollective
from legato.schedule.search.fill import Filled, Piece, fill, fill_greedily
from legato.schedule.search.merge_deadlines import merge_with_deadlines

__all__ = ["Instance", "change_sizes", "local_search"]

#: About how many pieces the tensors are partitioned into before these are merged.
_PIECES = 256
#: What it costs to fill messages: for each tensor and each message.
_FILL_S = 1.5e-6


class Instance(NamedTuple):
    """What has to be sent, by tensor (or block of tensors); `whole_below` is as in `fill`."""

    release_s: list[float]
    tail_s: list[float]
    nbytes: list[int]
    collectives: CheapestCollective
    bound_s: float
    budget: Budget
    whole_below: int | None = None

    def cost(self, nbytes: int) -> float:
        return self.collectives.seconds(nbytes)

    def arrival_s(self, filled: Filled) -> list[float]:
        """When each tensor has arrived."""
        arrival_s = [0.0] * len(self.nbytes)
        now = 0.0
        for pieces in filled.messages:
            now = max(now, *[self.release_s[t] for t, _, _ in pieces]) + self.cost(sum([n for _, _, n in pieces]))
            for t, _, _ in pieces:
                arrival_s[t] = now
        return arrival_s

    def fill_greedily(self, quantum: int, merge: bool) -> Filled:
        fixed = self.release_s, self.tail_s, self.nbytes, self.cost
        filled = fill_greedily(quantum, *fixed, merge=merge, whole_below=self.whole_below)
        self.budget.spend(_FILL_S * (len(self.nbytes) + len(filled.messages)))
        return filled

    def fill(self, sizes: Sequence[int], first_come: int = 0, not_before_s: Sequence[float] = ()) -> Filled:
        self.budget.spend(_FILL_S * (len(self.nbytes) + len(sizes)))
        return fill(
            sizes,
            self.release_s,
            self.tail_s,
            self.nbytes,
            self.cost,
            first_come=first_come,
            not_before_s=not_before_s,
            whole_below=self.whole_below,
        )


def local_search(instance: Instance, *, gap: float, rounds: int, seed: int) -> Filled:
    """The best messages found until they are within `gap` of the bound, or rounds or budget are spent."""
    enough_s = instance.bound_s * (1 + gap)
    return _improve(_best_start(instance, enough_s), instance, enough_s, rounds, random.Random(seed))


def _best_start(instance: Instance, enough_s: float) -> Filled:
    """The best of several starts, improved in turns; stops at the first one that is good enough."""
    total = sum(instance.nbytes)
    starts = []
    for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256):
        sizes = [total * (k + 1) // count - total * k // count for k in range(count)]
        starts.append(instance.fill([size for size in sizes if size]))
        starts += [instance.fill_greedily(total // count, merge) for merge in (True, False)]
        if instance.budget.spent:
            break
    in_ready_order = [
        Piece(t, 0, instance.nbytes[t]) for t in sorted(range(len(instance.nbytes)), key=instance.release_s.__getitem__)
    ]
    for pieces in (_jackson_pieces(instance), in_ready_order):
        if not instance.budget.spent and min(starts, key=_rank).seconds > enough_s:
            starts.append(_in_turns(_partition(pieces, instance), instance))
    best = min(starts, key=_rank)
    if best.seconds <= enough_s:
        return best
    return _in_turns([piece for message in best.messages for piece in message], instance, best)


def _rank(plan: Filled) -> tuple[float, int]:
    return plan.seconds, len(plan.messages)


def _in_turns(pieces: Sequence[Piece], instance: Instance, best: Filled | None = None) -> Filled:
    """Merge, fill, merge again, until nothing improves or the budget is spent."""
    while best is None or not instance.budget.spent:
        found = merge_with_deadlines(
            [instance.release_s[p.tensor] for p in pieces],
            [instance.tail_s[p.tensor] for p in pieces],
            [p.nbytes for p in pieces],
            instance.collectives.cost,
            at_least_s=instance.bound_s,
            at_most_s=np.inf if best is None else best.seconds,
            budget=instance.budget,
        )
        if found is None:
            assert best is not None
            return best
        filled = instance.fill([sum(p.nbytes for p in pieces[start:stop]) for start, stop in found.messages])
        if best is not None and _rank(filled) >= _rank(best):
            return best
        best = filled
        pieces = _partition([piece for message in filled.messages for piece in message], instance)
    return best


def _partition(pieces: Sequence[Piece], instance: Instance) -> list[Piece]:
    """Partition pieces: short enough to leave a choice of borders, and not so short that alpha outweighs them."""
    alpha = min(cost.startup_s for cost in instance.collectives.costs)
    beta = max(cost.beta_s_per_byte for cost in instance.collectives.costs)
    least = alpha / beta / 2 if beta > 0 else np.inf
    longest = (
        int(max(sum(instance.nbytes) / _PIECES, min(least, sum(instance.nbytes)), ALIGNMENT)) // ALIGNMENT * ALIGNMENT
    )
    return [
        Piece(t, at, min(longest, start + nbytes - at))
        for t, start, nbytes in pieces
        for at in range(start, start + nbytes, longest)
    ]


def _jackson_pieces(instance: Instance) -> list[Piece]:
    """The pieces in the order of Jackson's schedule, which is optimal if messages cost no alpha."""
    slope = instance.cost(sum(instance.nbytes)) / sum(instance.nbytes)
    if slope == 0:
        return [Piece(t, 0, n) for t, n in enumerate(instance.nbytes)]
    sent = [0] * len(instance.nbytes)
    pieces = []
    scheduled = jackson(instance.release_s, [slope * n for n in instance.nbytes], instance.tail_s)
    last = {t: k for k, (t, _, _) in enumerate(scheduled)}
    for k, (t, start, stop) in enumerate(scheduled):
        left = instance.nbytes[t] - sent[t]
        take = left if last[t] == k else min(left, int((stop - start) / slope) // ALIGNMENT * ALIGNMENT)
        if take:
            pieces.append(Piece(t, sent[t], take))
            sent[t] += take
    return pieces


def _improve(best: Filled, instance: Instance, enough_s: float, rounds: int, rng: random.Random) -> Filled:
    """Change one or two sizes at random and fill again, until the result is good enough."""
    for _ in range(rounds):
        if best.seconds <= enough_s or instance.budget.spent:
            break
        sizes = change_sizes([sum(piece.nbytes for piece in message) for message in best.messages], rng)
        filled = instance.fill(sizes)
        if _rank(filled) < _rank(best):
            best = filled
    return best


def change_sizes(sizes: list[int], rng: random.Random) -> list[int]:
    """Merge two neighbours, divide a message, or move some bytes across a border."""
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
