"""Where the time went: what the compute lane waited for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from legato.core.timeline import Span, Timeline, merge_intervals

__all__ = ["Wait", "blame", "idle_gaps", "waits"]

#: How near to a gap's end a message's end must be to have caused it, as a share of the iteration.
_TOLERANCE = {"predicted": 1e-6, "measured": 5e-3}


class Wait(msgspec.Struct, frozen=True):
    """Idle seconds of the compute lane that one message cost, in `gaps` gaps.

    `message` is None for idle time in which no message was in flight.
    """

    message: str | None
    seconds: float
    gaps: int


def idle_gaps(timeline: Timeline, worker: int = 0) -> list[tuple[float, float]]:
    """(start, end) in seconds of every gap in a worker's compute, from 0 to the end of the iteration."""
    computing = merge_intervals(
        (s.start_s, s.end_s) for s in timeline.spans if s.worker == worker and s.kind != "message"
    )
    gaps, at = [], 0.0
    for start, end in [*computing, (timeline.iteration_s, timeline.iteration_s)]:
        if min(start, timeline.iteration_s) > at:
            gaps.append((at, min(start, timeline.iteration_s)))
        at = max(at, end)
    return gaps


def blame(timeline: Timeline, worker: int = 0) -> list[tuple[float, float, dict[str | None, float]]]:
    """Every gap as (start, end, seconds of it by message); None is nobody's.

    A gap belongs to the message whose end coincides with the gap's end (the
    last one to start, if there are several); if none does, every moment of it
    is shared by the messages then in flight.
    """
    messages = [s for s in timeline.spans if s.worker == worker and s.kind == "message"]
    messages.sort(key=lambda span: span.start_s)
    tolerance = _TOLERANCE[timeline.source] * timeline.iteration_s
    blamed: list[tuple[float, float, dict[str | None, float]]] = []
    for start, end in idle_gaps(timeline, worker):
        near = [m for m in messages if m.end_s > start and abs(m.end_s - end) <= tolerance]
        shares: dict[str | None, float] = {near[-1].name: end - start} if near else _shared(start, end, messages)
        blamed.append((start, end, shares))
    return blamed


def waits(timeline: Timeline, worker: int = 0) -> list[Wait]:
    """The idle time of a worker's compute by message, the dearest first; `blame`, added up."""
    cost: dict[str | None, float] = {}
    gaps: dict[str | None, int] = {}
    for _, _, shares in blame(timeline, worker):
        for name, seconds in shares.items():
            cost[name] = cost.get(name, 0.0) + seconds
            gaps[name] = gaps.get(name, 0) + 1
    found = [Wait(name, seconds, gaps[name]) for name, seconds in cost.items()]
    return sorted(found, key=lambda wait: (-wait.seconds, wait.message or ""))


def _shared(start: float, end: float, messages: Sequence[Span]) -> dict[str | None, float]:
    """The gap's seconds, every moment of it shared equally by the messages in flight."""
    over = [m for m in messages if m.start_s < end and m.end_s > start]
    edges = sorted({start, end} | {t for m in over for t in (m.start_s, m.end_s) if start < t < end})
    shares: dict[str | None, float] = {}
    for a, b in itertools.pairwise(edges):
        flying: list[str | None] = [m.name for m in over if m.start_s <= a and m.end_s >= b]
        for name in flying or [None]:
            shares[name] = shares.get(name, 0.0) + (b - a) / max(len(flying), 1)
    return shares
