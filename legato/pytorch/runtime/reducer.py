"""The reducer: packs gradients into buckets, and sends the buckets in one fixed order.

[Note: issue order] Ranks that launch the same collectives in different orders
add the wrong numbers or abort. Here the order cannot differ: the messages are a
list, identical on all ranks (compared by hash before the first step); message k
is launched when message k-1 has been launched and its own gradients have
arrived; and at the end of every backward pass the gradients that did not arrive
are declared absent, so every message of the list is sent in every backward pass,
on every rank. What happens on one rank alone (which gradient is ready first,
which forward op waits) changes the *time* of a message, never its place.

[Note: absent gradients] A rank without a gradient sends zeros. Each parameter
has one extra element in its first message: 1 on the ranks that had a gradient
and 0 on the others. Only where the sum is 0 was the gradient absent on all
ranks; then `.grad` stays as it was (None), as it does in one process.

[Note: lent gradients] With `gradient_as_bucket_view` the memory of a gradient is
released as soon as the gradient was copied into its buckets, as in DDP. Its
place in the bucket becomes the user's `.grad` if one view covers all of it.
If the plan partitions it, `.grad` is None until it is assembled again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from legato.core.errors import RankError
from legato.core.plan import Plan
from legato.pytorch._private import not_compiled
from legato.pytorch.network.channel import Channel
from legato.pytorch.network.watchdog import Watchdog
from legato.pytorch.runtime import gate
from legato.pytorch.runtime.autograd import Accumulator, BackwardScope
from legato.pytorch.runtime.buckets import IDLE, PENDING, SENT, Bucket, BucketSlice, Slot, make_buckets
from legato.pytorch.runtime.debug import DebugChecks
from legato.pytorch.runtime.tracing import Tracer

__all__ = ["Reducer"]


class Reducer:
    """Averages the gradients of one model over the ranks of a group, as a plan says.

    Raises `PlanError` if the plan is for another model, or if `channel` cannot
    carry out one of its messages.
    """

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
        self._in_arrival_order = sorted(self.slots, key=lambda slot: max(bucket.index for bucket in slot.buckets))
        self.by_parameter = {id(slot.parameter): slot for slot in self.slots}
        self.enabled = True  # False under no_sync()
        self.tracer: Tracer | None = None
        self._scale = 1.0 / group.size()
        self.forwards = 0  # forward passes whose gradients will be sent
        self.passes = 0  # backward passes that sent, including the current one
        self.in_backward = False
        self.backward_scope = BackwardScope(lambda: self.enabled, self._backward_ended)
        self.next = 0  # index of the bucket to launch next
        self._accumulators = [self._accumulator(slot) for slot in self.slots]

    def _accumulator(self, slot: Slot) -> Accumulator:
        return Accumulator(slot.parameter, lambda: self._before_accumulation(slot), lambda: self._gradient_ready(slot))

    @property
    def overlaps_forward(self) -> bool:
        """Whether the plan defers updates into the forward pass, and every parameter can have a gate."""
        return self.plan.forward_overlap and all(slot.plain_class is nn.Parameter for slot in self.slots)

    def close(self) -> None:
        """Bring everything up to date, and remove all hooks from the parameters."""
        self.settle()
        for accumulator in self._accumulators:
            accumulator.remove()

    def begin_forward(self) -> None:
        """Prepare for a forward pass: deliver gradients that were not used yet, so that the next ones add to them.

        Raises `RankError` if the last backward pass did not finish.
        """
        if self.in_backward:
            raise RankError(
                "the last backward pass did not finish (an exception in it?); the ranks are out of step: "
                "call abandon() on all of them, or start again from a checkpoint"
            )
        self.backward_scope.forget()
        for slot in self._in_arrival_order:
            if slot.stage == SENT:
                self.resolve(slot)

    # ---- backward pass: sending -------------------------------------------------

    def _before_accumulation(self, slot: Slot) -> None:
        """Prepare for an addition to `.grad`, which must be up to date and not in flight."""
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
        if not self.in_backward:
            return
        for slot in self.slots:
            if not slot.ready:
                self._mark_ready(slot)
        self.in_backward = False
        self.watchdog.flight_recorder.note("backward ends", self.passes)
        if self.tracer:
            self.tracer.switch(None)

    def _mark_ready(self, slot: Slot) -> None:
        """Pack a gradient into its buckets, and launch each one that is complete while the others are packed."""
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
            for part in slot.slices:
                if part.bucket is not bucket:
                    continue
                if grad is None:
                    part.view.zero_()
                else:
                    torch.mul(part.of(grad), self._scale, out=part.view)
                if part.flag is not None:
                    part.flag.fill_(float(slot.has_grad))

    def _advance(self) -> None:
        """Launch buckets in the plan's order, up to the first one that lacks a gradient."""
        while self.next < len(self.buckets) and self.buckets[self.next].missing == 0:
            self._launch(self.buckets[self.next])
            self.next += 1

    def _launch(self, bucket: Bucket) -> None:
        self.watchdog.flight_recorder.note("message goes out", self.passes, bucket.index, bucket.label)
        with gate.invisible():
            if self._checks:
                self._checks.check(bucket, self.passes, self.forwards, self.watchdog)
            bucket.work = self._channel(bucket.buffer, bucket.message)
        if self.tracer:
            self.tracer.message(bucket.label, bucket.buffer.nbytes, bucket.work)

    # ---- afterwards: receiving ---------------------------------------------------

    @not_compiled  # type: ignore[untyped-decorator]
    def resolve(self, slot: Slot) -> None:
        """Bring one parameter up to date: deliver its averaged gradient, and update it if `step()` was called.

        An update also updates every other parameter whose gradient has arrived,
        since one call of the optimizer costs less than one call for each. If
        the parameter's own gradient is still in flight, the others are updated
        first. Inside the backward pass, a gradient that was sent stays this rank's
        own, as user hooks see it under DDP.

        Raises `RankError` inside a backward pass if the gradient was released
        and is partitioned (see [Note: lent gradients]).
        """
        if slot.stage == SENT and self.in_backward:
            if self._lends and slot.has_grad and slot.whole is None:
                raise RankError(
                    f"{slot.name}: its gradient is in flight in {len(slot.slices)} messages, and cannot be read before "
                    "the backward pass has ended (use gradient_as_bucket_view=False to keep it in place)"
                )
        elif slot.stage == SENT:
            self._deliver(slot)
            gate.remove(slot)
        elif slot.stage == PENDING:
            if not self._arrived(slot) and (others := self._pending_and_arrived()):
                self._update(others)
            for bucket in slot.buckets:
                self._wait(bucket)
            self._update(self._pending_and_arrived())

    def settle(self) -> None:
        """Bring every parameter up to date."""
        for slot in self._in_arrival_order:
            if slot.stage == SENT:
                self.resolve(slot)
        pending = [slot for slot in self._in_arrival_order if slot.stage == PENDING]
        if pending:
            self._update(pending)

    def drop(self, slot: Slot) -> None:
        """Ignore a gradient that was sent (`zero_grad()` without a `step()`)."""
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

    def _pending_and_arrived(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.stage == PENDING and self._arrived(slot)]

    def _arrived(self, slot: Slot) -> bool:
        return all(bucket.work is None or bucket.work.is_completed() for bucket in slot.buckets)

    def _deliver(self, slot: Slot) -> None:
        """Wait for the averaged gradient, and make it the parameter's `.grad`."""
        for bucket in slot.buckets:
            self._wait(bucket)
        with gate.invisible():
            if not slot.has_grad and not any(part.flag is not None and part.flag.item() > 0 for part in slot.slices):
                return
            optimizer_only = slot.update is not None and slot.update.drops_gradients
            if slot.whole is not None and (optimizer_only or self._lends):
                slot.parameter.grad = slot.whole
                return
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.empty_like(slot.parameter)
            _unpack(slot.slices, slot.parameter.grad)

    def _wait_for_buffer(self, bucket: Bucket) -> None:
        """Wait until the buffer can be written: dropped gradients, or an all_gather, may still be in flight."""
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

    # ---- failures ----------------------------------------------------------------

    def status(self) -> str:
        """Say what this rank is doing, for the error messages of other ranks."""
        if not self.in_backward:
            return f"is between backward passes, {self.passes} done"
        bucket = self.buckets[min(self.next, len(self.buckets) - 1)]
        missing = next((part.slot.name for part in bucket.slices if not part.slot.ready), "")
        where = f"is in backward pass {self.passes}, at message {bucket.index} ({bucket.label})"
        return where + (f", which lacks the gradient of {missing}" if missing else "")

    def abandon(self, furthest: Callable[[int], int]) -> None:
        """Give up a step that failed on some rank: drop its gradients, and bring all ranks to the same message.

        `furthest(n)` returns the largest of all ranks' `n`. A rank that has
        launched fewer messages than another sends zeros for the missing ones.
        """
        for slot in self.slots:
            if slot.stage == PENDING:
                self.resolve(slot)
        count = len(self.buckets)
        done = (self.passes - self.in_backward) * count + self.next * self.in_backward
        goal = -(-furthest(done) // count) * count
        for i in range(done, goal):
            self._send_zeros(self.buckets[i % count])
        self.passes = goal // count
        for bucket in self.buckets:
            self._wait(bucket)
        self.in_backward = False
        self.backward_scope.forget()
        for slot in self.slots:
            if slot.stage == SENT:
                gate.remove(slot)
                slot.parameter.grad = None

    def _send_zeros(self, bucket: Bucket) -> None:
        self._wait_for_buffer(bucket)
        if bucket.scattered is None:
            bucket.buffer.zero_()
        bucket.work = self._channel(bucket.buffer, bucket.message)


def _unpack(slices: Iterable[BucketSlice], grad: Tensor) -> None:
    """Copy the elements of all slices into a gradient, which may have any strides."""
    flat = None if grad.is_contiguous() else grad.contiguous()
    target = grad if flat is None else flat
    for part in slices:
        (target if part.whole else target.view(-1)[part.start : part.stop]).copy_(part.view)
    if flat is not None:
        grad.copy_(flat)
