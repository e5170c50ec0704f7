"""legato: merging, cutting, order and collective planned together, for the real cost of messages.

Idea: the published schedulers each decide one thing. MG-WFBP merges and ignores
the forward pass; PACE and P3 order and cut, and pay nothing for a message that
in fact costs an alpha. Here the sizes of the messages and what goes into them
are improved in turn, each step exact for what the other one fixed:

- for an order of pieces, the best way to merge neighbours into messages
  (`grouping.py`: a dynamic program with deadlines, and bisection over the
  iteration time);
- for sizes of messages, the best contents (`refill.py`: of what is ready, what
  is needed first).

The turns start from several orders: ready order, Jackson's preemptive order
(PACE's), and messages of equal sizes (P3's). Then single messages are merged,
halved and shifted at random, and contents dealt anew, until the iteration is
within `gap` of the proven lower bound or the budget is spent. Every message
takes the collective that is cheapest for its size.

Deviation from nobody: this one is ours. Units: seconds and bytes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from legato.core.cluster import Cluster
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Workload
from legato.schedule.bound import lower_bound
from legato.schedule.compose import compose, known_collective, ready_order, ready_times
from legato.schedule.grouping import group
from legato.schedule.jackson import jackson
from legato.schedule.refill import Piece, Refilled, refill

__all__ = ["legato"]

#: Pieces that tensors are cut into before they are merged, about so many in all.
_PIECES = 256


class Network(NamedTuple):
    """The collectives a message can take, cheapest first for its size."""

    names: tuple[str, ...]
    alpha_s: np.ndarray[Any, np.dtype[np.float64]]
    beta_s: np.ndarray[Any, np.dtype[np.float64]]

    def cost(self, nbytes: Any) -> Any:
        """Seconds of messages by their bytes, whatever the shape."""
        best = self.alpha_s[0] + self.beta_s[0] * nbytes
        for alpha, beta in zip(self.alpha_s[1:], self.beta_s[1:], strict=True):
            best = np.minimum(best, alpha + beta * nbytes)
        return best

    def name(self, nbytes: int) -> str:
        """The cheapest collective for a message."""
        return self.names[int(np.argmin(self.alpha_s + self.beta_s * nbytes))]


class _Job(NamedTuple):
    """What is to be sent, by tensor."""

    ready_s: list[float]
    tail_s: list[float]
    nbytes: list[int]
    network: Network
    bound_s: float

    def cost(self, nbytes: int) -> float:
        return float(self.network.cost(nbytes))

    def deal(self, sizes: Sequence[int]) -> Refilled:
        return refill(sizes, self.ready_s, self.tail_s, self.nbytes, self.cost)


def legato(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    gap: float = 0.005,
    budget_s: float = 1.0,
    rounds: int = 400,
    seed: int = 0,
) -> Plan:
    """The best plan found within `rounds` changes or `budget_s` seconds, or when within `gap` of the bound.

    `collective` restricts it to one; by default every message takes the
    cheapest. The same seed gives the same plan unless the budget runs out.
    Raises `InputError` on a collective the cluster lacks.
    """
    stop_at = time.perf_counter() + budget_s
    names = tuple(cluster.collectives) if collective is None else (known_collective(cluster, collective),)
    costs = [cluster.collectives[name] for name in names]
    network = Network(names, np.array([c.alpha_s for c in costs]), np.array([c.beta_s_per_byte for c in costs]))
    job = _Job(
        ready_times(workload),
        stream_tails(workload),
        [tensor.nbytes for tensor in workload.tensors],
        network,
        lower_bound(workload, cluster).seconds,
    )
    best = _best_start(workload, job)
    best = _improve(best, job, gap, rounds, stop_at, random.Random(seed))
    messages = []
    for pieces in best.messages:
        slices = tuple(Slice(workload.tensors[p.tensor].name, p.start, p.start + p.nbytes) for p in pieces)
        messages.append(Message(slices, collective=network.name(sum(p.nbytes for p in pieces))))
    return compose("legato", messages, workload, cluster, forward_overlap=True)


def stream_tails(workload: Workload) -> list[float]:
    """For each tensor, the seconds of computation from its first reader on, in `Workload.iteration_order()`."""
    order = workload.iteration_order()
    rest = list(accumulate((workload.ops[i].duration_s for i in reversed(order)), initial=0.0))[::-1]
    place = {op: k for k, op in enumerate(order)}
    return [rest[min((place[r] for r in tensor.readers), default=len(order))] for tensor in workload.tensors]


def _best_start(workload: Workload, job: _Job) -> Refilled:
    """The best of several starts, each brought to where the two steps change nothing any more."""
    total = sum(job.nbytes)
    starts = [_in_turns(_cut([Piece(t, 0, job.nbytes[t]) for t in ready_order(workload)], job), job)]
    starts.append(_in_turns(_cut(_jackson_pieces(job), job), job))
    for count in (1, 2, 4, 8, 16, 32, 64, 128):
        sizes = [total * (k + 1) // count - total * k // count for k in range(count)]
        starts.append(job.deal([size for size in sizes if size]))
    best = min(starts, key=_rank)
    return _in_turns([piece for message in best.messages for piece in message], job, best)


def _rank(plan: Refilled) -> tuple[float, int]:
    return plan.seconds, len(plan.messages)


def _in_turns(pieces: Sequence[Piece], job: _Job, best: Refilled | None = None) -> Refilled:
    """Merge, deal, merge, ... until it does not get better."""
    while True:
        found = group(
            [job.ready_s[p.tensor] for p in pieces],
            [job.tail_s[p.tensor] for p in pieces],
            [p.nbytes for p in pieces],
            job.network.cost,
            at_least_s=job.bound_s,
            at_most_s=np.inf if best is None else best.seconds,
        )
        if found is None:
            assert best is not None
            return best
        dealt = job.deal([sum(p.nbytes for p in pieces[start:stop]) for start, stop in found.messages])
        if best is not None and _rank(dealt) >= _rank(best):
            return best
        best = dealt
        pieces = _cut([piece for message in dealt.messages for piece in message], job)


def _cut(pieces: Sequence[Piece], job: _Job) -> list[Piece]:
    """Pieces of a length that leaves a choice where to divide, and none that an alpha makes pointless."""
    alpha, beta = float(job.network.alpha_s.min()), float(job.network.beta_s.max())
    least = alpha / beta / 2 if beta > 0 else np.inf
    longest = int(max(sum(job.nbytes) / _PIECES, min(least, sum(job.nbytes)), 16)) // 16 * 16
    return [
        Piece(t, at, min(longest, start + nbytes - at))
        for t, start, nbytes in pieces
        for at in range(start, start + nbytes, longest)
    ]


def _jackson_pieces(job: _Job) -> list[Piece]:
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
        take = left if last[t] == k else min(left, int((stop - start) / slope) // 16 * 16)
        if take:
            pieces.append(Piece(t, sent[t], take))
            sent[t] += take
    return pieces


def _improve(best: Refilled, job: _Job, gap: float, rounds: int, stop_at: float, rng: random.Random) -> Refilled:
    """Change one or two sizes at random and deal anew, as long as there is something to win."""
    for _ in range(rounds):
        if best.seconds <= job.bound_s * (1 + gap) or time.perf_counter() > stop_at:
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
    if choice < 0.6 and sizes[k] > 32:
        part = int(sizes[k] * rng.uniform(0.2, 0.8)) // 16 * 16
        return [*sizes[:k], part, sizes[k] - part, *sizes[k + 1 :]] if part else sizes
    if k + 1 < len(sizes):
        moved = int(rng.uniform(-sizes[k], sizes[k + 1]) * rng.random()) // 16 * 16
        both = (sizes[k] + moved, sizes[k + 1] - moved)
        return [*sizes[:k], *(size for size in both if size > 0), *sizes[k + 2 :]]
    return sizes
