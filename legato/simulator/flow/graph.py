"""The graph that the engine runs: services on links and streams, and their dependencies.

[Note: one primitive]
A *service* keeps one link busy for `work_s` seconds. It is ready when all the
services it waits for have released it, and a link serves ready services first
come, first served. A service releases another one in one of two ways:

- *after*: `delay_s` after its own end;
- *cut through*: `delay_s` after its own begin; the other one then cannot end
  before `delay_s` after its own end (the tail of a message that is forwarded
  while it is received).

This is enough for everything. A transfer is a service on the sender's link and
one, released cut through, on the receiver's. In multicast, one service releases
several cut through. In in-network aggregation, several release one, cut through
or after. Computation is a service on no link. A barrier is a service that takes
no time.

A link that is faster than the previous one is busy for its own `work_s` only,
although the tail passes later: it serves others in between.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from legato.core.errors import TooLargeError

__all__ = ["MOST_FAIR_SERVICES", "NO_LINK", "NO_TAG", "SERVICE", "Graph", "Ids", "Services"]

Ids = NDArray[np.int32]

NO_LINK = -1
#: The tag of a service that carries no message.
NO_TAG = -1

#: One cache line per service: all data that the engine needs to run it.
#: `begin_s` and `end_s` are lower bounds until it has run, and its times afterwards;
#: `next` is private to the engine.
SERVICE = np.dtype(
    [
        ("begin_s", "f8"),
        ("end_s", "f8"),
        ("work_s", "f8"),
        ("delay_s", "f8"),
        ("key", "i8"),
        ("first", "i4"),
        ("count", "i4"),
        ("link", "i4"),
        ("missing", "i4"),
        ("next", "i4"),
        ("tag", "i4"),
    ]
)

#: A service takes 64 bytes. Ids and edges are numbers of 32 bits.
_MOST_SERVICES = 100_000_000
#: Where transfers share links fairly, each one that starts or ends may change the rates of all the others.
MOST_FAIR_SERVICES = 1_000_000
_MOST_EDGES = 2**31 - 1


class Services(NamedTuple):
    """A graph ready to run, with `num_links` links.

    Service i releases `successors[first_i : first_i + count_i]`; each entry is
    id << 1, plus 1 if it is released cut through.
    """

    records: NDArray[Any]
    successors: Ids
    num_links: int


class Graph:
    """Services and edges; they are added as arrays. A graph has at most `most` services."""

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
        tag: ArrayLike = NO_TAG,
    ) -> Ids:
        """Add services in an array of this shape (everything else is broadcast to it), and return their ids."""
        start, count = self.num_services, math.prod(shape)
        self.check_room(count)
        self.num_services += count
        _grow(self._records, self.num_services)
        block = self._records[start : start + count].reshape(shape)
        block["link"], block["work_s"], block["delay_s"], block["key"], block["tag"] = link, work_s, delay_s, key, tag
        return np.arange(start, start + count, dtype=np.int32).reshape(shape)

    def check_room(self, count: int) -> None:
        """Raise `TooLargeError` if `count` more services are too many."""
        if self.num_services + count > self._most:
            raise self._too_large()

    def edge(self, before: Ids, after: Ids, *, cut_through: bool = False) -> None:
        """Let `after` wait for `before`, element by element (the two arrays are broadcast)."""
        befores, afters = np.broadcast_arrays(before, after)
        start, count = self.num_edges, befores.size
        if start + count > _MOST_EDGES:
            raise self._too_large()
        self.num_edges += count
        for ends, ids in ((self._before, befores), (self._after, (afters << 1) | int(cut_through))):
            _grow(ends, self.num_edges)
            ends[start : start + count].reshape(ids.shape)[...] = ids

    def join(self, befores: Ids, axis: int = -1) -> Ids:
        """Add services that take no time, each of which waits for all services along the axis; return their ids."""
        moved = np.moveaxis(befores, axis, -1)
        joined = self.add(moved.shape[:-1])
        self.edge(moved, joined[..., None])
        return joined

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"more than {self._most:,} transfers and computations to simulate (fewer workers?)")

    def freeze(self, num_links: int) -> Services:
        """Return the graph for the engine. Nothing can be added afterwards."""
        from legato.simulator.flow.engine import link_edges

        records = self._records[: self.num_services]
        before, after = self._before[: self.num_edges], self._after[: self.num_edges]
        return Services(records, link_edges(records, before, after), num_links)


def _grow(array: NDArray[Any], least: int) -> None:
    """Make room for at least `least` entries, in place; no other code holds the array while the graph is built."""
    if least > len(array):
        array.resize(least + least // 8, refcheck=False)
