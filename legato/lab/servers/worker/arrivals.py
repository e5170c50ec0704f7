"""Observes the order in which transfers arrive, without interfering with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from legato.lab.servers.shards import Arena, Shard

__all__ = ["Arrivals", "out_of_order"]

#: Seconds between two polls. Transfers that arrive between the same two polls count as in order.
_POLL_S = 1e-4


class Arrivals:
    """A thread that polls the trailers of one receiver's values. A trailer is the last part of a transfer to arrive.

    `previous` describes the previous iteration: the number of transfers that arrived out of order, and the seconds from
    the start of the iteration to each arrival.
    """

    def __init__(self, arena: Arena, shards: Sequence[Shard]) -> None:
        self._arena = arena
        self._server = {shard.index: shard.server for shard in shards}
        self._looking = threading.Lock()
        self._begun = threading.Event()
        self._stopped = False
        self._order: list[int] = []
        self._left: list[int] = []
        self._seen: list[tuple[float, list[int]]] = []
        self._began_s = 0.0
        self.previous: tuple[int, tuple[float, ...]] = (0, ())
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def begin(self, order: Sequence[int]) -> None:
        """Start to observe an iteration whose values are expected in this order.

        Call this when all values of the previous iteration have arrived, and before any value of the new iteration can
        arrive.
        """
        with self._looking:
            self._look()  # notes what arrived after the last poll
            late = out_of_order(self._order, [group for _, group in self._seen], self._server)
            self.previous = late, tuple(at - self._began_s for at, group in self._seen for _ in group)
            self._order, self._left, self._seen = list(order), list(order), []
            self._arena.clear_iterations(order)
            self._began_s = time.perf_counter()
        self._begun.set()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped = True
        self._begun.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._stopped:
            self._begun.wait()
            self._begun.clear()
            while self._left and not self._stopped:
                with self._looking:
                    self._look()
                time.sleep(_POLL_S)

    def _look(self) -> None:
        """Note the transfers that have arrived since the last look."""
        # A look takes time, and more transfers may arrive meanwhile. It begins with the last transfers. So if it has
        # seen a transfer, it looks later at all transfers that should have arrived earlier.
        arrived = self._arena.arrived(self._left[::-1])[::-1]
        new = [index for index, there in zip(self._left, arrived, strict=True) if there]
        if new:
            self._seen.append((time.perf_counter(), new))
            self._left = [index for index, there in zip(self._left, arrived, strict=True) if not there]


def out_of_order(order: Sequence[int], seen: Sequence[Sequence[int]], server: dict[int, int]) -> int:
    """Count the transfers that arrived too early: before a transfer of their server that precedes them in `order`.

    `seen` has groups of transfers, in order of arrival; the transfers of one group were observed at the same time.
    """
    place = {index: k for k, index in enumerate(order)}
    missing: dict[int, set[int]] = {}
    for index in order:
        missing.setdefault(server[index], set()).add(place[index])
    late = 0
    for group in seen:
        for index in group:
            missing[server[index]].discard(place[index])
        for index in group:
            left = missing[server[index]]
            late += bool(left) and min(left) < place[index]
    return late
