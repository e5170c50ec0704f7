"""Carrying out a plan: gradients into buffers, buffers over the network, in one fixed order.

[Note: issue order] Ranks that hand the same collectives to the backend in
different orders add the wrong numbers or abort. Here the order cannot differ:
the messages are a list, identical on all ranks (agreed by hash before the
first step); message k is handed over when message k-1 has been, and its own
gradients are there; and at the end of every backward pass the gradients that
did not come are declared absent, so that every message of the list goes out in
every backward pass, on every rank. What happens on one rank alone (which
gradient is ready first, which forward op waits) moves the *time* of a message
and never its place.

[Note: absent gradients] A rank without a gradient sends zeros. Each parameter
has one extra element in its first message, 1 on the ranks that had a gradient
and 0 on the others; only where the sum is 0 was it absent everywhere, and then
`.grad` stays as it was (None), as it does in one process.

[Note: lent gradients] With `gradient_as_bucket_view` a gradient is given up for
its place in the messages as soon as it has been copied there, as in DDP. That
place is the user's `.grad` where one message holds all of it; where a plan cuts
it, there is none until it is put together again.

What a rank is doing, in words; and going on after a training step that failed on some rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from legato.core.errors import RankError
from legato.core.plan import Plan
from legato.pytorch.network.channel import Link
from legato.pytorch.network.watchdog import Watch
from legato.pytorch.runtime import gate
from legato.pytorch.runtime.autograd import Accumulator, Outermost
from legato.pytorch.runtime.buckets import IDLE, PENDING, SENT, Piece, Slot, Wire, lower
from legato.pytorch.runtime.debug import Checks
from legato.pytorch.runtime.tracing import Tracer

__all__ = ["Exchange", "abandon", "standing"]


class Exchange:
    """The gradients of one model on their way through one process group."""

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        group: Any,
        link: Link,
        watch: Watch,
        checks: Checks | None = None,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        self.plan = plan
        self.group = group
        self._link = link
        self.watch = watch
        self._checks = checks
        self._lends = gradient_as_bucket_view
        for i, message in enumerate(plan.messages):
            link.check(message, f"messages[{i}]")
        self.slots, self.wires = lower(plan, parameters, group.size())
        self._as_they_come_in = sorted(self.slots, key=lambda slot: max(wire.index for wire in slot.wires))
        self.by_parameter = {id(slot.parameter): slot for slot in self.slots}
        self.enabled = True  # False under no_sync()
        self.tracer: Tracer | None = None
        self._scale = 1.0 / group.size()
        self.forwards = 0  # passes in training whose gradients will be sent
        self.passes = 0  # backward passes that sent, with the one under way
        self.in_backward = False
        self.outermost = Outermost(lambda: self.enabled, self._backward_ended)
        self.next = 0  # the message whose turn it is
        self._accumulators = [self._watch(slot) for slot in self.slots]

    def _watch(self, slot: Slot) -> Accumulator:
        return Accumulator(slot.parameter, lambda: self._gradient_comes(slot), lambda: self._gradient_ready(slot))

    @property
    def overlaps_forward(self) -> bool:
        """Whether the plan lets updates wait, and every parameter can be gated."""
        return self.plan.forward_overlap and all(slot.plain_class is nn.Parameter for slot in self.slots)

    def close(self) -> None:
        """Bring everything up to date and let go of the parameters."""
        self.settle()
        for accumulator in self._accumulators:
            accumulator.remove()

    def begin_forward(self) -> None:
        """A forward pass starts: gradients that nobody used yet are brought in, for the next ones to add to."""
        if self.in_backward:
            raise RankError(
                "the last backward pass did not finish (an exception in it?); the ranks are out of step: "
                "call abandon() on all of them, or start again from a checkpoint"
            )
        self.outermost.forget()
        for slot in self._as_they_come_in:
            if slot.stage == SENT:
                self.resolve(slot)

    # ---- backward: gradients out -------------------------------------------------

    def _gradient_comes(self, slot: Slot) -> None:
        """A gradient is about to be added to what the parameter has: that has to be up to date, and not on its way."""
        if self.enabled and not self.in_backward:
            self._begin_backward()
        elif self.in_backward and slot.ready:
            raise RankError(
                f"{slot.name}: a second gradient in one backward pass (checkpointing with use_reentrant=True over a "
                "shared parameter?); use use_reentrant=False, or no_sync() around all but the last backward pass"
            )
        elif slot.stage != IDLE:
            self.resolve(slot)

    def _gradient_ready(self, slot: Slot) -> None:
        if self.enabled:
            self._mark_ready(slot)

    def _begin_backward(self) -> None:
        self.settle()
        self.outermost.notice()
        self.in_backward = True
        self.passes += 1
        self.watch.flight.note("backward begins", self.passes)
        self.next = 0
        for slot in self.slots:
            slot.ready = slot.has_grad = False
        for wire in self.wires:
            wire.missing = wire.slots

    def _backward_ended(self) -> None:
        if self.in_backward:
            self._end_backward()

    def _end_backward(self) -> None:
        for slot in self.slots:
            if not slot.ready:
                self._mark_ready(slot)
        self.in_backward = False
        self.watch.flight.note("backward ends", self.passes)
        if self.tracer:
            self.tracer.switch(None)

    def _mark_ready(self, slot: Slot) -> None:
        """Pack a gradient, message by message: each goes out while the rest is packed."""
        grad = slot.parameter.grad
        if grad is not None and grad.layout != torch.strided:
            raise RankError(f"{slot.name}: its gradient is {grad.layout}; only dense gradients can be sent")
        for wire in slot.wires:
            self._wait_for_buffer(wire)
        slot.has_grad, slot.ready, slot.stage = grad is not None, True, SENT
        gate.close(slot, self.resolve)
        for wire in slot.wires:
            self._pack(slot, wire, grad)
            wire.missing -= 1
            self._advance()
        if self._lends and slot.has_grad:
            with gate.unseen():
                slot.parameter.grad = slot.whole

    def _pack(self, slot: Slot, wire: Wire, grad: Tensor | None) -> None:
        with gate.unseen():
            for piece in slot.pieces:
                if piece.wire is not wire:
                    continue
                if grad is None:
                    piece.view.zero_()
                else:
                    torch.mul(piece.of(grad), self._scale, out=piece.view)
                if piece.flag is not None:
                    piece.flag.fill_(float(slot.has_grad))

    def _advance(self) -> None:
        while self.next < len(self.wires) and self.wires[self.next].missing == 0:
            self._issue(self.wires[self.next])
            self.next += 1

    def _issue(self, wire: Wire) -> None:
        self.watch.flight.note("message goes out", self.passes, wire.index, wire.label)
        with gate.unseen():
            if self._checks:
                self._checks.before(wire, self.passes, self.forwards, self.watch)
            wire.work = self._link(wire.buffer, wire.message)
        if self.tracer:
            self.tracer.message(wire.label, wire.buffer.nbytes, wire.work)

    def send_zeros(self, wire: Wire) -> None:
        """Take part in a message with nothing (`legato.pytorch.runtime.reducer`)."""
        self._wait_for_buffer(wire)
        if wire.scattered is None:
            wire.buffer.zero_()
        wire.work = self._link(wire.buffer, wire.message)

    def reset(self) -> None:
        """No backward pass is under way, and no message."""
        for wire in self.wires:
            self._wait(wire)
        self.in_backward = False
        self.outermost.forget()

    # ---- after it: averages in ---------------------------------------------------

    def resolve(self, slot: Slot) -> None:
        """Bring one parameter up to date: its averaged gradient, and the update if `step()` was called.

        When it has to be updated, every other parameter whose gradient has
        arrived by now is updated in the same call of the optimizer, which
        costs less than one call each; where the parameter's own gradient is
        still on its way, they are updated while it is. Inside the backward pass
        a gradient is this rank's own, as hooks of the user's see it under DDP.
        """
        if slot.stage == SENT and self.in_backward:
            if self._lends and slot.has_grad and slot.whole is None:
                raise RankError(
                    f"{slot.name}: its gradient is on its way in {len(slot.pieces)} messages, and cannot be looked at "
                    "before the backward pass has ended; gradient_as_bucket_view=False leaves it in place"
                )
        elif slot.stage == SENT:
            self._deliver(slot)
            gate.open_(slot)
        elif slot.stage == PENDING:
            if not self._arrived(slot) and (others := self._pending_here()):
                self._update(others)
            for wire in slot.wires:
                self._wait(wire)
            self._update(self._pending_here())

    def settle(self) -> None:
        """Bring every parameter up to date."""
        for slot in self._as_they_come_in:
            if slot.stage == SENT:
                self.resolve(slot)
        pending = [slot for slot in self._as_they_come_in if slot.stage == PENDING]
        if pending:
            self._update(pending)

    def drop(self, slot: Slot) -> None:
        """Forget a gradient that was sent and will not be used (`zero_grad()` without a `step()`)."""
        gate.open_(slot)

    def _update(self, slots: list[Slot]) -> None:
        for slot in slots:
            self._deliver(slot)
        by_update: dict[int, list[Slot]] = {}
        for slot in slots:
            by_update.setdefault(id(slot.update), []).append(slot)
        resume = self.tracer.switch("optimizer") if self.tracer else None
        for group in by_update.values():
            update = group[0].update
            assert update is not None
            for slot in group:
                gate.open_(slot)
            update.apply([slot.parameter for slot in group])
        if self.tracer:
            self.tracer.switch(resume)

    def _pending_here(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.stage == PENDING and self._arrived(slot)]

    def _arrived(self, slot: Slot) -> bool:
        return all(wire.work is None or wire.work.is_completed() for wire in slot.wires)

    def _deliver(self, slot: Slot) -> None:
        for wire in slot.wires:
            self._wait(wire)
        with gate.unseen():
            if not slot.has_grad and not any(p.flag is not None and p.flag.item() > 0 for p in slot.pieces):
                return
            unseen = slot.update is not None and slot.update.drops_gradients  # by all but the optimizer
            if slot.whole is not None and (unseen or self._lends):
                slot.parameter.grad = slot.whole
                return
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.empty_like(slot.parameter)
            _unpack(slot.pieces, slot.parameter.grad)

    def _wait_for_buffer(self, wire: Wire) -> None:
        """A message whose gradients were dropped may still be in flight, and so may its second half."""
        self._wait(wire)
        if wire.gathered is not None:
            self._wait(wire.gathered)

    def _wait(self, wire: Wire) -> None:
        work, wire.work = wire.work, None
        if work is None:
            return
        resume = self.tracer.switch(None) if self.tracer else None
        started = time.monotonic()
        try:
            self.watch.wait(work)
        except RuntimeError as error:
            self._link.give_up()
            waited = f"failed after {time.monotonic() - started:.1f} s"
            what = f"message {wire.index} ({wire.label}) of backward pass {self.passes} {waited}"
            raise self.watch.failure(what, error) from error
        self.watch.flight.note("message came in", self.passes, wire.index, wire.label)
        if self.tracer:
            self.tracer.switch(resume)


def _unpack(pieces: Iterable[Piece], grad: Tensor) -> None:
    flat = None if grad.is_contiguous() else grad.contiguous()
    target = grad if flat is None else flat
    for piece in pieces:
        (target if piece.whole else target.view(-1)[piece.start : piece.stop]).copy_(piece.view)
    if flat is not None:
        grad.copy_(flat)


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
