"""Chains of sets of tensors, each inside the next, and the bound "nested".

What is ready last is needed first, so sets lie inside each other, and so do the stretches of time in which they can
be sent, each of a whole number of messages. docs/bounds.md has the proof ("Nested").
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

#: More than any whole number that is a time.
_NEVER = 2**61


def rounding(values: Numbers) -> float:
    """The allowance for rounding errors: whole numbers need none."""
    return ROUNDING if values.dtype.kind == "f" else 0


def halved(values: Numbers) -> Numbers:
    """Return half of these values, which are even if they are whole."""
    return values / 2 if values.dtype.kind == "f" else values // 2


class Relaxation(Protocol):
    """Conditions that every schedule fulfils, and perhaps other things, too."""

    def fits(self, seconds: float) -> bool:
        """Return whether an iteration may take this long; if it may, it may take longer as well."""
        ...


def _longest_too_short(problem: Relaxation, at_least: float, step: float, exact: float) -> float | None:
    """The longest time found in which nothing fits, or None if none above `at_least` is.

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
    """The waits of the sets of a chain, the innermost first.

    `message_s` is what each message pays first, and `once_s` what is paid once. `updates_s`
    has what takes the place of beta * B(t) + q(j) where updates count, without f(j), by i
    and t; `innermost_s` the same for j = 1, and `alone_s`, by t, for one message.
    `both_ends` is how many messages two new ends need.
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
        """Return whether i, j and m can be chosen for every set such that no inequality is violated."""
        return sum(1 for _ in self.messages(seconds)) == len(self.release_s)

    def messages(self, seconds: float) -> Iterator[Numbers]:
        """For each set, the time that its messages pay first at least, by i and j; ends where `seconds` is too short.

        Each table is overwritten by the next one.
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
    """By tensor, the time of all updates that wait for it, or more; its share of those that read it; and U."""

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
    """Chains of nested sets: the first tensors of some order, more and more of them."""

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
        """By tensor, with what a half takes: `half_s` first. Without `updating`, updates do not count."""
        self.work_s: Numbers = 2 * np.asarray(half_work_s)
        self.release_s, self.tail_s = (np.array(times, self.work_s.dtype) for times in (release_s, tail_s))
        self.once_s = half_s if sends == "halves" else 0
        self.message_s = 2 * half_s - self.once_s
        self.both_ends, self.updating = 1 if sends == "pairs" else 2, updating

    def orders(self) -> list[Ints]:
        """By falling release time, and by falling tail."""
        release, tail = -self.release_s, -self.tail_s
        by_release, by_tail = np.lexsort((tail, release)), np.lexsort((release, tail))
        return [by_release] if (by_release == by_tail).all() else [by_release, by_tail]

    def sizes(self, order: Ints, most: int) -> Ints:
        """Return the number of tensors of each set: as many as its r and q allow, evenly chosen by time and bytes."""
        near = np.minimum.accumulate(np.array([self.release_s[order], self.tail_s[order]]), axis=1)
        sizes = np.flatnonzero(np.append((near[:, 1:] < near[:, :-1]).any(axis=0), True)) + 1
        if len(sizes) <= most:
            return sizes
        passed = (near[:, :1] - near[:, sizes - 1]) / np.maximum(near[:, :1], np.finfo(float).tiny)
        work = np.cumsum(self.work_s[order])
        at = passed.sum(axis=0) + work[sizes - 1] / max(work[-1], np.finfo(float).tiny)
        return np.unique(sizes[np.searchsorted(at, np.linspace(at[0], at[-1], most)).clip(max=len(sizes) - 1)])

    def sets(self, order: Ints, sizes: Ints, *, strict: bool = False) -> NestedSets:
        """The sets of these sizes.

        If `strict`, what a set has beyond the one inside it counts as ready with the last
        and needed with the first of it, so that nothing is late where r and q change between.
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
        """The least time, given by tensor, of tensors with this much work: those go first whose work takes least."""
        used = np.flatnonzero(self.work_s)
        order = used[np.argsort(times[used] / self.work_s[used], kind="stable")]
        edges, until = (np.cumsum(np.append(0, values[order])) for values in (self.work_s, times))
        if self.work_s.dtype.kind == "f":
            found: Numbers = np.interp(work, edges, until)
            return found
        # In whole numbers, the part of a tensor counts, rounded down, and quotients that differ by less than the
        # precision of a float may have changed places.
        k = np.searchsorted(edges[1:-1], work, side="right")
        part, time, whole = ((work - edges[k]).clip(0, self.work_s[order][k]), times[order][k], self.work_s[order][k])
        product = part.astype(object) * time.astype(object)  # too large for int64
        least = until[k] + np.asarray(product // whole.astype(object), np.int64)
        found = np.maximum(least - (least >> 48) - 1, 0)
        return found


class OfSets(Argument, frozen=True, forbid_unknown_fields=True):
    """No schedule takes `seconds`: its messages would not fit into the time that these sets leave them.

    The sets are the first `sets[0]`, `sets[1]`, ... of these tensors.
    """

    tensors: tuple[int, ...]
    sets: tuple[int, ...]
    seconds: float

    #: The most sets of a chain, first few, then more; and where the bound is not thorough.
    most: ClassVar[tuple[int, ...]]
    quick: ClassVar[tuple[int, ...]]
    #: The relative size of the first step of the bisection, and its precision.
    precision: ClassVar[tuple[float, float]]

    @classmethod
    @abstractmethod
    def relaxation(cls, problem: Problem, sets: NestedSets) -> Relaxation:
        """Return the conditions that have to hold for these sets."""

    @classmethod
    def chain(cls, problem: Problem) -> Chain:
        """The tensors from which sets are chosen."""
        work = problem.half_work(range(len(problem.workload.tensors)))
        return Chain(problem.release, problem.tail, work, problem.half, sends="pairs")

    @classmethod
    def find(cls, problem: Problem, beat: float) -> Iterator[Proved]:
        """The longest times that are too short for sets by falling release times, and by falling tails."""
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
        """The time that is too short. Raises `InputError` if it may suffice."""
        problem.check_tensors(self.tensors)
        if [*self.sets] != sorted({0, *self.sets})[1:] or self.sets[-1:] != (len(self.tensors),):
            raise InputError(f"certificate: sets {self.sets} (expected rising numbers up to {len(self.tensors)})")
        sets = self.chain(problem).sets(np.array(self.tensors), np.array(self.sets))
        short = problem.whole(problem.number(self.seconds)) if 0 <= self.seconds < math.inf else math.inf
        # Computation and one message with everything take less than _NEVER, which is a power of two.
        if not 0 < short < _NEVER // 4 or self.relaxation(problem, sets).fits(short):
            raise InputError(f"bound: {self.case!r} does not prove that an iteration takes {self.seconds} s")
        return short


class Nested(OfSets, frozen=True, tag="nested"):
    """A set has the messages of the set inside it, and one for each new end of its stretch of time."""

    most, quick = (128,), (32,)
    precision = (1e-3, 1e-7)

    @classmethod
    def relaxation(cls, problem: Problem, sets: NestedSets) -> Relaxation:
        """Return the sets, which are the conditions themselves."""
        return sets

    @classmethod
    def chain(cls, problem: Problem) -> Chain:
        """All tensors; updates count on one stream."""
        work = problem.half_work(range(len(problem.workload.tensors)))
        count = problem.compute == "one" and any(work) and problem.workload.phase_ops("optimizer")
        updating = _Updating.of(problem) if count else None
        return Chain(problem.release, problem.tail, work, problem.half, sends=problem.sends, updating=updating)
