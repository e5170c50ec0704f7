"""Binomial tree: ceil(log2 n) rounds of M bytes sum up towards worker 0; the sum returns the same way.

MG-WFBP, Table II ("binary tree").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.graph import Ids
from legato.simulator.flow.topology import Topology

__all__ = ["Tree"]


@dataclass(frozen=True, kw_only=True)
class Tree(Collective):
    def simulated(self, workers: int) -> int:
        return workers

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        held, nbytes, key = ready.copy(), fragments.nbytes[:, None], fragments.order[:, None]
        distance = 1
        while distance < topology.workers:
            children = np.arange(distance, topology.workers, 2 * distance)
            parents = children - distance
            sent = topology.send(children, parents, nbytes, [held[:, children]], key=key, adds=True)
            held[:, parents] = topology.graph.join(np.stack([held[:, parents], sent], axis=-1))
            distance *= 2
        return held[:, :1]

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        nbytes, key = fragments.nbytes[:, None], fragments.order[:, None]
        received = np.broadcast_to(held[:, :1], (len(fragments), topology.size)).copy()
        distance = 1 << (topology.workers - 1).bit_length() >> 1
        while distance:
            children = np.arange(distance, topology.workers, 2 * distance)
            parents = children - distance
            received[:, children] = topology.send(parents, children, nbytes, [received[:, parents]], key=key)
            distance //= 2
        return received
