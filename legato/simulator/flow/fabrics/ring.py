"""Ring all-reduce: every worker sends to its right-hand neighbour only.

With messaging (Network Operator Edition, 8.2.1; Horovod), a fragment is split into
one chunk per worker, and all chunks go around at once: n-1 steps that add up
sums, then n-1 steps that pass them on, each of M/n bytes. Without messaging, the
whole fragment goes around, starting at a worker that differs from fragment to
fragment: 2(n-1) hops of M bytes, one after another. With multicast, each worker
multicasts the sum it holds instead of the second round (8.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legato.simulator.flow.engine.services import Ids
from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.topology import Topology

__all__ = ["Ring"]


@dataclass(frozen=True, kw_only=True)
class Ring(Collective):
    messaging: bool = True
    multicast: bool = False

    def simulated(self, network: Network) -> int:
        return 1 if self.messaging else network.workers

    def services(self, network: Network) -> tuple[int, int]:
        workers = network.workers
        around = 2 * (workers - 1) * (workers if self.messaging else 1)
        cards = workers // network.gpus_per_card
        multicast = workers * cards if self.messaging else cards
        return around, multicast if self.multicast and workers > 1 else around

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        if not self.messaging:
            return _reduce_whole(topology, fragments, ready)
        arrived = _around(topology, fragments, ready, adds=True)
        return topology.graph.join(np.concatenate([arrived[:, -1:], ready[:, None]], axis=1), axis=1)

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        if not self.messaging:
            return _distribute_whole(topology, fragments, held, self.multicast)
        if self.multicast:
            chunks = fragments.nbytes / topology.workers
            return topology.all_to_all(chunks, held, key=fragments.order, multicast=True)
        arrived = _around(topology, fragments, held, adds=False)
        return topology.graph.join(np.concatenate([arrived, held[:, None]], axis=1), axis=1)


def _around(topology: Topology, fragments: Fragments, held: Ids, *, adds: bool) -> Ids:
    """Send every chunk to all workers, from each to its right-hand neighbour; the ids are those of `pass_around`."""
    n, right, left = topology.workers, topology.worker(topology.ranks + 1), topology.worker(topology.ranks - 1)
    return topology.pass_around(right, left, fragments.nbytes / n, held, n - 1, key=fragments.order, adds=adds)


def _first(topology: Topology, fragments: Fragments) -> NDArray[np.int64]:
    return fragments.order % topology.workers


def _reduce_whole(topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
    first, rows = _first(topology, fragments), fragments.order
    held = ready[rows, first]
    for step in range(topology.workers - 1):
        here, there = topology.worker(first + step), topology.worker(first + step + 1)
        sent = topology.send(here, there, fragments.nbytes, [held], key=rows, adds=True)
        held = topology.graph.join(np.stack([sent, ready[rows, there]], axis=-1))
    return held[:, None]


def _distribute_whole(topology: Topology, fragments: Fragments, held: Ids, multicast: bool) -> Ids:
    """Send the sum from the last worker of the first round: around the ring again, or to all at once."""
    n, rows = topology.workers, fragments.order
    last = topology.worker(_first(topology, fragments) - 1)
    held = np.broadcast_to(held, (len(fragments), n))
    received = held.copy()
    at = held[rows, last]
    received[:] = at[:, None]
    if multicast and n > 1:
        targets = topology.worker(last[:, None] + np.arange(1, n))
        received[rows[:, None], targets] = topology.multicast(last, targets, fragments.nbytes, [at], key=rows)
        return received
    for step in range(n - 1):
        there = topology.worker(last + step + 1)
        at = topology.send(topology.worker(last + step), there, fragments.nbytes, [at], key=rows)
        received[rows, there] = at
    return received
