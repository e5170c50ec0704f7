"""Few messages, where each is dear: compute some gradients, send them, compute the next.

Where a message costs about as much as the computation between two of them, what
goes with what decides everything, the order of computation included. A schedule
is a sequence of halves of all-reduces here, each of whole gradients. It takes as
long as it does to compute what the first halves need, in their order, and to
send all; a half handed out is followed by its tail. Simulated annealing moves
gradients between halves, swaps halves, merges and divides them: some thousand
tries, each a dozen additions.

A first half and the second half of the same gradients after it are an all-reduce.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import msgspec

from legato.core.cluster import Cluster
from legato.core.plan import Kind, Message, Plan
from legato.core.workload import Workload
from legato.schedule.caramel_order import serialized_order, update_order
from legato.schedule.compose import compose, whole
from legato.schedule.heads_tails import Detours
from legato.schedule.orders import times_in_order

__all__ = ["waves"]

#: How many messages to start from.
_STARTS = (2, 4)
#: The lateness that is accepted at first, relative, and how it falls with every try.
_HEAT, _COOLING = 0.01, 0.9985


class _Half(NamedTuple):
    """One half of an all-reduce: of which updates (by their place among all), and what decides when it ends."""

    first: bool
    updates: tuple[int, ...]
    members: int  # the same as bits
    needs: int  # the ops they depend on, as bits
    seconds: float
    tail_s: float


_Halves = list[_Half]


def waves(
    workload: Workload, cluster: Cluster, collective: str, *, enough_s: float, rounds: int, stop_at: float, seed: int
) -> Plan:
    """The best plan found in `rounds` tries from each start, until it takes `enough_s` or it is `stop_at`."""
    problem, rng = _Problem(workload, cluster, collective), random.Random(seed)
    best, least = [], math.inf
    for start in problem.starts():
        found = _annealed(start, problem, rounds, stop_at, rng)
        seconds = problem.seconds(found)
        if seconds < least:
            best, least = found, seconds
        if least <= enough_s or time.perf_counter() > stop_at:
            break
    return problem.plan(best)


def _annealed(halves: _Halves, problem: _Problem, rounds: int, stop_at: float, rng: random.Random) -> _Halves:
    now = least = problem.seconds(halves)
    best, heat = halves, _HEAT * now
    for k in range(rounds):
        if k % 64 == 0 and time.perf_counter() > stop_at:
            break
        heat *= _COOLING
        changed = problem.changed(halves, rng)
        seconds = problem.seconds(changed)
        if seconds <= now or (heat > 0 and rng.random() < math.exp((now - seconds) / heat)):
            halves, now = changed, seconds
            if now < least:
                best, least = halves, now
    return best


class _Problem:
    """What there is to send, by update: a backward op that produces gradients."""

    def __init__(self, workload: Workload, cluster: Cluster, collective: str) -> None:
        self.workload, self.cluster, self.collective = workload, cluster, collective
        self.cost = cluster.cost(collective)
        self.updates = update_order(workload)
        place = {update: k for k, update in enumerate(self.updates)}
        self.tensors: list[list[int]] = [[] for _ in self.updates]
        for t, tensor in enumerate(workload.tensors):
            self.tensors[place[tensor.ready_after]].append(t)
        detours = Detours(workload, 0.0)
        self.weigh = detours.weigh
        _, tail = times_in_order(workload, workload.iteration_order())
        self.needs = [detours.needs[of[0]] for of in self.tensors]
        self.nbytes = [sum(workload.tensors[t].nbytes for t in of) for of in self.tensors]
        self.tail_s = [max(tail[t] for t in of) for of in self.tensors]

    def half(self, first: bool, updates: Sequence[int]) -> _Half:
        members = needs = 0
        for k in updates:
            members |= 1 << k
            needs |= self.needs[k]
        seconds = self.cost.cost(sum(self.nbytes[k] for k in updates)) / 2
        return _Half(first, tuple(updates), members, needs, seconds, max(self.tail_s[k] for k in updates))

    def seconds(self, halves: _Halves) -> float:
        """How late the last half handed out is, its tail included; infinite if one comes before its first half."""
        computed = sent = 0
        now = late = 0.0
        for half in halves:
            if half.first:
                computed |= half.needs
                sent |= half.members
                now = max(now, self.weigh.of(computed)) + half.seconds
            elif half.members & ~sent:
                return math.inf
            else:
                now += half.seconds
                late = max(late, now + half.tail_s)
        return late

    def starts(self) -> Iterator[_Halves]:
        """Messages of about equal size, of what is ready or needed first: all-reduces, or first halves first."""
        everything = range(len(self.updates))
        total = sum(self.nbytes)
        for order in (everything, sorted(everything, key=self.tail_s.__getitem__, reverse=True)):
            before = dict(zip(order, accumulate((self.nbytes[k] for k in order), initial=0), strict=False))
            for count in _STARTS:
                groups = [list(group) for _, group in groupby(order, key=lambda k: count * before[k] // total)]
                first, second = ([self.half(first, group) for group in groups] for first in (True, False))
                yield [half for pair in zip(first, second, strict=True) for half in pair]
                yield first + second[::-1]

    def changed(self, halves: _Halves, rng: random.Random) -> _Halves:
        """Two neighbours swapped, two merged, or some updates of one moved to another or to a new one."""
        halves, k, choice = halves.copy(), rng.randrange(len(halves)), rng.random()
        half = halves[k]
        if choice < 0.25:
            halves[k : k + 2] = halves[k : k + 2][::-1]
            return halves
        same = [j for j, other in enumerate(halves) if other.first == half.first and j != k]
        by = self.tail_s.__getitem__ if rng.random() < 0.5 else None  # else as they become ready
        moving = sorted(half.updates, key=by, reverse=rng.random() < 0.5)
        if choice >= 0.35:
            count = 1 + int(len(moving) * rng.random() ** 3)
            moving, staying = moving[:count], moving[count:]
        else:
            staying = []
        if choice < 0.85:
            if not same:
                return halves
            j = rng.choice(same)
            halves[j] = self.half(half.first, (*halves[j].updates, *moving))
            halves[k : k + 1] = [self.half(half.first, staying)] if staying else []
        elif staying:
            halves[k] = self.half(half.first, staying)
            halves.insert(rng.randint(0, len(halves)), self.half(half.first, moving))
        return halves

    def plan(self, halves: _Halves) -> Plan:
        """These messages, all-reduces where both halves follow one another, and the order of ops that they need."""
        messages: list[Message] = []
        for half in halves:
            tensors = sorted(t for k in half.updates for t in self.tensors[k])
            message = whole(self.workload, tensors, self.collective)
            kind: Kind = "reduce_scatter" if half.first else "all_gather"
            if messages and messages[-1].kind == "reduce_scatter" != kind and messages[-1].slices == message.slices:
                messages[-1] = message
            else:
                messages.append(msgspec.structs.replace(message, kind=kind))
        order = [self.updates[k] for half in halves if half.first for k in sorted(half.updates)]
        plan = compose("legato", messages, self.workload, self.cluster, forward_overlap=True)
        return msgspec.structs.replace(plan, op_order=serialized_order(self.workload, order))
