"""Options of `legato simulate` and `legato sweep` that say what a fabric does and how it is simulated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from legato.core.errors import unknown_name
from legato.core.units import parse_bytes

__all__ = [
    "Aggregation",
    "Barrier",
    "Distribution",
    "Group",
    "InFlight",
    "Iterations",
    "MessageBytes",
    "Placement",
    "Reduce",
    "Seed",
    "Sharing",
    "fabric_options",
    "sharing_of",
]

Placement = Annotated[str | None, typer.Option(help="Of tensors on servers: round-robin, or equal.")]
Distribution = Annotated[str | None, typer.Option(help="Of parameters: round-robin, or block.")]
Barrier = Annotated[
    bool | None, typer.Option("--barrier/--no-barrier", help="Servers hand out nothing before all is summed.")
]
Aggregation = Annotated[str | None, typer.Option(help="In the switch: store-and-forward, or cut-through.")]
MessageBytes = Annotated[str | None, typer.Option(help="Cut messages into pieces of so much, like 4MiB.")]
InFlight = Annotated[int | None, typer.Option(help="All-reduces at once. (default: all that are ready)")]
Group = Annotated[
    int | None,
    typer.Option(help="Workers a host, in the hierarchical fabric. (default: 8, or what of it divides them)"),
]
Sharing = Annotated[str, typer.Option(help="Of a link: fifo, or fair (max-min, small cases).")]
Iterations = Annotated[int | None, typer.Option(help="To simulate. (default: 1, or 3 until it is steady)")]
Reduce = Annotated[str, typer.Option(help="Time to add up one MiB of gradients, like 50us.")]
Seed = Annotated[int, typer.Option(help="Of the jitter.")]


def fabric_options(
    *,
    placement: str | None,
    distribution: str | None,
    barrier: bool | None,
    aggregation: str | None,
    message_bytes: str | None,
    in_flight: int | None,
    group: int | None,
) -> dict[str, Any]:
    """Those of a fabric's options that were given."""
    given = {
        "placement": placement,
        "distribution": distribution,
        "barrier": barrier,
        "aggregation": aggregation,
        "message_bytes": None if message_bytes is None else parse_bytes(message_bytes),
        "in_flight": in_flight,
        "group": group,
    }
    return {name: value for name, value in given.items() if value is not None}


def sharing_of(text: str) -> Literal["fifo", "fair"]:
    from legato.simulator.flow import SHARING

    for known in SHARING:
        if text == known:
            return known
    raise unknown_name("sharing", text, SHARING)
