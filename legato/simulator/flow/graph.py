"""What the engine runs: services on links and streams, and which waits for which.

[Note: one primitive]
A *service* keeps one link busy for `work_s` seconds. It is ready when all the
services it waits for have let it go, and links serve what is ready first come,
first served. A service lets another go in one of two ways:

- *after*: when it has ended, and its `delay_s` has passed;
- *cut through*: `delay_s` after it has begun, and then the other cannot end
  before it has ended itself, plus `delay_s`: the tail of a message that is sent
  on while it is received.

That is enough. A transfer is a service on the sender's link and one, cut
through, on the receiver's. Multicast is one service that several cut through.
In-network aggregation is one that cuts through several, or comes after them.
Computation is a service on no link. A barrier is one that takes no time.

A link that is faster than the one before it is busy for its own `work_s` only,
although the tail passes later: others go in between.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from legato.core.errors import InputError

__all__ = ["NO_LINK", "NO_TAG", "SERVICE", "Graph", "Ids", "Services"]

Ids = NDArray[np.int32]

NO_LINK = -1
#: The tag of a service that carries no message.
NO_TAG = -1

#: One cache line a service: all that the engine touches when it runs one.
#: `begin_s` and `end_s` are lower bounds until it has run, and its times from then on;
#: `next` is the engine's own.
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

#: 64 bytes each. Ids and edges, of which there may be more, are numbers of 32 bits.
_MOST_SERVICES = 100_000_000
_MOST_EDGES = 2**31 - 1


class Services(NamedTuple):
    """A graph ready to run.

    Service i lets go `successors[first_i : first_i + count_i]`, each written as
    id << 1, plus 1 where it cuts through. `num_links` links.
    """

    records: NDArray[Any]
    successors: Ids
    num_links: int


class Graph:
    """Services and edges, added an array at a time."""

    def __init__(self) -> None:
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
        """Raise `InputError` if so many more are too many."""
        if self.num_services + count > _MOST_SERVICES:
            raise _too_large()

    def edge(self, before: Ids, after: Ids, *, cut_through: bool = False) -> None:
        """`after` waits for `before`, element by element (the two are broadcast)."""
        befores, afters = np.broadcast_arrays(before, after)
        start, count = self.num_edges, befores.size
        if start + count > _MOST_EDGES:
            raise _too_large()
        self.num_edges += count
        for ends, ids in ((self._before, befores), (self._after, (afters << 1) | int(cut_through))):
            _grow(ends, self.num_edges)
            ends[start : start + count].reshape(ids.shape)[...] = ids

    def join(self, befores: Ids, axis: int = -1) -> Ids:
        """Services that take no time and wait for all along the axis."""
        moved = np.moveaxis(befores, axis, -1)
        joined = self.add(moved.shape[:-1])
        self.edge(moved, joined[..., None])
        return joined

    def freeze(self, num_links: int) -> Services:
        """The graph for the engine. Nothing can be added afterwards."""
        from legato.simulator.flow.engine import link_edges

        records = self._records[: self.num_services]
        before, after = self._before[: self.num_edges], self._after[: self.num_edges]
        return Services(records, link_edges(records, before, after), num_links)


def _grow(array: NDArray[Any], least: int) -> None:
    """Make room for so many, in place, with some to spare: nobody else holds the array while it is filled."""
    if least > len(array):
        array.resize(least + least // 8, refcheck=False)


def _too_large() -> InputError:
    return InputError(f"more than {_MOST_SERVICES:,} transfers and computations to simulate (fewer workers?)")
