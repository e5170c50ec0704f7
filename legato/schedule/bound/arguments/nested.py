"""Chains of sets of tensors, each inside the next set, and the bound "nested".

Gradients that are ready last are needed first. So the sets are nested: each is inside the next. Each set has a period
in which it can be sent, and these periods are nested, too. In each period, a whole number of messages is sent.
docs/bounds.md has the proof ("Nested").
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from legato.core.errors import InputError
from legato.schedule.bound.arguments.ends import Capacity, HalvesCapacity
from legato.schedule.bound.plan_kind import Sends
from legato.schedule.bound.problem import ROUNDING, Argument, Problem, Proved

__all__ = ["Chain", "Nested", "NestedSets", "OfSets", "Relaxation", "halved", "rounding"]

#: Floats, or whole numbers: ints that are rounded down.
Numbers = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

#: A whole number that is larger than any time.
_NEVER = 2**61


def rounding(values: Numbers) -> float:
    """Return the relative allowance for rounding errors, which is 0 for whole numbers."""
    return ROUNDING if values.dtype.kind == "f" else 0


def halved(values: Numbers) -> Numbers:
    """Return half of these values; if they are whole numbers, they must be even."""
    return values / 2 if values.dtype.kind == "f" else values // 2


class Relaxation(Protocol):
    """Conditions on an iteration's time that every schedule fulfils; some times that are too short fulfil them, too."""

    def fits(self, seconds: float) -> bool:
        """Return whether an iteration of this length fulfils the conditions; if so, longer iterations do, too."""
        ...


def _longest_too_short(problem: Relaxation, at_least: float, step: float, exact: float) -> float | None:
    """Return the longest time that was found to be too short for an iteration; None if it does not exceed `at_least`.

    `step` is the relative size of the first step, and `exact` the relative precision.
    """
    short, by = at_least, step * at_least
    if problem.fits(short):
        return None
    while not problem.fits(short + by):
        short, by = short + by, 2 * by
    while by > exact * short:
        by /= 2
        if not problem.fits(short + by):
            short += by
    return short if short > at_least else None


class NestedSets(NamedTuple):
    """The terms of the inequalities of "Nested" (docs/bounds.md) for the sets of a chain, the innermost set first.

    Each message takes `message_s` to start, and once in an iteration, `once_s` is added. If updates count, there is a
    second inequality, in which f(j) and `updates_s` (indexed by i and t) replace beta * B(t) + q(j). For j = 1,
    `innermost_s` replaces `updates_s`; for a range with a single message, `alone_s` (indexed by t) does. If a range
    differs at both ends from the range inside it, it has at least `both_ends` messages more than the inner range.
    """

    release_s: Numbers
    tail_s: Numbers
    forward_s: Numbers
    work_s: Numbers
    updates_s: Numbers
    innermost_s: Numbers
    alone_s: Numbers
    message_s: float
    once_s: float
    both_ends: int

    def fits(self, seconds: float) -> bool:
        """Return whether every set has values of i, j and m with which all inequalities of docs/bounds.md hold."""
        return sum(1 for _ in self.messages(seconds)) == len(self.release_s)

    def messages(self, seconds: float) -> Iterator[Numbers]:
        """Yield, for each set, a table (by i and j) of its messages' least startup; stop if `seconds` is too short.

        Each table overwrites the table before it.
        """
        count, limit = len(self.release_s), seconds + rounding(self.work_s) * seconds - self.once_s
        never = math.inf if self.work_s.dtype.kind == "f" else _NEVER
        ends = self.release_s[:, None] + self.tail_s
        updated = self.release_s[:, None] + self.forward_s
        paid = np.full((count, count), never)
        for t in range(count):
            if t == 0:
                paid[0, 0] = self.message_s
            else:
                inside = paid[:t, :t]
                paid[t, :t], paid[:t, t] = inside.min(axis=0) + self.message_s, inside.min(axis=1) + self.message_s
                paid[t, t] = inside.min() + self.both_ends * self.message_s
            now = paid[: t + 1, : t + 1]
            updates = np.repeat(self.updates_s[: t + 1, t, None], t + 1, axis=1)
            updates[:, 0] = self.innermost_s[: t + 1, t]
            updates[0, 0] = min(self.alone_s[t], self.message_s + updates[0, 0])
            after = np.maximum(ends[: t + 1, : t + 1] + self.work_s[t], updated[: t + 1, : t + 1] + updates)
            now[now + after > limit] = never
            if now.min() == never:
                return
            yield now


