"""Which tensors cost the most time: what messages cost, shared out among what is in them, and in one sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence

from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.units import format_seconds
from legato.report.summary import own_worker
from legato.report.waits import Wait, waits

__all__ = ["cost_sentence", "costs"]

_MOST_NAMED = 5
#: Of the idle time: named are as many as cost that much of it, or the dearest five.
_ENOUGH = 0.8
#: A message of several tensors is named after the first, with how many more there are; one of a trace, by its kind.
_MESSAGE = re.compile(r" \+ ?\d+$|^(all|broadcast|gather|recv|reduce|scatter|send|unknown)[_a-z]* \d+$")
_WORDS = ("", "This one {}", "These two {}s", "These three {}s", "These four {}s", "These five {}s")


def costs(timeline: Timeline, plans: Sequence[Plan] = ()) -> tuple[list[Wait], bool]:
    """What computation stood idle for, the dearest first, and whether that is tensors (or messages).

    The plan of the timeline's name, if there is one whose messages these are,
    says what is in a message; its cost is shared among its tensors by their bytes.
    """
    every = waits(timeline, own_worker(timeline))
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
    return sorted(found, key=lambda wait: (-wait.seconds, wait.message or "")), True


def _contents(plan: Plan) -> dict[str, dict[str | None, int]]:
    """Tensors and their bytes by the names of messages; messages of the same name are taken together."""
    inside: dict[str, dict[str | None, int]] = {}
    for message in plan.messages:
        first, more = message.slices[0].tensor, len(message.slices) - 1
        content = inside.setdefault(f"{first} +{more}" if more else first, {})
        for piece in message.slices:
            content[piece.tensor] = content.get(piece.tensor, 0) + piece.stop - piece.start
    return inside


def cost_sentence(every: Sequence[Wait], tensors: bool) -> str:
    """`These five tensors cost you 80 ms of 120 ms idle: ...`; "" where computation never stood idle for any."""
    idle_s = sum(wait.seconds for wait in every)
    dear = [wait for wait in every if wait.message is not None]
    if not dear or not idle_s:
        return ""
    named: list[Wait] = []
    while len(named) < min(_MOST_NAMED, len(dear)) and sum(w.seconds for w in named) < _ENOUGH * idle_s:
        named.append(dear[len(named)])
    cost_s = sum(wait.seconds for wait in named)
    who = _WORDS[len(named)].format("tensor" if tensors else "message")
    verb = "costs" if len(named) == 1 else "cost"
    names = ", ".join(wait.message or "" for wait in named)
    return f"{who} {verb} you {format_seconds(cost_s)} of {format_seconds(idle_s)} idle: {names}."
