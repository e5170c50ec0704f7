"""Simulate one worker in place of all workers: the bytes that it sends also arrive at it, as a neighbour's would.

If all workers behave alike, another worker sends the same transfer at the same time. So a transfer of a worker occupies
the worker's outgoing link and also its incoming link ([Note: symmetry] in `topology.py`). The incoming link receives
exactly what the outgoing link has sent, in the same order. So, in this simulation, a transfer is only one service,
called a *trip*. The n-1 steps of a ring, or the n-1 transfers of an all-to-all exchange, are one trip that is repeated
n-1 times. The graph has the same size for any number of workers. The engine adds the same durations in the same order
as if all workers were simulated, so times are equal to the last bit.

Exceptions are transfers that are so short that adding their duration to a time does not change it (in 64 bits). Links
may serve these very short transfers in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from legato.simulator.flow.engine.graph import Graph
from legato.simulator.flow.engine.services import Ids, Trips
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.topology import Hosts, Topology

__all__ = ["Alone"]


class Alone(Topology):
    """The links of one worker, and the trips on them."""

    def __init__(self, graph: Graph, network: Network) -> None:
        super().__init__(graph, network, size=1, servers=0)
        # (trips, laps, transfers sent, transfers received)
        self._numbers: list[tuple[Ids, int, int, int]] = []

    def send(
        self,
        source: ArrayLike,
        target: ArrayLike,
        nbytes: ArrayLike,
        after: Iterable[Ids],
        *,
        key: ArrayLike,
        adds: bool = False,
    ) -> Ids:
        after = list(after)
        nbytes, key, *_ = np.broadcast_arrays(nbytes, key, source, target, *after)
        return self._trips(nbytes, key, after, adds=adds)

    def pass_around(
        self,
        target: Hosts,
        come_from: Hosts,
        nbytes: NDArray[np.float64],
        begin: Ids,
        steps: int,
        *,
        key: ArrayLike,
        adds: bool = False,
        local: bool | None = None,
    ) -> Ids:
        """Send in rounds, and return services [fragment, 1, 1] that end when the last round's bytes have arrived."""
        if not steps:
            return np.empty((len(begin), 0, 1), np.int32)
        return self._trips(nbytes[:, None], np.asarray(key)[:, None], [begin], adds=adds, laps=steps)[:, None]

    def all_to_all(
        self,
        nbytes: NDArray[np.float64],
        begin: Ids,
        shifts: Sequence[int],
        *,
        key: ArrayLike,
        adds: bool = False,
        multicast: bool = False,
    ) -> Ids:
        others = len(shifts)
        if not others:
            return begin
        sent = 1 if multicast else others
        numbers = {"adds": others * adds, "sent": sent, "received": others}
        return self._trips(nbytes[:, None], np.asarray(key)[:, None], [begin], **numbers)

    def _trips(
        self,
        nbytes: NDArray[np.float64],
        key: NDArray[Any],
        after: list[Ids],
        *,
        adds: int,
        laps: int = 1,
        sent: int = 1,
        received: int = 1,
    ) -> Ids:
        reduce_s = self.network.reduce_s_per_byte * nbytes * adds
        work_s = nbytes * self._s_per_byte[0]
        trips = self.graph.add(
            nbytes.shape, link=0, work_s=work_s, delay_s=reduce_s, key=key, tag=self._tags(nbytes.shape)
        )
        self._numbers.append((trips, laps, sent, received))
        for before in after:
            self.graph.edge(before, trips)
        return trips

    @property
    def num_events(self) -> int:
        trips = sum(trips.size * (laps * (sent + received) - 1) for trips, laps, sent, received in self._numbers)
        return self.graph.num_services + trips

    def trips(self) -> Trips:
        """Return the trips as the arrays that the engine takes."""
        laps, sent, received = np.ones((3, self.graph.num_services), np.int64)
        for trips, *numbers in self._numbers:
            laps[trips], sent[trips], received[trips] = numbers
        network = self.network
        return Trips(laps, sent, received, network.sending_s, network.on_the_way_s, network.cut_through)
