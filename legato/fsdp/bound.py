"""How fast fully sharded training can be at best: a time that no wrapping beats within a limit on memory.

It holds for contiguous groups of all units that groups can hold, whatever becomes of each after its forward pass,
however far ahead they are gathered, and however many reductions may wait. Memory limits what is gathered ahead, what
waits to be reduced, and how large groups are; the rest crosses the network between two computations. So a step takes
at least as long as the longest path through its computations, on which the network may lie between any two of them.
docs/fully_sharded_bound.md has the proof. Units: seconds and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from legato.core.cluster import LinearCost
from legato.core.errors import InputError
from legato.core.units import format_seconds
from legato.fsdp.costs import Costs
from legato.fsdp.units import Unit

__all__ = ["WrappingBound", "lower_bound"]

Array = npt.NDArray[Any]

#: More than the relative error of all sums.
_ROUNDING = 1e-9
#: The first group may end anywhere: the units are divided into this number of ranges, and the best range gives the
#: bound.
_RANGES = 16


class WrappingBound(NamedTuple):
    """A step takes at least `seconds`: of computation, and of waiting for the network, by where the waiting is.

    The time is infinite if no wrapping fits into the memory.
    """

    seconds: float
    compute_s: float
    first_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    last_s: float = 0.0

    def __str__(self) -> str:
        if math.isinf(self.seconds):
            return "no wrapping fits into the memory"
        waits = {
            "before it": self.first_s,
            "in the forward pass": self.forward_s,
            "in the backward pass": self.backward_s,
            "after it": self.last_s,
        }
        parts = [f"{format_seconds(seconds)} {words}" for words, seconds in waits.items() if seconds > 0]
        return f"{format_seconds(self.compute_s)} of computation, waiting for {' and '.join(parts)}"


def lower_bound(
    units: Sequence[Unit], costs: Costs, memory_nbytes: float | None = None, *, node: int | None = None
) -> WrappingBound:
    """The bound on a step of one micro-batch without replicas, if at most `memory_nbytes` are allocated at once.

    `node` is the largest number of ranks to which groups may be resharded, None if they may not. For wrappings that
    leave units to the root, mark these as `rooted`. Raises `InputError` if no unit is left for groups.
    """
    chain = _Chain(units, costs, math.inf if memory_nbytes is None else memory_nbytes, node)
    if not chain.held.any():
        raise InputError(f"units: {len(units)}, none of which a group can hold (expected one or more)")
    best = WrappingBound(math.inf, chain.compute_s)
    if not chain.fits():
        return best
    forward, backward = chain.forward(), chain.backward()
    places = np.flatnonzero(chain.held)
    for part in np.array_split(places, min(len(places), _RANGES)):
        ends = int(part[0]), int(part[-1])
        if chain.exposed_s(ends[0]) < best.seconds:
            best = min(best, chain.bound(forward, backward, ends))
    return best._replace(seconds=best.seconds * (1 - _ROUNDING))


class _Chain:
    """The units in the order of the forward pass, by array: what must cross the network, and what memory it takes.

    Units that no group can hold have no bytes here; the root's are apart.
    """

    def __init__(self, units: Sequence[Unit], costs: Costs, memory: float, node: int | None) -> None:
        self.costs, self.part = costs, node or 1
        column = {field: np.array([getattr(unit, field) for unit in units]) for field in Unit._fields[1:]}
        place, trained, needs_gradient = np.arange(len(units)), column["trained"], column["input_needs_gradient"]
        sizes = [column[field].astype(float) for field in ("gathered", "scattered", "gradients")]
        self.held = held = ~column["rooted"] & (sizes[0] > 0)
        self.gathered, self.scattered, self.gradients = (np.where(held, size, 0.0) for size in sizes)
        self.root = [float(size[~held].sum()) for size in sizes]
        reached = np.min(place, where=trained, initial=len(units))
        active = (place >= reached) & (trained | needs_gradient)
        self.forward_s = column["forward_s"]
        self.backward_s = np.append(np.where(active, column["backward_s"], 0.0)[::-1], 0.0)  # the last one is the end
        self.compute_s = float(self.forward_s.sum() + self.backward_s.sum())

        # the group of such a unit is reduced before the backward pass goes on, or ends it
        late = np.min(place, where=held & ~needs_gradient & (place > reached), initial=len(units))
        self.timely = trained & (place < late)
        following = np.maximum.accumulate(np.where(held, place, -1))  # the next unit of a group in the backward pass
        self.sure = (following < 0) | self.timely[following]
        self.read = np.where(active & column["read_in_backward"], self.gathered, 0.0)

        most = 4 * sizes[0].sum() + 2 * sizes[1].sum() + sizes[2].sum() + 1  # more is never allocated
        self.whole = min(memory, most)
        self.memory = self.whole - self.root[0]  # the last reductions have the root's part, too
        shards = np.minimum(self.scattered // costs.ranks, self.gradients)
        above = shards[::-1].cumsum()[::-1] - shards
        of_root = np.where(held, 0.0, sizes[2])[::-1].cumsum()[::-1]
        self.room = self.memory - self.read - self.gradients - above - of_root  # during a backward computation
        heavy = bool((self.scattered + self.gradients >= self.read).all())
        self.full = self.whole - self.scattered - self.gradients - above if heavy else self.room  # during a reduction
        self.packed = np.minimum(self.scattered, self.read + self.gradients - shards)
        ratios = self.gradients[self.scattered > 0] / self.scattered[self.scattered > 0]
        self.largest_gather = self.memory / 2
        self.largest_reduction = self.whole / (1 + ratios.min(initial=1.0))

    def fits(self) -> bool:
        """Return whether each unit alone fits into the memory."""
        return bool(min(self.memory - 2 * self.gathered.max(), self.room.min(), self.full.min()) >= 0)

    def exposed_s(self, end: int) -> float:
        """The seconds from the first group's gather to its reduction, if it ends at a unit, or later."""
        first = int(np.argmax(self.held))
        gathered, scattered = (float(sizes[: end + 1].sum()) for sizes in (self.gathered, self.scattered))
        reduction = self.costs.scatter.cost(scattered) if scattered else 0.0
        own = self.forward_s[first:].sum() + self.backward_s[: len(self.held) - first].sum()
        return self.costs.gather.cost(gathered) + float(own) + reduction

    def bound(self, forward: Array, backward: Array, ends: tuple[int, int]) -> WrappingBound:
        """The bound if the first group ends in a range of units."""
        forward, backward = forward.copy(), backward.copy()
        forward[0] = self._outer(self.costs.gather, self.gathered, self.root[0], self.largest_gather, ends)
        last = self._outer(self.costs.scatter, self.scattered, self.root[1], self.largest_reduction, ends)
        backward[:, -1] += np.append(last[-1], last[::-1])
        waits, forward_s = _waits(forward, self.forward_s)
        more, backward_s = _waits(backward, self.backward_s)
        parts = (float(part.sum()) for part in (waits[:1], waits[1:], more[:-1], more[-1:]))
        return WrappingBound(forward_s + backward_s, self.compute_s, *parts)

    def _outer(self, cost: LinearCost, sizes: Array, root: float, largest: float, ends: tuple[int, int]) -> Array:
        """Return the seconds of collectives (with the root's) before each forward, or after each backward computation.

        Collectives carry at least all units up to this one, and from the first unit of the first group on, the whole
        group.
        """
        until = sizes.cumsum()
        count = (until[ends[0]] > 0) + _count(np.maximum(until - until[ends[1]], 0.0), largest)
        nbytes = np.where(np.arange(len(until)) < np.argmax(self.held), 0.0, np.maximum(until, until[ends[0]]))
        return (cost.cost(root) if root else 0.0) + _seconds(cost, nbytes, np.maximum(count, _count(until, largest)))

    def forward(self) -> Array:
        """Seconds of gathers between two forward computations; the first row lacks those from the beginning."""
        until = _until(self.gathered)
        ahead = np.append(0.0, 1.25 * self.memory - self.gathered)
        nbytes = until[1:] - (until + ahead)[:, None]
        return _seconds(self.costs.gather, nbytes, _count(nbytes, self.largest_gather))

    def backward(self) -> Array:
        """Seconds of the network between two backward computations; the last column, the end, lacks reductions.

        Rows and columns are in the order of the backward pass, and the first row is for the end of the forward pass.
        """
        room, full, sure, timely = (values[::-1] for values in (self.room, self.full, self.sure, self.timely))
        read = _until(np.maximum(self.read - (self.part - 1), 0.0)[::-1])
        packed, scattered = _until(self.packed[::-1]), _until(np.where(timely, self.scattered[::-1], 0.0))
        issued = self.part * np.where(timely, np.minimum(room, full), room)  # on hand in the order of the program
        begun = np.where(sure, issued, self.part * (room + self.memory))  # and by time
        begun = np.append(self.part * self.memory * (1 if sure[0] else 2), begun)
        gathers = read[1:] - (read + begun)[:, None]
        gathers = np.append(gathers, gathers[:, -1:], axis=1)
        seconds = _seconds(self.costs.gather, gathers, _count(gathers, self.largest_gather))

        # Reductions that do not fit into the memory, or were issued before a gather that does not fit into it earlier
        index = np.arange(len(room))
        after = np.triu(read[1:] > (read[1:] + issued)[:, None])  # the gather for j is issued after the reduction of i
        last = np.max(np.where(after, index[:, None] + 1, 0), axis=0)
        before = np.append(0, index)  # what was reduced before a computation ended
        waiting = packed[:-1] - room - packed[before][:, None]
        nbytes = np.maximum(waiting, scattered[last] - scattered[before][:, None])
        seconds[:, :-1] += _seconds(self.costs.scatter, nbytes, _count(nbytes, self.largest_reduction))
        return seconds