class _Updating(NamedTuple):
    """The times of optimizer ops for the argument "Nested" of docs/bounds.md.

    The arrays are indexed by tensor. `own` is an upper limit on the time of all updates that wait for the tensor, and
    `share` is the tensor's part of the time of the updates that read it. `released` is U of docs/bounds.md.
    """

    own: Numbers
    share: Numbers
    released: Capacity | HalvesCapacity

    @classmethod
    def of(cls, problem: Problem) -> _Updating:
        workload = problem.workload
        ops, count = workload.ops, len(workload.tensors)
        own, share = np.zeros(count, problem.dtype), np.zeros(count, problem.dtype)
        read: dict[int, list[int]] = {}
        for t, tensor in enumerate(workload.tensors):
            for reader in set(tensor.readers):
                if ops[reader].phase == "optimizer":
                    read.setdefault(reader, []).append(t)
        for op, tensors in read.items():
            total = sum(workload.tensors[t].nbytes for t in tensors)
            for t in tensors:
                own[t] += ops[op].duration_s
                share[t] += problem.divided(ops[op].duration_s * workload.tensors[t].nbytes, total)
        updates = workload.phase_ops("optimizer")
        if any(ops[dep].phase == "optimizer" for op in updates for dep in ops[op].deps):
            own[:] = sum(ops[op].duration_s for op in updates)
        order = sorted(range(count), key=problem.release.__getitem__)
        half, work = problem.half, problem.half_work(order)
        release = [problem.release[t] for t in order]
        if problem.sends == "all_reduces":
            return cls(own, share, Capacity.of(release, [2 * part for part in work], 2 * half))
        return cls(own, share, HalvesCapacity(release, work, half))


