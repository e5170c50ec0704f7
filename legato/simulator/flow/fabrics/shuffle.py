"""Shuffle: every worker gets its part from all others, adds it up, and sends the sum to all (Caramel, section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.graph import Ids
from legato.simulator.flow.topology import Topology

__all__ = ["Shuffle"]


@dataclass(frozen=True, kw_only=True)
class Shuffle(Collective):
    """All-to-all, local sum, all-gather: in each half a worker's link carries (n-1)/n of the bytes."""

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        return _all_to_all(topology, fragments, ready, adds=True)

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        return _all_to_all(topology, fragments, held, adds=False)


def _all_to_all(topology: Topology, fragments: Fragments, ready: Ids, *, adds: bool) -> Ids:
    """Send to the neighbour on the right, then to the one after it, and so on: no worker receives two at once."""
    ranks, steps = topology.ranks[:, None], np.arange(1, topology.workers)
    nbytes, key = fragments.nbytes[:, None, None] / topology.workers, fragments.order[:, None, None]
    sent = topology.send(ranks, topology.worker(ranks + steps), nbytes, [ready[..., None]], key=key, adds=adds)
    mine = sent[:, topology.worker(ranks - steps), steps - 1]
    return topology.graph.join(np.concatenate([mine, ready[..., None]], axis=-1))
