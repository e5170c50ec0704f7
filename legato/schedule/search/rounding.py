"""The choice of messages to send in a wire format: as few bytes as make the iteration as fast as possible.

Idea: a wire format stores a value in two bytes instead of four. A wire format halves the cost of a message, but rounds
its gradients. Most messages are hidden behind computation and need not be faster. So several plans are simulated, with
everything exact and with everything rounded. The fastest one shows how short an iteration can be. Then messages become
exact, as long as the iteration takes at most `TOLERANCE` longer. torch's compression hooks round everything, which is
`all-bf16` and `all-fp16` here.

If a message mixes tensors that must be rounded with tensors that need not be, all of it is rounded. If startup cost
nothing and messages could be interrupted, it would be known which tensors can be exact in an iteration of a given
length (`exact_shares`). `legato` also makes plans that keep these exact tensors and the rounded tensors in separate
messages.

The messages that can be exact together are chosen greedily, in three orders: the first message first, the largest
first, and the last first. A message that makes the iteration too long when it becomes exact is not tried again after
further messages have become exact. Branch and bound found no better choice in any of 18 cells of the zoo and of random
networks; the plan that is returned is simulated in any case. A message that stays rounded may be divided into an exact
and a rounded message. Bisection finds the largest possible exact part.

Both halves of an all-reduce have the same format. If an all-gather and its reduce-scatter have different slices, either
all halves of the plan are exact or all are rounded.

Source: ours. Units: seconds and bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import msgspec
import numpy as np

from legato.core.cluster import Cluster
from legato.core.errors import InputError, unknown_name
from legato.core.plan import ROUNDINGS, Message, Plan, Rounding, Slice, Wire
from legato.core.workload import Workload
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.basics.joined import ALIGNMENT
from legato.schedule.bound.lower_bound import cheapest_line
from legato.schedule.search.budget import Budget
from legato.simulator.collective import iteration_time

__all__ = ["MOST_SHARED", "TOLERANCE", "check_rounding", "exact_shares", "least_rounded", "rounded"]

#: By which fraction an iteration may be longer than the shortest one, to round fewer bytes.
TOLERANCE = 1e-3
#: The most tensors for which `exact_shares` and `least_rounded` are worth their time, which grows with the cube.
MOST_SHARED = 512
#: A message is divided only if at least this fraction of all bytes becomes exact.
_WORTH = 0.01

#: The work to simulate an iteration, for each op, message and slice.
_EVENT_S = 1e-6
#: The size in bytes of an element that can be rounded.
_ELEMENT = 4


def check_rounding(rounding: str, workload: Workload, *, servers: bool = False, shard: str = "none") -> None:
    """Raise `InputError` unless the gradients of the workload can be sent as `rounding` says."""
    if rounding not in ROUNDINGS:
        raise unknown_name("wire", rounding, ROUNDINGS)
    if rounding == "none":
        return
    if servers:
        raise InputError(f"wire: {rounding!r} with parameter servers (expected none)")
    if shard != "none":
        raise InputError(f"wire: {rounding!r} with shard {shard!r} (expected one or the other)")
    for tensor in workload.tensors:
        if tensor.nbytes % _ELEMENT:
            raise InputError(
                f"wire: {rounding!r}, but tensor {tensor.name!r} has {tensor.nbytes} bytes "
                f"(expected float32 elements, of {_ELEMENT} bytes each)"
            )


def rounded(
    plans: Iterable[Plan],
    workload: Workload,
    cluster: Cluster,
    rounding: Rounding,
    budget: Budget,
    *,
    fit: Callable[[Message], Message] | None = None,
    regroup: Callable[[float], Iterable[Plan]] | None = None,
    divide: bool = False,
) -> Plan:
    """Return one of these plans with as few bytes in a wire format as possible.

    The plan's iteration takes at most `TOLERANCE` longer than the fastest of these plans with everything exact or
    everything rounded. If several plans round equally many bytes, the fastest plan is returned, or the first of equally
    fast plans. `fit` chooses a message's collective and depth for the bytes that are sent. `regroup` makes more plans
    to choose from, for the time that an iteration may take. With `divide`, all-reduces may be divided. If a plan
    already has some messages in a wire format, one of the attempts makes its other messages exact first. If `rounding`
    rounds all messages, the fastest plan with everything rounded is returned.
    """
    wire, fit = cast(Wire, rounding.removeprefix("all-")), fit or _as_it_is

    def formats_of(plans: Iterable[Plan]) -> Iterator[_Formats]:
        different = {(plan.messages, plan.op_order, plan.forward_overlap): plan for plan in plans}
        return (_Formats(plan, workload, cluster, wire, fit) for plan in different.values())

    def fastest_of(plans: Iterable[Plan]) -> list[tuple[_Formats, frozenset[int], float]]:
        return [(formats, *formats.fastest(budget)) for formats in formats_of(plans)]

    if rounding != wire:
        every = (formats.plan(frozenset()) for formats in formats_of(plans))
        return min(every, key=lambda plan: iteration_time(workload, plan, cluster))
    starts = fastest_of(plans)
    limit_s = _limit_s(starts)
    if regroup is not None and not any(start == formats.every for formats, start, _ in starts):
        starts += fastest_of(regroup(limit_s))
        limit_s = _limit_s(starts)
    within = [(formats, start) for formats, start, seconds in starts if seconds <= limit_s]
    tried: list[tuple[tuple[float, float], Plan]] = []
    for k, (formats, start) in enumerate(within):
        part = budget.part(1 / (len(within) - k))
        plan = formats.plan(_exact(formats, start, limit_s, part))
        if divide:
            plan = _divided(plan, workload, cluster, limit_s, fit, part)
        tried.append(((plan.rounded, iteration_time(workload, plan, cluster)), plan))
        if not plan.rounded:
            break
    return min(tried, key=lambda entry: entry[0])[1]


def _limit_s(starts: Sequence[tuple[_Formats, frozenset[int], float]]) -> float:
    """Return the time that an iteration may take, which is `TOLERANCE` more than the fastest of these plans takes."""
    return min(seconds for *_, seconds in starts) * (1 + TOLERANCE)


def exact_shares(
    workload: Workload, cluster: Cluster, limit_s: float, order: Callable[[float, float, int], float]
) -> list[float]:
    """Return each tensor's share of exact bytes if as many bytes as possible are exact and startup costs nothing.

    With preemption, all tensors arrive in time for an iteration of `limit_s` if, for all x and y, the tensors with
    release times of at least x and tails of at least y need at most limit_s - x - y (Horn, 1974). The amounts that can
    be exact then form a polymatroid: if one tensor after another becomes exact as far as the time allows, as many bytes
    as possible are exact, whatever the order of the tensors. `order(release_s, tail_s, nbytes)` is a sort key for this
    order.
    """
    times, slope = heads_tails(workload, "one", "captured"), cheapest_line(cluster, workload.nbytes).beta_s_per_byte
    half_s = np.array([tensor.nbytes for tensor in workload.tensors]) * slope / 2
    heads, head = np.unique(times.release_s, return_inverse=True)
    tails, tail = np.unique(times.tail_s, return_inverse=True)
    needed = np.zeros((len(heads), len(tails)))
    np.add.at(needed, (head, tail), half_s)  # with everything rounded
    needed = needed[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1]
    room = limit_s - heads[:, None] - tails - needed
    shares = [0.0] * len(half_s)
    keys = [order(times.release_s[t], times.tail_s[t], tensor.nbytes) for t, tensor in enumerate(workload.tensors)]
    for t in sorted(range(len(shares)), key=keys.__getitem__):
        inside = room[: head[t] + 1, : tail[t] + 1]
        taken = min(half_s[t], max(0.0, inside.min()))
        inside -= taken
        shares[t] = taken / half_s[t] if half_s[t] else 1.0
    return shares


def least_rounded(workload: Workload, cluster: Cluster, seconds: float) -> float:
    """Return the least fraction of the bytes that a plan must round to finish an iteration in this time.

    The bound holds for plans that keep backward and forward ops in the captured order, on one stream. Every message of
    such a plan is sent between the release times and the tails of its tensors, and takes at least the time of its
    bytes.
    """
    shares = exact_shares(workload, cluster, seconds, lambda release_s, tail_s, nbytes: tail_s)
    exact = sum(share * tensor.nbytes for share, tensor in zip(shares, workload.tensors, strict=True))
    return max(0.0, 1 - exact / workload.nbytes)


def _as_it_is(message: Message) -> Message:
    return message


class _Formats:
    """A plan in which each unit (a message, or both halves of an all-reduce) can be exact or rounded."""

    def __init__(
        self, plan: Plan, workload: Workload, cluster: Cluster, wire: Wire, fit: Callable[[Message], Message]
    ) -> None:
        self._plan, self.workload, self.cluster = plan, workload, cluster
        self.units = _units(plan.messages)
        self.nbytes = [
            sum(plan.messages[i].nbytes for i in unit if plan.messages[i].kind != "all_gather") for unit in self.units
        ]
        self.every = frozenset(range(len(self.units)))
        self.meant = [
            u for u, unit in enumerate(self.units) if all(plan.messages[i].wire is None for i in unit)
        ]  # exact in the given plan
        unit_of = {i: u for u, unit in enumerate(self.units) for i in unit}
        self._unit_of = [unit_of[i] for i in range(len(plan.messages))]
        self._exact = [fit(msgspec.structs.replace(message, wire=None)) for message in plan.messages]
        self._rounded = [fit(msgspec.structs.replace(message, wire=wire)) for message in plan.messages]
        self._events = _events(plan, workload)

    def plan(self, exact: frozenset[int]) -> Plan:
        """Return the plan in which these units are exact, and all others rounded."""
        forms = zip(self._exact, self._rounded, self._unit_of, strict=True)
        messages = tuple(as_is if unit in exact else light for as_is, light, unit in forms)
        return self._plan.sending(messages)

    def seconds(self, exact: frozenset[int], budget: Budget) -> float:
        budget.spend(_EVENT_S * self._events)
        return iteration_time(self.workload, self.plan(exact), self.cluster)

    def bytes_of(self, units: Iterable[int]) -> int:
        return sum(self.nbytes[u] for u in units)

    def fastest(self, budget: Budget) -> tuple[frozenset[int], float]:
        """Return the exact units of the fastest choice of formats, and the seconds of an iteration with this choice."""
        nothing: frozenset[int] = frozenset()
        exact, seconds = min(
            ((e, self.seconds(e, budget)) for e in (self.every, nothing)), key=lambda choice: choice[1]
        )
        if exact or not (self.cluster.unpack_s_per_byte or self.cluster.contention):
            return exact, seconds
        for unit in sorted(self.every, key=self.nbytes.__getitem__, reverse=True):
            if budget.spent:
                break
            if (with_unit := self.seconds(exact | {unit}, budget)) <= seconds:
                exact, seconds = exact | {unit}, with_unit
        return exact, seconds


def _events(plan: Plan, workload: Workload) -> int:
    return len(workload.ops) + sum(1 + len(message.slices) for message in plan.messages)


def _units(messages: Sequence[Message]) -> list[tuple[int, ...]]:
    """Return units of messages (indices) that share a format: one all-reduce, or the two halves of an all-reduce.

    If the slices of some reduce-scatter and its all-gather differ, all halves of the plan form one unit.
    """
    halves: dict[frozenset[Slice], list[int]] = {}
    for i, message in enumerate(messages):
        if message.kind != "all_reduce":
            halves.setdefault(frozenset(message.slices), []).append(i)
    paired = list(map(tuple, halves.values()))
    if any(len(pair) != 2 for pair in paired):
        paired = [tuple(i for pair in paired for i in pair)]
    return sorted([*paired, *((i,) for i, message in enumerate(messages) if message.kind == "all_reduce")])


def _exact(formats: _Formats, start: frozenset[int], limit_s: float, budget: Budget) -> frozenset[int]:
    """Return units that can be exact together, including `start`: the set with most bytes that was found."""
    left = sorted(formats.every - start)
    by_size = sorted(left, key=formats.nbytes.__getitem__, reverse=True)
    meant = _greedy(formats, start, [u for u in formats.meant if u not in start], limit_s, budget)
    choices = [_greedy(formats, meant, [u for u in left if u not in meant], limit_s, budget)]
    choices += [_greedy(formats, start, order, limit_s, budget) for order in (left, by_size, left[::-1])]
    return max(choices, key=formats.bytes_of)


def _greedy(
    formats: _Formats, exact: frozenset[int], order: Sequence[int], limit_s: float, budget: Budget
) -> frozenset[int]:
    """Make units exact in this order, one after another, wherever the time allows it, and return the exact units."""
    stack = [order]
    while stack and not budget.spent:
        units = stack.pop()
        more = exact.union(units)
        if formats.seconds(more, budget) <= limit_s:
            exact = more
        elif len(units) > 1:
            stack += [units[len(units) // 2 :], units[: len(units) // 2]]
    return exact


class _Cut(NamedTuple):
    """A cut of message i of a plan: about `nbytes` bytes at its beginning or end become an exact message."""

    i: int
    nbytes: int
    at_end: bool

    def of(self, plan: Plan, fit: Callable[[Message], Message]) -> Plan:
        message = plan.messages[self.i]
        at = message.nbytes - self.nbytes if self.at_end else self.nbytes
        parts = list(_parts(message.slices, at, up=self.at_end))
        wires = (message.wire, None) if self.at_end else (None, message.wire)
        two = [
            fit(msgspec.structs.replace(message, slices=part, wire=wire))
            for part, wire in zip(parts, wires, strict=True)
        ]
        return plan.sending((*plan.messages[: self.i], *two, *plan.messages[self.i + 1 :]))


def _parts(slices: tuple[Slice, ...], at: int, *, up: bool) -> Iterator[tuple[Slice, ...]]:
    """Yield the slices of a message before byte `at`, and then the slices after it.

    The cut is at an offset that the alignment allows: `at` rounded up if `up`, and rounded down otherwise.
    """
    starts = list(accumulate((piece.nbytes for piece in slices), initial=0))
    k = bisect_right(starts, at) - 1
    piece, inside = slices[k], at - starts[k]
    inside = (-(-inside // ALIGNMENT) if up else inside // ALIGNMENT) * ALIGNMENT
    first = [Slice(piece.tensor, piece.start, piece.start + inside)] if 0 < inside < piece.nbytes else []
    second = [Slice(piece.tensor, piece.start + inside, piece.stop)] if 0 < inside < piece.nbytes else []
    if inside >= piece.nbytes:
        first = [piece]
    elif not inside:
        second = [piece]
    yield (*slices[:k], *first)
    yield (*second, *slices[k + 1 :])


def _divided(
    plan: Plan, workload: Workload, cluster: Cluster, limit_s: float, fit: Callable[[Message], Message], budget: Budget
) -> Plan:
    """Divide rounded all-reduces, the largest first, if a part of them can be exact, and return the plan."""
    least = max(ALIGNMENT, int(_WORTH * workload.nbytes))
    slices = [
        message.slices
        for message in sorted(plan.messages, key=lambda message: message.nbytes, reverse=True)
        if message.wire is not None and message.kind == "all_reduce"
    ]

    def allowed(cut: _Cut) -> bool:
        budget.spend(_EVENT_S * _events(plan, workload))
        return iteration_time(workload, cut.of(plan, fit), cluster) <= limit_s

    for own in slices:
        if budget.spent:
            break
        i = next(i for i, message in enumerate(plan.messages) if message.slices == own)
        most = (plan.messages[i].nbytes - 1) // ALIGNMENT
        cuts = [_longest(i, least // ALIGNMENT, most, at_end, allowed) for at_end in (False, True)]
        longest = max(cuts, key=lambda cut: cut.nbytes)
        if longest.nbytes:
            plan = longest.of(plan, fit)
    return plan


def _longest(i: int, least: int, most: int, at_end: bool, allowed: Callable[[_Cut], bool]) -> _Cut:
    """Return the allowed cut with the longest exact part, of `least` to `most` units of ALIGNMENT bytes.

    If no cut is allowed, the result has 0 bytes.
    """
    if least > most or not allowed(_Cut(i, least * ALIGNMENT, at_end)):
        return _Cut(i, 0, at_end)
    while least < most:
        middle = -(-(least + most) // 2)
        if allowed(_Cut(i, middle * ALIGNMENT, at_end)):
            least = middle
        else:
            most = middle - 1
    return _Cut(i, least * ALIGNMENT, at_end)