def _waits(network: Array, seconds: Array) -> tuple[Array, float]:
    """Return how long each computation waits at least, and when the last one ends.

    `network[i, j]` are seconds between the end of computation i - 1 (the beginning, if i is 0) and the start of j.
    """
    ends, waits = np.zeros(len(seconds) + 1), np.zeros(len(seconds))
    for j, own_s in enumerate(seconds):
        waits[j] = max(float(np.max(ends[: j + 1] + network[: j + 1, j])) - ends[j], 0.0)
        ends[j + 1] = ends[j] + waits[j] + own_s
    return waits, float(ends[-1])


def _until(sizes: Array) -> Array:
    """The sums of the first 0, 1, 2, ... sizes."""
    return np.append(0.0, sizes.cumsum())


def _count(nbytes: Array, largest: float) -> Array:
    """Return the least number of collectives that carry these bytes."""
    return np.where(nbytes > 0, np.maximum(np.ceil(nbytes / largest - _ROUNDING), 1.0), 0.0)


def _seconds(cost: LinearCost, nbytes: Array, count: Array) -> Array:
    """Return the time of `count` collectives of `nbytes` in all; 0 where `nbytes` is not above 0."""
    seconds = np.maximum(count * cost.floor_s, count * cost.alpha_s + cost.beta_s_per_byte * nbytes)
    return np.where(nbytes > 0, seconds, 0.0)