class Chain:
    """Chains of nested sets: each set has the first tensors of some order."""

    def __init__(
        self,
        release_s: Sequence[float],
        tail_s: Sequence[float],
        half_work_s: Sequence[float] | Numbers,
        half_s: float,
        *,
        sends: Sends,
        updating: _Updating | None = None,
    ) -> None:
        """`half_s` is the startup time of half an all-reduce. Without `updating`, updates count only in tails."""
        self.work_s: Numbers = 2 * np.asarray(half_work_s)
        self.release_s, self.tail_s = (np.array(times, self.work_s.dtype) for times in (release_s, tail_s))
        self.once_s = half_s if sends == "halves" else 0
        self.message_s = 2 * half_s - self.once_s
        self.both_ends, self.updating = 1 if sends == "pairs" else 2, updating

    def orders(self) -> list[Ints]:
        """Return the tensors by falling release time and by falling tail; if both orders are equal, return only one."""
        release, tail = -self.release_s, -self.tail_s
        by_release, by_tail = np.lexsort((tail, release)), np.lexsort((release, tail))
        return [by_release] if (by_release == by_tail).all() else [by_release, by_tail]

    def sizes(self, order: Ints, most: int) -> Ints:
        """Return the number of tensors of each set; there are at most `most` sets, spread evenly over time and bytes.

        A set has all tensors whose release times and tails are not below the set's least release time and least tail.
        """
        near = np.minimum.accumulate(np.array([self.release_s[order], self.tail_s[order]]), axis=1)
        sizes = np.flatnonzero(np.append((near[:, 1:] < near[:, :-1]).any(axis=0), True)) + 1
        if len(sizes) <= most:
            return sizes
        passed = (near[:, :1] - near[:, sizes - 1]) / np.maximum(near[:, :1], np.finfo(float).tiny)
        work = np.cumsum(self.work_s[order])
        at = passed.sum(axis=0) + work[sizes - 1] / max(work[-1], np.finfo(float).tiny)
        return np.unique(sizes[np.searchsorted(at, np.linspace(at[0], at[-1], most)).clip(max=len(sizes) - 1)])

    def sets(self, order: Ints, sizes: Ints, *, strict: bool = False) -> NestedSets:
        """Return the sets of these sizes.

        If `strict`, only the tensors that a set adds to the next smaller set give its times: when the last of them is
        ready, and when the first of them is needed. A plan made from these sets is late for no tensor.
        """
        last, updating, error = sizes - 1, self.updating, rounding(self.work_s)
        at = np.append(0, sizes[:-1]) if strict else last
        release, tail = (np.minimum.accumulate(times[order])[at] for times in (self.release_s, self.tail_s))
        work, total = np.cumsum(self.work_s[order])[last], self.work_s.sum()
        forward, alone = tail, work
        later = innermost = np.tile(work, (len(work), 1))
        if updating is not None:
            forward = np.minimum.accumulate(np.maximum(self.tail_s - updating.own, 0)[order])[last]
            before = np.array([updating.released.carried(moment) for moment in release.tolist()]) + error * total
            capped = np.minimum(updating.share, self.work_s)
            left, least = total - before[:, None] - work, self.work_s[order[: sizes[0]]].min()
            innermost = later + self._least(capped, left + least - error * least)
            later = later + self._least(capped, left)
            alone = work + np.maximum(self._least(updating.share, work), self._least(capped, total - before[0]))
        paid = self.message_s, self.once_s, self.both_ends
        return NestedSets(release, tail, forward, work, later, innermost, alone, *paid)

    def _least(self, times: Numbers, work: Numbers) -> Numbers:
        """Return the least total of `times` (by tensor) of tensors that together have this much work.

        Tensors with the least time per work have the least total.
        """
        used = np.flatnonzero(self.work_s)
        order = used[np.argsort(times[used] / self.work_s[used], kind="stable")]
        edges, until = (np.cumsum(np.append(0, values[order])) for values in (self.work_s, times))
        if self.work_s.dtype.kind == "f":
            found: Numbers = np.interp(work, edges, until)
            return found
        # In whole numbers, the time of a part of a tensor is rounded down. Two quotients that differ by less than the
        # precision of a float may have been sorted the wrong way round.
        k = np.searchsorted(edges[1:-1], work, side="right")
        part, time, whole = ((work - edges[k]).clip(0, self.work_s[order][k]), times[order][k], self.work_s[order][k])
        product = part.astype(object) * time.astype(object)  # too large for int64
        least = until[k] + np.asarray(product // whole.astype(object), np.int64)
        found = np.maximum(least - (least >> 48) - 1, 0)
        return found


class OfSets(Argument, frozen=True, forbid_unknown_fields=True):
    """A proof that no iteration takes only `seconds`: messages would not fit into the times in which sets can be sent.

    The sets are the first `sets[0]`, `sets[1]`, ... of these tensors.
    """

    tensors: tuple[int, ...]
    sets: tuple[int, ...]
    seconds: float

    #: The most sets of a chain in each try: `most` for a thorough bound, `quick` for any other.
    most: ClassVar[tuple[int, ...]]
    quick: ClassVar[tuple[int, ...]]
    #: The relative size of the first step of the bisection, and its precision.
    precision: ClassVar[tuple[float, float]]

    @classmethod
    @abstractmethod
    def relaxation(cls, problem: Problem, sets: NestedSets) -> Relaxation:
        """Return the conditions that must hold for these sets."""

    @classmethod
    def chain(cls, problem: Problem) -> Chain:
        """Return the tensors from which sets are chosen."""
        work = problem.half_work(range(len(problem.workload.tensors)))
        return Chain(problem.release, problem.tail, work, problem.half, sends="pairs")

    @classmethod
    def find(cls, problem: Problem, beat: float) -> Iterator[Proved]:
        """Find the longest times that are proved too short, for sets by falling release times or by falling tails."""
        chain = cls.chain(problem)
        for most in cls.most if problem.thorough else cls.quick:
            for order in chain.orders():
                sizes = chain.sizes(order, most)
                short = _longest_too_short(cls.relaxation(problem, chain.sets(order, sizes)), beat, *cls.precision)
                if short is not None:
                    beat = short
                    tensors = tuple(order[: sizes[-1]].tolist())
                    yield Proved(short, cls(tensors, tuple(sizes.tolist()), short))

    def proves(self, problem: Problem) -> float:
        """Return a time that is too short for an iteration. Raises `InputError` if an iteration may be that short."""
        problem.check_tensors(self.tensors)
        if [*self.sets] != sorted({0, *self.sets})[1:] or self.sets[-1:] != (len(self.tensors),):
            raise InputError(f"certificate: sets {self.sets} (expected rising numbers up to {len(self.tensors)})")
        sets = self.chain(problem).sets(np.array(self.tensors), np.array(self.sets))
        short = problem.whole(problem.number(self.seconds)) if 0 <= self.seconds < math.inf else math.inf
        # Computation and one message with everything take less than _NEVER / 4.
        if not 0 < short < _NEVER // 4 or self.relaxation(problem, sets).fits(short):
            raise InputError(f"bound: {self.case!r} does not prove that an iteration takes {self.seconds} s")
        return short


class Nested(OfSets, frozen=True, tag="nested"):
    """A proof by counting messages: a set needs more messages than the set inside it if their periods differ."""

    most, quick = (128,), (32,)
    precision = (1e-3, 1e-7)

    @classmethod
    def relaxation(cls, problem: Problem, sets: NestedSets) -> Relaxation:
        """Return the sets: a `NestedSets` also has the conditions."""
        return sets

    @classmethod
    def chain(cls, problem: Problem) -> Chain:
        """Return all tensors, with the time of their updates if ops run on one stream."""
        work = problem.half_work(range(len(problem.workload.tensors)))
        count = problem.compute == "one" and any(work) and problem.workload.phase_ops("optimizer")
        updating = _Updating.of(problem) if count else None
        return Chain(problem.release, problem.tail, work, problem.half, sends=problem.sends, updating=updating)
