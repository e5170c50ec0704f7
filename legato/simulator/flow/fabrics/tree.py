"""Binomial tree: ceil(log2 n) rounds of M bytes sum up towards worker 0; the sum returns the same way.

MG-WFBP, Table II ("binary tree").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from legato.simulator.flow.engine.services import Ids
from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.topology import Hosts, Topology

__all__ = ["Tree"]


@dataclass(frozen=True, kw_only=True)
class Tree(Collective):
    def simulated(self, network: Network) -> int:
        return network.workers

    def services(self, network: Network) -> tuple[int, int]:
        workers = network.workers
        return 2 * (workers - 1), 2 * (workers - 1)

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        held, nbytes, key = ready.copy(), fragments.nbytes[:, None], fragments.order[:, None]
        for level in range(_height(topology)):
            children, parents = _branches(topology, level)
            sent = topology.send(children, parents, nbytes, [held[:, children]], key=key, adds=True)
            held[:, parents] = topology.graph.join(np.stack([held[:, parents], sent], axis=-1))
        return held[:, :1]

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        received = np.broadcast_to(held[:, :1], (len(fragments), topology.size)).copy()
        nbytes, key = fragments.nbytes[:, None], fragments.order[:, None]
        for level in reversed(range(_height(topology))):
            children, parents = _branches(topology, level)
            received[:, children] = topology.send(parents, children, nbytes, [received[:, parents]], key=key)
        return received


def _height(topology: Topology) -> int:
    return (topology.workers - 1).bit_length()


def _branches(topology: Topology, level: int) -> tuple[Hosts, Hosts]:
    """(children, parents) of a round. A worker's level is the lowest bit of its number; its parent lacks that bit."""
    children = np.arange(1 << level, topology.workers, 2 << level)
    return children, children - (1 << level)
