"""Idle time: what computation waits for, how much each message and tensor costs, and a sentence that summarizes it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import msgspec

from legato.core.intervals import Intervals
from legato.core.plan import Plan
from legato.core.timeline import Span, Timeline
from legato.core.units import format_seconds

__all__ = ["Wait", "drawn_worker", "idle_causes", "idle_costs", "idle_gaps", "idle_sentence", "waits"]

#: A smaller share of an iteration is a rounding error.
_ROUNDING = 1e-9
#: A message counts as the cause of a gap if both end at the same time, within this share of an iteration.
_TOLERANCE = {"predicted": 1e-6, "measured": 5e-3}
#: The sentence names the most expensive tensors, at most five, up to this share of the idle time together.
_ENOUGH = 0.8
_MOST_NAMED = 5
_SUBJECTS = ("", "this {}", "these two {}s", "these three {}s", "these four {}s", "these five {}s")
#: A message of several tensors is named like "first +2"; a message in a trace is named by its kind and number.
_MESSAGE = re.compile(r" \+ ?\d+$|^(all|broadcast|gather|recv|reduce|scatter|send|unknown)[_a-z]* \d+$")


class Wait(msgspec.Struct, frozen=True):
    """The time that computation waited, in `gaps` gaps, for one message or for one tensor of a message.

    `message` is None for idle time during which no message was in flight.
    """

    message: str | None
    seconds: float
    gaps: int


def drawn_worker(timeline: Timeline) -> int:
    """Return the worker that the page shows, which has the lowest number."""
    return min((s.worker for s in timeline.spans), default=0)


def idle_gaps(timeline: Timeline, worker: int = 0) -> list[tuple[float, float]]:
    """Return (start, end) in seconds of every gap in a worker's computation, from 0 to the end of the iteration."""
    spans = ((s.start_s, s.end_s) for s in timeline.spans if s.worker == worker and s.kind != "message")
    gaps, at = [], 0.0
    for start, end in [*Intervals(spans).parts, (timeline.iteration_s, timeline.iteration_s)]:
        if min(start, timeline.iteration_s) > at + _ROUNDING * timeline.iteration_s:
            gaps.append((at, min(start, timeline.iteration_s)))
        at = max(at, end)
    return gaps


def idle_causes(timeline: Timeline, worker: int = 0) -> list[tuple[float, float, dict[str | None, float]]]:
    """Return (start, end, seconds by message) of every gap; the key None has the seconds without a message in flight.

    If a message ends when the gap ends, this message is the cause of all time in the gap during which any message is in
    flight. (If several messages end then, the cause is the one that started last.) Otherwise, each moment is divided
    equally among the messages in flight. The rest of a gap is not communication: in a measured timeline, the host was
    late with the next op.
    """
    messages = [s for s in timeline.spans if s.worker == worker and s.kind == "message"]
    messages.sort(key=lambda span: span.start_s)
    tolerance = _TOLERANCE[timeline.source] * timeline.iteration_s
    causes: list[tuple[float, float, dict[str | None, float]]] = []
    for start, end in idle_gaps(timeline, worker):
        near = [m for m in messages if m.end_s > start and abs(m.end_s - end) <= tolerance]
        shares: dict[str | None, float] = _divided(start, end, messages)
        if near:
            free_s = shares.get(None, 0.0)
            shares = {near[-1].name: end - start}
            if free_s > tolerance:
                shares = {near[-1].name: end - start - free_s, None: free_s}
        causes.append((start, end, shares))
    return causes


def _divided(start: float, end: float, messages: Sequence[Span]) -> dict[str | None, float]:
    """Return the seconds of the gap by message, with each moment divided equally among the messages in flight."""
    over = [m for m in messages if m.start_s < end and m.end_s > start]
    edges = sorted({start, end} | {t for m in over for t in (m.start_s, m.end_s) if start < t < end})
    shares: dict[str | None, float] = {}
    for a, b in itertools.pairwise(edges):
        flying: list[str | None] = [m.name for m in over if m.start_s <= a and m.end_s >= b]
        for name in flying or [None]:
            shares[name] = shares.get(name, 0.0) + (b - a) / max(len(flying), 1)
    return shares


def waits(timeline: Timeline, worker: int = 0) -> list[Wait]:
    """Return the sums of `idle_causes` by message, the largest first."""
    cost: dict[str | None, float] = {}
    gaps: dict[str | None, int] = {}
    for _, _, shares in idle_causes(timeline, worker):
        for name, seconds in shares.items():
            cost[name] = cost.get(name, 0.0) + seconds
            gaps[name] = gaps.get(name, 0) + 1
    return _largest_first([Wait(name, seconds, gaps[name]) for name, seconds in cost.items()])


def _largest_first(found: list[Wait]) -> list[Wait]:
    return sorted(found, key=lambda wait: (-wait.seconds, wait.message or ""))


def idle_costs(timeline: Timeline, plans: Sequence[Plan] = ()) -> tuple[list[Wait], bool]:
    """Return the waits of the drawn worker, longest first, and whether each wait names a tensor instead of a message.

    If a plan has the timeline's name and messages, the cost of each message is divided among its tensors in proportion
    to their bytes.
    """
    every = waits(timeline, drawn_worker(timeline))
    plan = next((plan for plan in plans if plan.scheduler == timeline.name), None)
    inside = {} if plan is None else _contents(plan)
    names = {wait.message for wait in every if wait.message is not None}
    if not names <= inside.keys():
        return every, not any(_MESSAGE.search(name) for name in names)
    shares: dict[str | None, list[tuple[float, int]]] = {}
    for wait in every:
        content = {None: 1} if wait.message is None else inside[wait.message]
        for tensor, nbytes in content.items():
            shares.setdefault(tensor, []).append((wait.seconds * nbytes / sum(content.values()), wait.gaps))
    found = [Wait(tensor, sum(s for s, _ in parts), sum(g for _, g in parts)) for tensor, parts in shares.items()]
    return _largest_first(found), True


def _contents(plan: Plan) -> dict[str, dict[str | None, int]]:
    """Return the bytes of each tensor in each message, by message name; messages with the same name are added up."""
    inside: dict[str, dict[str | None, int]] = {}
    for message in plan.messages:
        first, more = message.slices[0].tensor, len(message.slices) - 1
        content = inside.setdefault(f"{first} +{more}" if more else first, {})
        for piece in message.slices:
            content[piece.tensor] = content.get(piece.tensor, 0) + piece.stop - piece.start
    return inside


def idle_sentence(every: Sequence[Wait], tensors: bool) -> str:
    """Return a sentence such as `Waiting for this tensor takes 80 ms of 120 ms of idle time: a.`; "" without waits."""
    idle_s = sum(wait.seconds for wait in every)
    largest = [wait for wait in every if wait.message is not None]
    free_s = sum(wait.seconds for wait in every if wait.message is None)
    if not idle_s:
        return ""
    if free_s > idle_s / 2:
        return (
            f"No message is in flight during {format_seconds(free_s)} of {format_seconds(idle_s)} of idle time: "
            "computation waits for its host or for other workers, which no plan of messages changes."
        )
    named: list[Wait] = []
    while len(named) < min(_MOST_NAMED, len(largest)) and sum(w.seconds for w in named) < _ENOUGH * idle_s:
        named.append(largest[len(named)])
    cost_s = sum(wait.seconds for wait in named)
    subject = _SUBJECTS[len(named)].format("tensor" if tensors else "message")
    names = ", ".join(wait.message or "" for wait in named)
    return f"Waiting for {subject} takes {format_seconds(cost_s)} of {format_seconds(idle_s)} of idle time: {names}."
