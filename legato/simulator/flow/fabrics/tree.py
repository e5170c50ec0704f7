"""Binomial tree: sums grow towards worker 0 in ceil(log2 n) rounds of M bytes, and go back the same way.

MG-WFBP, Table II ("binary tree").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.graph import Ids
from legato.simulator.flow.parcels import Parcels
from legato.simulator.flow.wiring import Wiring

__all__ = ["Tree"]


@dataclass(frozen=True, kw_only=True)
class Tree(Collective):
    def simulated(self, workers: int) -> int:
        return workers

    def reduce(self, wiring: Wiring, parcels: Parcels, ready: Ids) -> Ids:
        held, nbytes, key = ready.copy(), parcels.nbytes[:, None], parcels.order[:, None]
        distance = 1
        while distance < wiring.workers:
            children = np.arange(distance, wiring.workers, 2 * distance)
            parents = children - distance
            sent = wiring.send(children, parents, nbytes, [held[:, children]], key=key, adds=True)
            held[:, parents] = wiring.graph.join(np.stack([held[:, parents], sent], axis=-1))
            distance *= 2
        return held[:, :1]

    def spread(self, wiring: Wiring, parcels: Parcels, held: Ids) -> Ids:
        nbytes, key = parcels.nbytes[:, None], parcels.order[:, None]
        received = np.broadcast_to(held[:, :1], (len(parcels), wiring.size)).copy()
        distance = 1 << (wiring.workers - 1).bit_length() >> 1
        while distance:
            children = np.arange(distance, wiring.workers, 2 * distance)
            parents = children - distance
            received[:, children] = wiring.send(parents, children, nbytes, [received[:, parents]], key=key)
            distance //= 2
        return received
