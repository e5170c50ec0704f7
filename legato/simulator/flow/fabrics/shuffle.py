"""Shuffle: every worker gets its part from all others, adds it up, and sends the sum to all (Caramel, section 2)."""

from __future__ import annotations

from dataclasses import dataclass

from legato.simulator.flow.engine.services import Ids
from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.topology import Topology

__all__ = ["Shuffle"]


@dataclass(frozen=True, kw_only=True)
class Shuffle(Collective):
    """All-to-all, local sum, all-gather: in each half a worker's link carries (n-1)/n of the bytes."""

    def services(self, network: Network) -> tuple[int, int]:
        workers = network.workers
        return 2 * workers * (workers - 1), 2 * workers * (workers - 1)

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        return _all_to_all(topology, fragments, ready, adds=True)

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        return _all_to_all(topology, fragments, held, adds=False)


def _all_to_all(topology: Topology, fragments: Fragments, ready: Ids, *, adds: bool) -> Ids:
    return topology.all_to_all(fragments.nbytes / topology.workers, ready, key=fragments.order, adds=adds)
