"""The least time in which given gradients, and a given number of bytes in all, can have been computed.

Where ops run in any order on one stream, what has been computed is a set of ops that
contains everything its members depend on. Take the gradient in it that depends on most:
everything that it depends on has run, and so has, for every other gradient, at least the
op that produces it. Those that make most bytes for their time are taken first, the last
one in part (a fractional knapsack). The least over all gradients that may be the first
one taken is never too much.

In the captured order, and with unlimited compute, each gradient has its own fixed
release time, whatever else is computed. In any order, to count only these is valid, too,
and proves less. Units: seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from legato.schedule.basics.heads_tails import Detours

__all__ = ["AnyOrderReleaseTimes", "FixedReleaseTimes", "ReleaseTimes"]

Floats = npt.NDArray[np.float64]
#: Amounts of bytes.
Amounts = npt.NDArray[np.int64]


class ReleaseTimes(Protocol):
    """When gradients can be ready at the earliest."""

    def least_s(self, required: Sequence[int], amounts: Amounts) -> Floats:
        """For each amount, the least time for the required tensors and at least this many bytes in all."""
        ...

    def part_s(self, tensors: Sequence[int], amounts: Amounts) -> Floats:
        """For each amount, the least time for this many bytes of some tensors; infinite if they have fewer."""
        ...


class FixedReleaseTimes:
    """Each gradient has a fixed release time (or, backwards in time, a fixed tail)."""

    def __init__(self, release_s: Sequence[float], nbytes: Sequence[int]) -> None:
        self.release_s, self.nbytes = np.array(release_s), np.array(nbytes, dtype=np.int64)

    def least_s(self, required: Sequence[int], amounts: Amounts) -> Floats:
        least = max((self.release_s[t] for t in required), default=0.0)
        return np.maximum(self.part_s(range(len(self.release_s)), amounts), least)

    def part_s(self, tensors: Sequence[int], amounts: Amounts) -> Floats:
        chosen = np.array(tensors, dtype=np.int64)
        order = chosen[np.argsort(self.release_s[chosen], kind="stable")]
        total = np.cumsum(self.nbytes[order])
        moments = np.append(self.release_s[order], np.inf)
        return np.where(amounts > 0, moments[np.searchsorted(total, amounts)], 0.0)


class AnyOrderReleaseTimes:
    """Release times where ops run in any order on one stream."""

    def __init__(self, detours: Detours, nbytes: Sequence[int]) -> None:
        self.detours = detours
        made: dict[int, list[int]] = {}
        for t, op in enumerate(detours.ready_op):
            made.setdefault(op, []).append(t)
        self.tensors = list(made.values())
        self.needs = [detours.needs[of[0]] for of in self.tensors]
        self.release_s = np.array([detours.weigh.of(bits) for bits in self.needs])
        self.duration_s = np.array([detours.duration_s[op] for op in made])
        self.nbytes = nbytes

    def least_s(self, required: Sequence[int], amounts: Amounts) -> Floats:
        needed = 0
        for t in required:
            needed |= self.detours.needs[t]
        return self._least_s(needed, self._made(range(len(self.nbytes))), amounts)

    def part_s(self, tensors: Sequence[int], amounts: Amounts) -> Floats:
        return self._least_s(0, self._made(tensors), amounts)

    def _made(self, tensors: Sequence[int]) -> Floats:
        """The bytes of these tensors that each op produces."""
        chosen = set(tensors)
        return np.array([sum(self.nbytes[t] for t in of if t in chosen) for of in self.tensors], dtype=np.float64)

    def _least_s(self, needed: int, made: Floats, amounts: Amounts) -> Floats:
        """The least time by amount, with the ops `needed` in any case."""
        amounts, place = np.unique(amounts, return_inverse=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            dear = np.argsort(np.where(made > 0, self.duration_s / made, np.inf), kind="stable")
        begun = self.detours.weigh.of(needed)
        least = np.where(amounts <= made[self._inside(needed)].sum(), begun, np.inf)
        for deepest in np.flatnonzero(made > 0):
            run = self.needs[deepest] | needed
            inside = self._inside(run)
            others = dear[(~inside & (made > 0) & (self.release_s <= self.release_s[deepest]))[dear]]
            total = made[inside].sum() + np.cumsum(np.append(0.0, made[others]))
            seconds = self.detours.weigh.of(run) + np.cumsum(np.append(0.0, self.duration_s[others]))
            least = np.minimum(least, np.interp(amounts, total, seconds, right=np.inf))
        return np.minimum.accumulate(least[::-1])[::-1][place]

    def _inside(self, ops: int) -> npt.NDArray[np.bool_]:
        """For each op that produces gradients, whether these ops include all that it needs."""
        return np.array([not needs & ~ops for needs in self.needs])
