"""What a rank is doing, in words; and going on after a training step that failed on some rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from legato.pytorch import gate
from legato.pytorch.lowering import PENDING, SENT

if TYPE_CHECKING:
    from legato.pytorch.exchange import Exchange

__all__ = ["abandon", "standing"]


def standing(exchange: Exchange) -> str:
    """What this rank is doing, for the others' error messages."""
    if not exchange.in_backward:
        return f"is between backward passes, {exchange.passes} done"
    wire = exchange.wires[min(exchange.next, len(exchange.wires) - 1)]
    lacking = next((p.slot.name for p in wire.pieces if not p.slot.ready), "")
    which = f"is in backward pass {exchange.passes}, at message {wire.index} ({wire.label})"
    return which + (f", which lacks the gradient of {lacking}" if lacking else "")


def abandon(exchange: Exchange, furthest: Callable[[int], int]) -> None:
    """Give up the step that failed on some rank: nobody's gradients of it are used, and the ranks are in step again.

    `furthest(n)` gives the largest of all ranks' `n`: whoever has handed over
    fewer messages than that sends zeros for those that are missing.
    """
    for slot in exchange.slots:
        if slot.stage == PENDING:
            exchange.resolve(slot)
    count = len(exchange.wires)
    done = (exchange.passes - exchange.in_backward) * count + exchange.next * exchange.in_backward
    goal = -(-furthest(done) // count) * count
    for i in range(done, goal):
        exchange.send_zeros(exchange.wires[i % count])
    exchange.passes = goal // count
    exchange.reset()
    for slot in exchange.slots:
        if slot.stage == SENT:
            gate.open_(slot)
            slot.parameter.grad = None
