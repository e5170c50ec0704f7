"""Shuffle: everybody sends everybody its part, adds up its own, and sends the sum to all (Caramel, section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.graph import Ids
from legato.simulator.flow.parcels import Parcels
from legato.simulator.flow.wiring import Wiring

__all__ = ["Shuffle"]


@dataclass(frozen=True, kw_only=True)
class Shuffle(Collective):
    """All-to-all, local sum, all-gather: in each half a worker's link carries (n-1)/n of the bytes."""

    def reduce(self, wiring: Wiring, parcels: Parcels, ready: Ids) -> Ids:
        return _all_to_all(wiring, parcels, ready, adds=True)

    def spread(self, wiring: Wiring, parcels: Parcels, held: Ids) -> Ids:
        return _all_to_all(wiring, parcels, held, adds=False)


def _all_to_all(wiring: Wiring, parcels: Parcels, ready: Ids, *, adds: bool) -> Ids:
    """First to the neighbour on the right, then to the one after it, and so on: nobody gets two at once."""
    ranks, steps = wiring.ranks[:, None], np.arange(1, wiring.workers)
    nbytes, key = parcels.nbytes[:, None, None] / wiring.workers, parcels.order[:, None, None]
    sent = wiring.send(ranks, wiring.worker(ranks + steps), nbytes, [ready[..., None]], key=key, adds=adds)
    mine = sent[:, wiring.worker(ranks - steps), steps - 1]
    return wiring.graph.join(np.concatenate([mine, ready[..., None]], axis=-1))
