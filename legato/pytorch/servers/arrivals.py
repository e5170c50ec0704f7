"""Observe the order in which transfers arrive, without interfering with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from legato.pytorch.servers.shards import Arena, Shard

__all__ = ["Arrivals", "out_of_order"]

#: Time between two polls. Transfers that arrive between the same two polls count as in order.
_POLL_S = 1e-4


class Arrivals:
    """A thread that polls the trailers of one receiver's values; each trailer arrives after its value.

    `previous` describes the iteration before the current one: the number of
    transfers that arrived out of order, and the seconds from the start of the
    iteration to each arrival.
    """

    def __init__(self, arena: Arena, shards: Sequence[Shard]) -> None:
        self._arena = arena
        self._server = {shard.index: shard.server for shard in shards}
        self._begun = threading.Event()
        self._work: tuple[int, list[int]] | None = None
        self._order: list[int] = []
        self._seen: list[tuple[float, list[int]]] = []
        self._began_s = 0.0
        self.previous: tuple[int, tuple[float, ...]] = (0, ())
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def begin(self, iteration: int, order: Sequence[int]) -> None:
        """Start to observe an iteration, whose values are expected in this order."""
        late = out_of_order(self._order, [group for _, group in self._seen], self._server)
        self.previous = late, tuple(at - self._began_s for at, group in self._seen for _ in group)
        self._order, self._seen = list(order), []
        self._began_s = time.perf_counter()
        self._work = (iteration, list(order))
        self._begun.set()

    def stop(self) -> None:
        """Stop the thread."""
        self._work = None
        self._begun.set()
        self._thread.join()

    def _poll(self) -> None:
        while True:
            self._begun.wait()
            self._begun.clear()
            if self._work is None:
                return
            iteration, left = self._work
            seen = self._seen
            while left and self._seen is seen and self._work is not None:
                # A poll takes time, and more may arrive meanwhile. It looks at the last transfers first, so that
                # whatever should have arrived before a transfer that it has seen is looked at later.
                iterations = self._arena.iterations(left[::-1]).tolist()[::-1]
                new = [index for index, found in zip(left, iterations, strict=True) if found == iteration]
                if new:
                    seen.append((time.perf_counter(), new))
                    left = [index for index, found in zip(left, iterations, strict=True) if found != iteration]
                time.sleep(_POLL_S)


def out_of_order(order: Sequence[int], seen: Sequence[Sequence[int]], server: dict[int, int]) -> int:
    """Count the transfers that arrived before another one of the same server that precedes them in `order`.

    `seen` holds groups of transfers, in order of arrival; transfers in one
    group were observed at the same time.
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
