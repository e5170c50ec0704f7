"""The bound "equal pairs": each message is scattered, and gathered unchanged after the backward pass.

docs/bounds.md has the proof ("Equal pairs"), for plans with a sharded optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from legato.core.errors import InputError
from legato.schedule.bound.arguments.nested import NestedSets, OfSets, Relaxation, halved, rounding
from legato.schedule.bound.arguments.sharded import first_gather
from legato.schedule.bound.problem import Problem, Proved

__all__ = ["DividedPairs", "EqualPairs"]

#: The number of intervals of the moment c for which the maximum in the proof is computed.
_INTERVALS = 1024


class EqualPairs(OfSets, frozen=True, tag="equal_pairs"):
    """A proof that an iteration takes longer than some time, if messages are gathered after the backward pass."""

    most = quick = (1024,)
    precision = (1e-3, 1e-5)

    @classmethod
    def find(cls, problem: Problem, beat: float) -> Iterator[Proved]:
        """Find certificates for sharded plans if the worker computes on one stream; otherwise, find none."""
        return super().find(problem, beat) if problem.sharded and problem.compute == "one" else iter(())

    @classmethod
    def relaxation(cls, problem: Problem, sets: NestedSets) -> Relaxation:
        """Return the test for messages that are gathered after the backward pass (`step_last`: after an update)."""
        from_s = first_gather(problem, range(len(problem.workload.tensors)))
        return DividedPairs(sets, problem.half, from_s)

    def proves(self, problem: Problem) -> float:
        """Return a time that is too short for an iteration.

        Raises `InputError` if the proof does not exclude so short an iteration, if nothing is sharded, or if ops run on
        unlimited streams.
        """
        if not problem.sharded or problem.compute != "one":
            raise InputError("certificate: case 'equal_pairs' (expected a shard, and one stream)")
        return super().proves(problem)


class DividedPairs:
    """A test of whether messages, each scattered and later gathered, can send all bytes of `sets` in a given time.

    No gather starts before `from_s`. Each half has a startup time of `half_s`.
    """

    def __init__(self, sets: NestedSets, half_s: float, from_s: float) -> None:
        self.release_s, self.tail_s, self.work_s = sets.release_s, sets.tail_s, halved(sets.work_s)
        self.half_s, self.from_s = half_s, from_s

    def fits(self, seconds: float) -> bool:
        """Return whether the bytes of all sets can be divided among pairs that fit into this time."""
        limit, total = seconds + rounding(self.work_s) * seconds, self.work_s[-1]
        until_s = limit - self.tail_s[-1] - total - self.half_s
        if until_s < self.from_s:
            return False
        edges = np.linspace(self.from_s, until_s, _INTERVALS + 1).astype(total.dtype).clip(self.from_s, until_s)
        edges[0], edges[-1] = self.from_s, until_s
        begin, end = edges[:-1], edges[1:]
        at, work = np.zeros(len(begin), np.int64), np.full(len(begin), -1, total.dtype)
        for pairs in range(1, len(self.work_s) + 1):
            room = np.minimum(end - self.release_s[at], limit - begin - self.tail_s[at])
            work = np.maximum(work, room - pairs * self.half_s)
            work = np.maximum.accumulate(work)  # the maximum may grow later
            if work.max() >= total:
                return True
            before, at = at, np.searchsorted(self.work_s, work, side="right")
            if (at == before).all():
                return False
        return False
