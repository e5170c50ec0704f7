"""Exchanges with partners at doubling distance: butterfly mixing, recursive doubling, halving-doubling.

Workers that are no power of two: those above the largest one first give their
gradients to a partner below it, and get the sum from it at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from legato.simulator.flow.fabrics.protocol import Collective, is_power_of_two
from legato.simulator.flow.graph import Ids
from legato.simulator.flow.parcels import Parcels
from legato.simulator.flow.wiring import Wiring

__all__ = ["Butterfly", "HalvingDoubling"]


@dataclass(frozen=True, kw_only=True)
class Butterfly(Collective):
    """Partners exchange all they have, at distance 1, 2, 4, ...: log2(n) rounds of M bytes.

    Butterfly mixing (Network Operator Edition, 3.3.2) and recursive doubling
    (MG-WFBP, Table II) are the same exchange under two names.
    """

    def simulated(self, workers: int) -> int:
        return 1 if is_power_of_two(workers) else workers

    def reduce(self, wiring: Wiring, parcels: Parcels, ready: Ids) -> Ids:
        held, rounds = _fold(wiring, parcels, ready)
        for k in range(rounds):
            held = _exchange(wiring, parcels, held, 1 << k, 1.0, adds=True)
        return _unfold(wiring, parcels, held)

    def spread(self, wiring: Wiring, parcels: Parcels, held: Ids) -> Ids:
        return held


@dataclass(frozen=True, kw_only=True)
class HalvingDoubling(Collective):
    """Partners exchange halves of what they still sum: M/2, M/4, ... M/n bytes, and back (Rabenseifner)."""

    def simulated(self, workers: int) -> int:
        return 1 if is_power_of_two(workers) else workers

    def reduce(self, wiring: Wiring, parcels: Parcels, ready: Ids) -> Ids:
        held, rounds = _fold(wiring, parcels, ready)
        for k in range(rounds):
            held = _exchange(wiring, parcels, held, 1 << (rounds - 1 - k), 0.5 ** (k + 1), adds=True)
        extra = wiring.size - held.shape[1]
        return np.concatenate([held, held[:, :extra]], axis=1)

    def spread(self, wiring: Wiring, parcels: Parcels, held: Ids) -> Ids:
        inner = _inner(wiring)
        held = held[:, : min(inner, wiring.size)]
        rounds = inner.bit_length() - 1
        for k in reversed(range(rounds)):
            held = _exchange(wiring, parcels, held, 1 << (rounds - 1 - k), 0.5 ** (k + 1), adds=False)
        return _unfold(wiring, parcels, held)


def _inner(wiring: Wiring) -> int:
    """The largest power of two among the numbers of workers up to ours."""
    return 1 << (wiring.workers.bit_length() - 1)


def _exchange(wiring: Wiring, parcels: Parcels, held: Ids, distance: int, share: float, *, adds: bool) -> Ids:
    """Each sends that share of a parcel to its partner, and goes on when it has sent for and got its part."""
    ranks = wiring.ranks[: held.shape[1]]
    partner = wiring.worker(ranks ^ distance)
    nbytes = parcels.nbytes[:, None] * share
    sent = wiring.send(ranks, partner, nbytes, [held], key=parcels.order[:, None], adds=adds)
    return wiring.graph.join(np.stack([held, sent[:, partner]], axis=-1))


def _fold(wiring: Wiring, parcels: Parcels, ready: Ids) -> tuple[Ids, int]:
    """What the inner workers hold to begin with, and the rounds among them."""
    inner = _inner(wiring)
    held = ready[:, : min(inner, wiring.size)]
    if inner < wiring.workers:
        outer = np.arange(inner, wiring.workers)
        nbytes, key = parcels.nbytes[:, None], parcels.order[:, None]
        sent = wiring.send(outer, outer - inner, nbytes, [ready[:, outer]], key=key, adds=True)
        held = held.copy()
        held[:, outer - inner] = wiring.graph.join(np.stack([held[:, outer - inner], sent], axis=-1))
    return held, inner.bit_length() - 1


def _unfold(wiring: Wiring, parcels: Parcels, held: Ids) -> Ids:
    """What all workers have at the end."""
    inner = _inner(wiring)
    if inner == wiring.workers:
        return held
    outer = np.arange(inner, wiring.workers)
    sent = wiring.send(
        outer - inner, outer, parcels.nbytes[:, None], [held[:, outer - inner]], key=parcels.order[:, None]
    )
    return np.concatenate([held, sent], axis=1)
