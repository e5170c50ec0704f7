"""The lower bound of fully sharded training: a step time that no wrapping within a memory limit can beat.

The bound holds for all divisions of the model's units into contiguous groups, whether or not groups are resharded, for
any prefetch depth, and for any number of reductions in flight. Memory limits how much is gathered ahead, how much waits
to be reduced, and the size of groups. Bytes that do not fit within these limits must cross the network between two
computations. Therefore a step takes at least as long as the longest path through its computations and the transfers
between any two computations. docs/fully_sharded_bound.md has the proof. Units: seconds and bytes.
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

#: A relative tolerance above the rounding error of all sums.
_ROUNDING = 1e-9
#: The number of ranges into which units are divided. The first group may end in any range, so the bound is the least
#: over all ranges.
_RANGES = 16


class WrappingBound(NamedTuple):
    """The lower bound of a step, in seconds: its computation, and the waits for the network before, in and after it.

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
    """Return the bound of a step of one micro-batch without replicas, with at most `memory_nbytes` allocated at once.

    `node` is the largest number of ranks to which groups may be resharded, or None if no group may be. Units that
    belong to the root in all wrappings must be marked as `rooted`. Raises `InputError` if no unit is left for groups.
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
    """The units in the order of the forward pass as arrays: their bytes on the network, and their memory.

    In these arrays, units that must belong to the root have 0 bytes; `root` has their bytes.
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
        # the last entry is the end of the pass
        self.backward_s = np.append(np.where(active, column["backward_s"], 0.0)[::-1], 0.0)
        self.compute_s = float(self.forward_s.sum() + self.backward_s.sum())

        # The group of a `timely` unit is reduced before the backward pass goes on, or is the last group of the pass.
        late = np.min(place, where=held & ~needs_gradient & (place > reached), initial=len(units))
        self.timely = trained & (place < late)
        # the next unit in the backward pass that has a group
        following = np.maximum.accumulate(np.where(held, place, -1))
        self.sure = (following < 0) | self.timely[following]
        self.read = np.where(active & column["read_in_backward"], self.gathered, 0.0)

        most = 4 * sizes[0].sum() + 2 * sizes[1].sum() + sizes[2].sum() + 1  # no wrapping allocates more bytes
        self.whole = min(memory, most)
        self.memory = self.whole - self.root[0]  # the last reductions can use the root's part of the memory, too
        shards = np.minimum(self.scattered // costs.ranks, self.gradients)
        above = shards[::-1].cumsum()[::-1] - shards
        of_root = np.where(held, 0.0, sizes[2])[::-1].cumsum()[::-1]
        # memory left during a backward computation
        self.room = self.memory - self.read - self.gradients - above - of_root
        heavy = bool((self.scattered + self.gradients >= self.read).all())
        # memory left during a reduction
        self.full = self.whole - self.scattered - self.gradients - above if heavy else self.room
        self.packed = np.minimum(self.scattered, self.read + self.gradients - shards)
        ratios = self.gradients[self.scattered > 0] / self.scattered[self.scattered > 0]
        self.largest_gather = self.memory / 2
        self.largest_reduction = self.whole / (1 + ratios.min(initial=1.0))

    def fits(self) -> bool:
        """Return whether each unit fits into the memory without the other units."""
        return bool(min(self.memory - 2 * self.gathered.max(), self.room.min(), self.full.min()) >= 0)

    def exposed_s(self, end: int) -> float:
        """Return the least seconds from gather to reduction of a first group that ends at unit `end` or later."""
        first = int(np.argmax(self.held))
        gathered, scattered = (float(sizes[: end + 1].sum()) for sizes in (self.gathered, self.scattered))
        reduction = self.costs.scatter.cost(scattered) if scattered else 0.0
        own = self.forward_s[first:].sum() + self.backward_s[: len(self.held) - first].sum()
        return self.costs.gather.cost(gathered) + float(own) + reduction

    def bound(self, forward: Array, backward: Array, ends: tuple[int, int]) -> WrappingBound:
        """Return the bound for wrappings whose first group ends in this range of units."""
        forward, backward = forward.copy(), backward.copy()
        forward[0] = self._outer(self.costs.gather, self.gathered, self.root[0], self.largest_gather, ends)
        last = self._outer(self.costs.scatter, self.scattered, self.root[1], self.largest_reduction, ends)
        backward[:, -1] += np.append(last[-1], last[::-1])
        waits, forward_s = _waits(forward, self.forward_s)
        more, backward_s = _waits(backward, self.backward_s)
        parts = (float(part.sum()) for part in (waits[:1], waits[1:], more[:-1], more[-1:]))
        return WrappingBound(forward_s + backward_s, self.compute_s, *parts)

    def _outer(self, cost: LinearCost, sizes: Array, root: float, largest: float, ends: tuple[int, int]) -> Array:
        """Return the least seconds of the collectives before each forward (or after each backward) computation.

        The collectives are gathers (or reductions). They carry the root and all units up to this computation, and, from
        the first unit of the first group on, at least this whole group.
        """
        until = sizes.cumsum()
        count = (until[ends[0]] > 0) + _count(np.maximum(until - until[ends[1]], 0.0), largest)
        nbytes = np.where(np.arange(len(until)) < np.argmax(self.held), 0.0, np.maximum(until, until[ends[0]]))
        return (cost.cost(root) if root else 0.0) + _seconds(cost, nbytes, np.maximum(count, _count(until, largest)))

    def forward(self) -> Array:
        """Return the seconds of gathers between two forward computations. `bound` replaces the first row."""
        until = _until(self.gathered)
        ahead = np.append(0.0, 1.25 * self.memory - self.gathered)
        nbytes = until[1:] - (until + ahead)[:, None]
        return _seconds(self.costs.gather, nbytes, _count(nbytes, self.largest_gather))

    def backward(self) -> Array:
        """Return the seconds of transfers between two backward computations.

        Rows and columns are in the order of the backward pass. The first row is the end of the forward pass. The last
        column is the end of the backward pass, and has only gathers.
        """
        room, full, sure, timely = (values[::-1] for values in (self.room, self.full, self.sure, self.timely))
        read = _until(np.maximum(self.read - (self.part - 1), 0.0)[::-1])
        packed, scattered = _until(self.packed[::-1]), _until(np.where(timely, self.scattered[::-1], 0.0))
        # bytes that can be gathered ahead, in the order of the program
        issued = self.part * np.where(timely, np.minimum(room, full), room)
        # bytes that can be gathered ahead, in the order of time
        begun = np.where(sure, issued, self.part * (room + self.memory))
        begun = np.append(self.part * self.memory * (1 if sure[0] else 2), begun)
        gathers = read[1:] - (read + begun)[:, None]
        gathers = np.append(gathers, gathers[:, -1:], axis=1)
        seconds = _seconds(self.costs.gather, gathers, _count(gathers, self.largest_gather))

        # Reductions that do not fit into the memory, or that were issued before a gather that could not be issued
        # earlier.
        index = np.arange(len(room))
        after = np.triu(read[1:] > (read[1:] + issued)[:, None])  # the gather for j is issued after the reduction of i
        last = np.max(np.where(after, index[:, None] + 1, 0), axis=0)
        before = np.append(0, index)  # reduced before a computation ended
        waiting = packed[:-1] - room - packed[before][:, None]
        nbytes = np.maximum(waiting, scattered[last] - scattered[before][:, None])
        seconds[:, :-1] += _seconds(self.costs.scatter, nbytes, _count(nbytes, self.largest_reduction))
        return seconds


def _waits(network: Array, seconds: Array) -> tuple[Array, float]:
    """Return the least wait of each computation, and the end of the last computation.

    `network[i, j]` are the seconds between the end of computation i - 1 (the beginning, if i is 0) and the start of
    computation j.
    """
    ends, waits = np.zeros(len(seconds) + 1), np.zeros(len(seconds))
    for j, own_s in enumerate(seconds):
        waits[j] = max(float(np.max(ends[: j + 1] + network[: j + 1, j])) - ends[j], 0.0)
        ends[j + 1] = ends[j] + waits[j] + own_s
    return waits, float(ends[-1])


def _until(sizes: Array) -> Array:
    """Return the sums of the first 0, 1, 2, ... sizes."""
    return np.append(0.0, sizes.cumsum())


def _count(nbytes: Array, largest: float) -> Array:
    """Return the least number of collectives that carry these bytes."""
    return np.where(nbytes > 0, np.maximum(np.ceil(nbytes / largest - _ROUNDING), 1.0), 0.0)


def _seconds(cost: LinearCost, nbytes: Array, count: Array) -> Array:
    """Return the time of `count` collectives that carry `nbytes` in all, or 0 if `nbytes` is at most 0."""
    seconds = np.maximum(count * cost.floor_s, count * cost.alpha_s + cost.beta_s_per_byte * nbytes)
    return np.where(nbytes > 0, seconds, 0.0)
