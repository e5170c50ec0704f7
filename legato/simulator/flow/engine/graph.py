"""The graph that a simulation builds: whole arrays of services and dependencies (`services.py`) are added at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from legato.core.errors import TooLargeError
from legato.simulator.flow.engine.services import NO_LINK, SERVICE, Ids, Services

__all__ = ["MOST_FAIR_SERVICES", "Graph"]

#: The most services. A service takes 64 bytes; ids and edges are numbers of 32 bits.
_MOST_SERVICES = 100_000_000
#: The most services if links are shared fairly: each transfer that starts or ends may change the rates of all others.
MOST_FAIR_SERVICES = 1_000_000
_MOST_EDGES = 2**31 - 1


class Graph:
    """A graph of services and edges, to which whole arrays are added. A graph has at most `most` services."""

    def __init__(self, most: int = _MOST_SERVICES) -> None:
        self._most = most
        self.num_services = self.num_edges = 0
        self._records = np.zeros(1024, SERVICE)
        self._before = np.empty(1024, np.int32)
        self._after = np.empty(1024, np.int32)

    def add(
        self,
        shape: tuple[int, ...],
        *,
        link: ArrayLike = NO_LINK,
        work_s: ArrayLike = 0.0,
        delay_s: ArrayLike = 0.0,
        key: ArrayLike = 0,
    ) -> Ids:
        """Add services in an array of this shape, and return their ids. Other arguments are broadcast to the shape."""
        start, count = self.num_services, math.prod(shape)
        self.check_room(count)
        self.num_services += count
        _grow(self._records, self.num_services)
        block = self._records[start : start + count].reshape(shape)
        block["link"], block["work_s"], block["delay_s"], block["key"] = link, work_s, delay_s, key
        return np.arange(start, start + count, dtype=np.int32).reshape(shape)

    def check_room(self, count: int) -> None:
        """Raise `TooLargeError` if the graph has no room for `count` more services."""
        if self.num_services + count > self._most:
            raise self._too_large()

    def edge(self, before: Ids, after: Ids, *, cut_through: bool = False) -> None:
        """Let each service in `after` wait for the matching service in `before`; the two arrays are broadcast."""
        befores, afters = np.broadcast_arrays(before, after)
        start, count = self.num_edges, befores.size
        if start + count > _MOST_EDGES:
            raise self._too_large()
        self.num_edges += count
        for ends, ids in ((self._before, befores), (self._after, (afters << 1) | int(cut_through))):
            _grow(ends, self.num_edges)
            ends[start : start + count].reshape(ids.shape)[...] = ids

    def join(self, befores: Ids, axis: int = -1) -> Ids:
        """Add services that take no time, each waiting for all services along the axis, and return their ids."""
        moved = np.moveaxis(befores, axis, -1)
        joined = self.add(moved.shape[:-1])
        self.edge(moved, joined[..., None])
        return joined

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"more than {self._most:,} transfers and computations to simulate (fewer workers?)")

    def freeze(self, num_links: int) -> Services:
        """Return the graph in the engine's form. Nothing can be added afterwards."""
        from legato.simulator.flow.engine.loop import link_edges

        records = self._records[: self.num_services]
        before, after = self._before[: self.num_edges], self._after[: self.num_edges]
        return Services(records, link_edges(records, before, after), num_links)


def _grow(array: NDArray[Any], least: int) -> None:
    """Make room for `least` entries in the array itself, which no other code uses while the graph is built."""
    if least > len(array):
        array.resize(least + least // 8, refcheck=False)
