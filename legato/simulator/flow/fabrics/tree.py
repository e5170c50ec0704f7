"""Binomial tree: ceil(log2 n) rounds of M bytes sum up towards worker 0; the sum returns the same way.

MG-WFBP, Table II ("binary tree").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.graph import Ids
from legato.simulator.flow.network import Network
from legato.simulator.flow.topology import Topology

__all__ = ["Tree"]


@dataclass(frozen=True, kw_only=True)
class Tree(Collective):
    def simulated(self, network: Network) -> int:
        return network.workers

    def services(self, network: Network) -> tuple[int, int]:
        workers = network.workers
        return 2 * (workers - 1), 2 * (workers - 1)

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        held = ready.copy()
        for level in range(_height(topology)):
            branches = topology.branches(level, up=True)
            here, there = branches.senders, branches.receivers
            sent = topology.relay(branches, fragments.nbytes, held[:, here], key=fragments.order, adds=True)
            held[:, there] = topology.graph.join(np.stack([held[:, there], sent], axis=-1))
        return held[:, :1]

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        received = np.broadcast_to(held[:, :1], (len(fragments), topology.size)).copy()
        for level in reversed(range(_height(topology))):
            branches = topology.branches(level, up=False)
            after = received[:, branches.senders]
            received[:, branches.receivers] = topology.relay(branches, fragments.nbytes, after, key=fragments.order)
        return received


def _height(topology: Topology) -> int:
    return (topology.workers - 1).bit_length()
