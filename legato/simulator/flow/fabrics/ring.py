"""Ring all-reduce: everybody sends to the right-hand neighbour only.

With messaging (Network Operator Edition, 8.2.1; Horovod), a parcel is cut into
one chunk a worker, and all chunks go round at once: n-1 steps in which sums
grow, n-1 in which they are passed on, each of M/n bytes. Without, a parcel goes
round whole, from a first worker that parcels take in turn: 2(n-1) hops of M
bytes, one after another. With multicast, the second round is one multicast by
each worker of what it holds (8.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.graph import Ids
from legato.simulator.flow.parcels import Parcels
from legato.simulator.flow.wiring import Wiring

__all__ = ["Ring"]


@dataclass(frozen=True, kw_only=True)
class Ring(Collective):
    messaging: bool = True
    multicast: bool = False

    def simulated(self, workers: int) -> int:
        return 1 if self.messaging else workers

    def reduce(self, wiring: Wiring, parcels: Parcels, ready: Ids) -> Ids:
        if not self.messaging:
            return _reduce_whole(wiring, parcels, ready)
        steps, n = wiring.workers - 1, wiring.workers
        right, left = wiring.worker(wiring.ranks + 1), wiring.worker(wiring.ranks - 1)
        arrived = wiring.pass_around(right, left, parcels.nbytes / n, ready, steps, key=parcels.order, adds=True)
        return wiring.graph.join(np.concatenate([arrived[:, -1:], ready[:, None]], axis=1), axis=1)

    def spread(self, wiring: Wiring, parcels: Parcels, held: Ids) -> Ids:
        if not self.messaging:
            return _spread_whole(wiring, parcels, held, self.multicast)
        ranks, key, n = wiring.ranks, parcels.order[:, None], wiring.workers
        chunk = parcels.nbytes[:, None] / n
        if self.multicast and n > 1:
            steps = np.arange(1, n)
            targets = wiring.worker(ranks[:, None] + steps)
            sent = wiring.multicast(ranks, targets, chunk, [held], key=key)
            mine = sent[:, wiring.worker(ranks[:, None] - steps), steps - 1]
            return wiring.graph.join(np.concatenate([mine, held[..., None]], axis=-1))
        right, left = wiring.worker(ranks + 1), wiring.worker(ranks - 1)
        arrived = wiring.pass_around(right, left, parcels.nbytes / n, held, n - 1, key=parcels.order)
        return wiring.graph.join(np.concatenate([arrived, held[:, None]], axis=1), axis=1)


def _first(wiring: Wiring, parcels: Parcels) -> NDArray[np.int64]:
    return parcels.order % wiring.workers


def _reduce_whole(wiring: Wiring, parcels: Parcels, ready: Ids) -> Ids:
    first, rows = _first(wiring, parcels), parcels.order
    held = ready[rows, first]
    for step in range(wiring.workers - 1):
        here, there = wiring.worker(first + step), wiring.worker(first + step + 1)
        sent = wiring.send(here, there, parcels.nbytes, [held], key=rows, adds=True)
        held = wiring.graph.join(np.stack([sent, ready[rows, there]], axis=-1))
    return held[:, None]


def _spread_whole(wiring: Wiring, parcels: Parcels, held: Ids, multicast: bool) -> Ids:
    """From the last worker of the first round: to the right again, or to all at once."""
    n, rows = wiring.workers, parcels.order
    last = wiring.worker(_first(wiring, parcels) - 1)
    held = np.broadcast_to(held, (len(parcels), n))
    received = held.copy()
    at = held[rows, last]
    received[:] = at[:, None]
    if multicast and n > 1:
        targets = wiring.worker(last[:, None] + np.arange(1, n))
        received[rows[:, None], targets] = wiring.multicast(last, targets, parcels.nbytes, [at], key=rows)
        return received
    for step in range(n - 1):
        there = wiring.worker(last + step + 1)
        at = wiring.send(wiring.worker(last + step), there, parcels.nbytes, [at], key=rows)
        received[rows, there] = at
    return received
