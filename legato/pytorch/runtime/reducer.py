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
from legato.pytorch.network.channel import Channel
from legato.pytorch.network.watchdog import Watchdog
from legato.pytorch.runtime import gate
from legato.pytorch.runtime.autograd import Accumulator, BackwardScope
from legato.pytorch.runtime.buckets import IDLE, PENDING, SENT, Bucket, BucketSlice, Slot, make_buckets
from legato.pytorch.runtime.debug import DebugChecks
from legato.pytorch.runtime.tracing import Tracer

__all__ = ["Reducer", "abandon", "standing"]


class Reducer:
    """The gradients of one model on their way through one process group."""

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        group: Any,
        channel: Channel,
        watchdog: Watchdog,
        checks: DebugChecks | None = None,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        self.plan = plan
        self.group = group
        self._channel = channel
        self.watchdog = watchdog
        self._checks = checks
        self._lends = gradient_as_bucket_view
        for i, message in enumerate(plan.messages):
            channel.check(message, f"messages[{i}]")
        self.slots, self.buckets = make_buckets(plan, parameters, group.size())
        self._as_they_come_in = sorted(self.slots, key=lambda slot: max(bucket.index for bucket in slot.buckets))
        self.by_parameter = {id(slot.parameter): slot for slot in self.slots}
        self.enabled = True  # False under no_sync()
        self.tracer: Tracer | None = None
        self._scale = 1.0 / group.size()
        self.forwards = 0  # passes in training whose gradients will be sent
        self.passes = 0  # backward passes that sent, with the one under way
        self.in_backward = False
        self.backward_scope = BackwardScope(lambda: self.enabled, self._backward_ended)
        self.next = 0  # the message whose turn it is
        self._accumulators = [self._watch_slot(slot) for slot in self.slots]

    def _watch_slot(self, slot: Slot) -> Accumulator:
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
        self.backward_scope.forget()
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
        self.backward_scope.notice()
        self.in_backward = True
        self.passes += 1
        self.watchdog.flight_recorder.note("backward begins", self.passes)
        self.next = 0
        for slot in self.slots:
            slot.ready = slot.has_grad = False
        for bucket in self.buckets:
            bucket.missing = bucket.slots

    def _backward_ended(self) -> None:
        if self.in_backward:
            self._end_backward()

    def _end_backward(self) -> None:
        for slot in self.slots:
            if not slot.ready:
                self._mark_ready(slot)
        self.in_backward = False
        self.watchdog.flight_recorder.note("backward ends", self.passes)
        if self.tracer:
            self.tracer.switch(None)

    def _mark_ready(self, slot: Slot) -> None:
        """Pack a gradient, message by message: each goes out while the rest is packed."""
        grad = slot.parameter.grad
        if grad is not None and grad.layout != torch.strided:
            raise RankError(f"{slot.name}: its gradient is {grad.layout}; only dense gradients can be sent")
        for bucket in slot.buckets:
            self._wait_for_buffer(bucket)
        slot.has_grad, slot.ready = grad is not None, True
        slot.mark_sent()
        gate.install(slot, self.resolve)
        for bucket in slot.buckets:
            self._pack(slot, bucket, grad)
            bucket.missing -= 1
            self._advance()
        if self._lends and slot.has_grad:
            with gate.invisible():
                slot.parameter.grad = slot.whole

    def _pack(self, slot: Slot, bucket: Bucket, grad: Tensor | None) -> None:
        with gate.invisible():
            for piece in slot.slices:
                if piece.bucket is not bucket:
                    continue
                if grad is None:
                    piece.view.zero_()
                else:
                    torch.mul(piece.of(grad), self._scale, out=piece.view)
                if piece.flag is not None:
                    piece.flag.fill_(float(slot.has_grad))

    def _advance(self) -> None:
        while self.next < len(self.buckets) and self.buckets[self.next].missing == 0:
            self._issue(self.buckets[self.next])
            self.next += 1

    def _issue(self, bucket: Bucket) -> None:
        self.watchdog.flight_recorder.note("message goes out", self.passes, bucket.index, bucket.label)
        with gate.invisible():
            if self._checks:
                self._checks.check(bucket, self.passes, self.forwards, self.watchdog)
            bucket.work = self._channel(bucket.buffer, bucket.message)
        if self.tracer:
            self.tracer.message(bucket.label, bucket.buffer.nbytes, bucket.work)

    def send_zeros(self, bucket: Bucket) -> None:
        """Take part in a message with nothing (`legato.pytorch.runtime.reducer`)."""
        self._wait_for_buffer(bucket)
        if bucket.scattered is None:
            bucket.buffer.zero_()
        bucket.work = self._channel(bucket.buffer, bucket.message)

    def reset(self) -> None:
        """No backward pass is under way, and no message."""
        for bucket in self.buckets:
            self._wait(bucket)
        self.in_backward = False
        self.backward_scope.forget()

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
                    f"{slot.name}: its gradient is on its way in {len(slot.slices)} messages, and cannot be looked at "
                    "before the backward pass has ended; gradient_as_bucket_view=False leaves it in place"
                )
        elif slot.stage == SENT:
            self._deliver(slot)
            gate.remove(slot)
        elif slot.stage == PENDING:
            if not self._arrived(slot) and (others := self._pending_here()):
                self._update(others)
            for bucket in slot.buckets:
                self._wait(bucket)
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
        gate.remove(slot)

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
                gate.remove(slot)
            update.apply([slot.parameter for slot in group])
        if self.tracer:
            self.tracer.switch(resume)

    def _pending_here(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.stage == PENDING and self._arrived(slot)]

    def _arrived(self, slot: Slot) -> bool:
        return all(bucket.work is None or bucket.work.is_completed() for bucket in slot.buckets)

    def _deliver(self, slot: Slot) -> None:
        for bucket in slot.buckets:
            self._wait(bucket)
        with gate.invisible():
            if not slot.has_grad and not any(p.flag is not None and p.flag.item() > 0 for p in slot.slices):
                return
            unseen = slot.update is not None and slot.update.drops_gradients  # by all but the optimizer
            if slot.whole is not None and (unseen or self._lends):
                slot.parameter.grad = slot.whole
                return
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.empty_like(slot.parameter)
            _unpack(slot.slices, slot.parameter.grad)

    def _wait_for_buffer(self, bucket: Bucket) -> None:
        """A message whose gradients were dropped may still be in flight, and so may its second half."""
        self._wait(bucket)
        if bucket.gathered is not None:
            self._wait(bucket.gathered)

    def _wait(self, bucket: Bucket) -> None:
        work, bucket.work = bucket.work, None
        if work is None:
            return
        resume = self.tracer.switch(None) if self.tracer else None
        started = time.monotonic()
        try:
            self.watchdog.wait(work)
        except RuntimeError as error:
            self._channel.give_up()
            waited = f"failed after {time.monotonic() - started:.1f} s"
            what = f"message {bucket.index} ({bucket.label}) of backward pass {self.passes} {waited}"
            raise self.watchdog.failure(what, error) from error
        self.watchdog.flight_recorder.note("message came in", self.passes, bucket.index, bucket.label)
        if self.tracer:
            self.tracer.switch(resume)


