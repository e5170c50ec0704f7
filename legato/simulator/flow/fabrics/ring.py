"""Two variants of the ring from the Network Operator Edition (8.2.1 and 8.4).

In the ring without messaging, a whole fragment of M bytes goes around the ring of n workers in 2 (n-1) hops, one after
another; each fragment starts at a different worker. In the ring with multicast, the first half is the usual ring
(`legato.collectives.ring`), and then each worker multicasts the sum that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legato.simulator.flow.engine.services import Ids
from legato.simulator.flow.fabrics.all_reduce import AllReduce
from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.topology import Topology

__all__ = ["MulticastRing", "WholeRing"]


@dataclass(frozen=True, kw_only=True)
class MulticastRing(AllReduce):
    algorithm: str = "ring"

    def services(self, network: Network) -> tuple[int, int]:
        around, _ = super().services(network)
        workers = network.workers
        return around, workers * (workers // network.gpus_per_card) if workers > 1 else 0

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        n = topology.workers
        return topology.all_to_all(fragments.nbytes / n, held, range(1, n), key=fragments.order, multicast=True)


@dataclass(frozen=True, kw_only=True)
class WholeRing(Collective):
    def simulated(self, network: Network) -> int:
        return network.workers

    def services(self, network: Network) -> tuple[int, int]:
        around = 2 * (network.workers - 1)
        return around, around

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        first, rows = _first(topology, fragments), fragments.order
        held = ready[rows, first]
        for step in range(topology.workers - 1):
            here, there = topology.worker(first + step), topology.worker(first + step + 1)
            sent = topology.send(here, there, fragments.nbytes, [held], key=rows, adds=True)
            held = topology.graph.join(np.stack([sent, ready[rows, there]], axis=-1))
        return held[:, None]

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        """Send the sum around the ring again, starting at the last worker of the first half."""
        n, rows = topology.workers, fragments.order
        last = topology.worker(_first(topology, fragments) - 1)
        at = np.broadcast_to(held, (len(fragments), n))[rows, last]
        received = np.broadcast_to(at[:, None], (len(fragments), n)).copy()
        for step in range(n - 1):
            there = topology.worker(last + step + 1)
            at = topology.send(topology.worker(last + step), there, fragments.nbytes, [at], key=rows)
            received[rows, there] = at
        return received


def _first(topology: Topology, fragments: Fragments) -> NDArray[np.int64]:
    return fragments.order % topology.workers
