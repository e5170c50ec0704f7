"""The bound "last": what is computed after a message that the forward pass waits for needs messages of its own.

Where the order of computation is free, the gradients of the first layers can be made
before the others, which then do not delay them. But then the others come later, and so
do their messages, and the forward pass reads those, too.

Take any tensor t with the tail q, and the message that delivers the last of it, which
ends at e. Let s be the start of the last message, up to this one, that aggregates
anything (this one itself, if it is an all-reduce), and tau = T - e.

- Between s and e there is the time of an all-reduce or of two halves: alpha, and the
  work. Let U(s) be the most work that can be done by s, and V(tau) by the messages
  after e (`capacity.py`; the work in all is beta * B). Then

      e - s >= alpha + max(0, beta * B - U(s) - V(tau)).

- All of t is computed by s. Whatever is not computed by s is sent after e, both halves
  of it. So a tensor of n bytes with the tail q' is computed by s as well, unless
  alpha + beta * n + q' <= tau. Let K(tau) be the ops that t and all such tensors need.
- Of the other ops that produce gradients, one that takes d seconds and whose gradients
  take w of work either runs before s, or its w are part of V(tau). U and V grow no
  faster than time. So, from the least tau with the same K on, s + tau is at least tau +
  sum of d(K) + the cost of the cheapest choice: V(tau) of work for nothing, and for the
  rest of each op d or w (`Detours.least_s`).

Together, for the least value over the tau >= q at which K changes,

    T >= alpha + tau + max(detours, d(K) + beta * B - U(d(K)) - V(tau)).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from legato.core.cluster import LinearCost
from legato.schedule.basics.heads_tails import Detours, HeadsTails
from legato.schedule.bound.capacity import capacities

__all__ = ["LastMessage", "last_message"]

#: The number of tensors to try.
_TRIES = 4
#: More than the relative rounding error of thousands of float additions.
_ROUNDING = 1e-9


class LastMessage(NamedTuple):
    """No schedule takes less than `seconds`; the tensor that proves it, the computation before and the time after."""

    seconds: float
    tensor: int
    before_s: float
    after_s: float


def last_message(
    times: HeadsTails,
    nbytes: Sequence[int],
    line: LinearCost,
    all_reduce_only: bool,
    detours: Detours,
    *,
    beat_s: float,
) -> LastMessage | None:
    """The best of these bounds, or None if none found is above `beat_s`."""
    prover = _Prover(times, nbytes, line, all_reduce_only, detours)
    best = None
    for t in sorted(range(len(nbytes)), key=prover.alone_s, reverse=True)[:_TRIES]:
        found = prover(t, beat_s)
        if found is not None:
            best, beat_s = found, found.seconds
    return best


class _Prover:
    """Computes what a tensor proves: the least over all times tau after its arrival at which the ops K change."""

    def __init__(
        self, times: HeadsTails, nbytes: Sequence[int], line: LinearCost, all_reduce_only: bool, detours: Detours
    ) -> None:
        self.times, self.alpha_s, self.detours = times, line.alpha_s, detours
        self.send_s = [line.beta_s_per_byte * n for n in nbytes]
        self.released, self.needed = capacities((times.release_s, times.tail_s), nbytes, line, all_reduce_only)
        self.work_s = sum(self.send_s)
        self.room_s = [line.alpha_s + send + tail for send, tail in zip(self.send_s, times.tail_s, strict=True)]

    def alone_s(self, t: int) -> float:
        return self.times.release_s[t] + self.send_s[t] + self.times.tail_s[t]

    def __call__(self, t: int, beat_s: float) -> LastMessage | None:
        """What tensor t proves, or None if that is not above `beat_s`."""
        least = None
        choices = [(after + self.detours.weigh.of(ops), after, ops) for after, ops in self._choices(t)]
        for computed_s, after, ops in sorted(choices):
            if least is not None and self.alpha_s + computed_s >= least.seconds:
                break
            begin = computed_s - after
            room = self.needed.carried(after) + _ROUNDING * self.work_s
            busy = begin + self.work_s - self.released.carried(begin) - room
            seconds = self.alpha_s + after + max(self.detours.least_s(ops, (), room), busy)
            if seconds <= beat_s:
                return None
            if least is None or seconds < least.seconds:
                least = LastMessage(seconds, t, begin, after)
        return least

    def _choices(self, t: int) -> Iterator[tuple[float, int]]:
        """The least seconds after the arrival of t, each with the ops (as bits) that then run before its message."""
        ops, tail = self.detours.needs[t], self.times.tail_s[t]
        wide = sorted((other for other, room in enumerate(self.room_s) if room > tail), key=self.room_s.__getitem__)
        while wide:
            after = self.room_s[wide[-1]]
            yield after, ops
            while wide and self.room_s[wide[-1]] == after:
                ops |= self.detours.needs[wide.pop()]
        yield tail, ops