def _unpack(slices: Iterable[BucketSlice], grad: Tensor) -> None:
    flat = None if grad.is_contiguous() else grad.contiguous()
    target = grad if flat is None else flat
    for piece in slices:
        (target if piece.whole else target.view(-1)[piece.start : piece.stop]).copy_(piece.view)
    if flat is not None:
        grad.copy_(flat)


def standing(reducer: Reducer) -> str:
    """What this rank is doing, for the others' error messages."""
    if not reducer.in_backward:
        return f"is between backward passes, {reducer.passes} done"
    bucket = reducer.buckets[min(reducer.next, len(reducer.buckets) - 1)]
    lacking = next((p.slot.name for p in bucket.slices if not p.slot.ready), "")
    which = f"is in backward pass {reducer.passes}, at message {bucket.index} ({bucket.label})"
    return which + (f", which lacks the gradient of {lacking}" if lacking else "")


def abandon(reducer: Reducer, furthest: Callable[[int], int]) -> None:
    """Give up the step that failed on some rank: nobody's gradients of it are used, and the ranks are in step again.

    `furthest(n)` gives the largest of all ranks' `n`: whoever has handed over
    fewer messages than that sends zeros for those that are missing.
    """
    for slot in reducer.slots:
        if slot.stage == PENDING:
            reducer.resolve(slot)
    count = len(reducer.buckets)
    done = (reducer.passes - reducer.in_backward) * count + reducer.next * reducer.in_backward
    goal = -(-furthest(done) // count) * count
    for i in range(done, goal):
        reducer.send_zeros(reducer.buckets[i % count])
    reducer.passes = goal // count
    reducer.reset()
    for slot in reducer.slots:
        if slot.stage == SENT:
            gate.remove(slot)
            slot.parameter.grad = None
