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

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from legato.core.errors import RankError
from legato.core.plan import Plan
from legato.pytorch._private import (
    copy_all,
    memory_uses,
    multiply_all,
    not_compiled,
    outside_transforms,
    without_overrides,
)
from legato.pytorch.network.agreement import gather_numbers
from legato.pytorch.network.channel import Channel
from legato.pytorch.network.watchdog import Watchdog
from legato.pytorch.runtime import gate
from legato.pytorch.runtime.autograd import Accumulator, BackwardScope
from legato.pytorch.runtime.buckets import IDLE, PENDING, SENT, Bucket, BucketSlice, Slot, make_buckets
from legato.pytorch.runtime.debug import DebugChecks
from legato.pytorch.runtime.readers import (
    ModuleCalls,
    Readers,
    gradient_is_held,
    is_gateable,
    parameter_is_held,
    settle_before_fork,
)
from legato.pytorch.runtime.sharding import Shards
from legato.pytorch.runtime.tracing import Tracer
from legato.pytorch.runtime.update import Update, set_to_none, zeroing

__all__ = ["Reducer", "reducer_of"]

#: The reducer of each parameter: a module that is distributed again leaves its former reducer.
_reducers: Any = WeakIdKeyDictionary()

#: Gradients up to this size, in bytes, are packed by one call for many of them.
_SMALL_BYTES = 64 * 2**10
#: A bucket is packed when so many bytes of gradients wait for it, or when it is complete.
_PACK_BYTES = 2**20


class Reducer:
    """Averages the gradients of one model over the ranks of a group, as a plan says.

    A backward pass sends if the reducer is `armed` when it begins, as DDP's is by a forward pass
    (see `legato.pytorch.runtime.attach`). `current(name)` says of a parameter that its update may never wait.
    `optimizers` are those whose steps a sharded plan divides among the ranks.
    With `error_feedback`, what rounding to a wire format takes from gradients and from their
    sum is added to the next ones (Seide et al., Interspeech 2014).
    Raises `PlanError` if the plan is for another model (`buckets.check_plan`).
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        group: Any,
        channel: Channel,
        watchdog: Watchdog,
        *,
        checks: DebugChecks | None = None,
        gradient_as_bucket_view: bool = False,
        readers: Readers | None = None,
        current: Callable[[str], bool] = lambda _: False,
        is_own: Callable[[nn.Module], bool] = lambda _: False,
        read_elsewhere: bool = True,
        optimizers: Sequence[Optimizer] = (),
        error_feedback: bool = False,
    ) -> None:
        self.plan = plan
        self.group = group
        self._channel = channel
        self.watchdog = watchdog
        self._checks = checks
        self._lends = gradient_as_bucket_view and plan.shard == "none"
        number = {id(p): i for i, o in enumerate(optimizers) for g in o.param_groups for p in g["params"]}
        self.slots, self.buckets = make_buckets(plan, parameters, group.size(), lambda p: number.get(id(p), -1))
        self.shards: Shards | None = None
        self._packed: list[Slot] = []  # whose gradients can leave their parameters
        self._outgoing = self.buckets  # those that go out in a backward pass
        if plan.shard != "none":
            whole = self.slots, self.buckets, optimizers, group, self._wait, self._launch, self._gather_numbers
            self.shards = Shards(*whole, gradients=plan.shard == "gradients")
            self._outgoing = self.shards.outgoing
        self._in_arrival_order = sorted(self.slots, key=lambda slot: max(bucket.index for bucket in slot.buckets))
        self.by_parameter = {id(slot.parameter): slot for slot in self.slots}
        self.pending: deque[Slot] = deque()  # in the order in which their gradients arrive
        self._lock = threading.RLock()  # several threads may read parameters
        self.readers = readers or Readers()
        self._read_elsewhere = read_elsewhere  # whether who holds a gradient's memory may read it
        # Whose bytes nothing but torch can reach, and whose reads a gate sees.
        self._gateable = {s for s in self.slots if is_gateable(s.parameter) and not current(s.name)}
        self._module_calls = ModuleCalls(self.settle, is_own)
        self._replaces_functions = False  # while updates wait
        self.tracer: Tracer | None = None
        self._scale = 1.0 / group.size()
        for bucket in self.buckets:
            if error_feedback and bucket.message.wire and bucket.scattered is None:
                bucket.residual = torch.zeros_like(bucket.buffer, dtype=torch.float32)
        self.forwards = 0  # forward passes whose gradients will be sent
        self.passes = 0  # backward passes that sent, including the current one
        self.armed = False  # the next backward pass sends
        self.in_backward = False
        self.backward_scope = BackwardScope(lambda: self.armed, self._backward_ended)
        self.next = 0  # index of the bucket to launch next
        self.closed = False
        for slot in self.slots:
            slot.find_spent()
            _reducers[slot.parameter] = weakref.ref(self)
        self.accumulator_of = {
            s: Accumulator(s.parameter, partial(self._before_accumulation, s), partial(self._gradient_ready, s))
            for s in self.slots
        }
        buffers = {id(bucket.buffer.untyped_storage()): bucket.buffer for bucket in self.buckets}
        self._memory_uses = [(buffer, memory_uses(buffer)) for buffer in buffers.values()]
        settle_before_fork(self)

    def may_wait(self, slot: Slot) -> bool:
        """Whether the parameter's update may wait until it is read: only its gate can read it (see `readers`)."""
        gated = slot.stage == SENT and slot in self._gateable
        return gated and self.readers.may_wait(slot.parameter) and not parameter_is_held(slot.parameter)

    def watch(self) -> AbstractContextManager[None]:
        """Watch who reads parameters in the forward pass inside."""
        return self.readers.watch(self.slots, lambda slot: gate.install(slot, self.resolve, self.zero))

    def close(self) -> None:
        """Bring everything up to date, remove all hooks from the parameters, and free the buckets.

        A gradient that lies in a bucket, and that the user holds, keeps the bucket's memory.
        """
        if self.closed:
            return
        if not self.in_backward:  # else it has failed, and other ranks may not send what is missing
            self.settle()
        self.closed = True
        if self._replaces_functions:
            gate.functions.end()
        for accumulator in self.accumulator_of.values():
            accumulator.remove()
        for slot in self.slots:
            if slot.stage != IDLE:  # its gradient was sharded, and not used
                gate.remove(slot)
            with gate.invisible():
                if slot.parameter.grad is slot.whole is not None and not gradient_is_held(slot.parameter, slot.whole):
                    slot.parameter.grad = slot.whole.clone()
            slot.release()
        for bucket in self.buckets:
            bucket.release()
        self._memory_uses.clear()

    def begin_forward(self) -> None:
        """Prepare for a forward pass: deliver gradients that were not used yet, so that the next ones add to them.

        Raises `RankError` if the last backward pass did not finish.
        """
        if self.in_backward:
            raise RankError(
                "the last backward pass did not finish (an exception in it?), and the ranks may be out of step: "
                "start again from a checkpoint"
            )
        self._module_calls.end()
        self.backward_scope.forget()
        for slot in self._in_arrival_order:
            if slot.stage == SENT and self.shards is None:
                self.resolve(slot)
            elif slot.stage == SENT and slot.buckets[-1].owner < 0:  # no optimizer uses it, and compilers look at it
                gate.remove(slot)

    # ---- backward pass: sending -------------------------------------------------

    def _before_accumulation(self, slot: Slot, gradients: Sequence[Tensor | None] = (), *_: Any) -> None:
        """Prepare for an addition to `.grad`, which must be up to date and not in flight."""
        if slot.offered is not None:
            slot.compare(gradients[0] if gradients else None)
        if self.shards is not None:
            self.shards.check_cleared(slot)
        elif slot.spent is not None:
            with without_overrides():
                slot.check_cleared()
        if slot.early:
            slot.taken = None  # what is not packed yet will be in `.grad`
            return
        if not self.in_backward and self.armed:
            self.begin_backward()
        elif self.in_backward and slot.ready:
            raise RankError(
                f"{slot.name}: a second gradient in one backward pass (checkpointing with use_reentrant=True over a "
                "shared parameter?), where the first passes had one; use use_reentrant=False"
            )
        elif slot.stage == PENDING:
            self._read_stale(slot)
        elif slot.stage != IDLE:
            self.resolve(slot)

    def _read_stale(self, slot: Slot) -> None:
        """Raise `RankError`, on all ranks: a gradient arrives of a parameter whose update still waits."""
        error = RankError(
            f"{slot.name} was read before its last update, by something that legato cannot see; "
            f"keep it from waiting: distribute(..., current=[{slot.name!r}])"
        )
        raise self.watchdog.failure(f"backward pass {self.passes + 1}", error) from error

    def _gradient_ready(self, slot: Slot, *_: Any) -> None:
        if not self.in_backward:
            return
        if self._packed:
            self._spend()
        if slot.early:
            slot.early = False
            if self._lends and not slot.to_pack:
                slot.parameter.grad = slot.whole
            slot.mark_sent()
            gate.install(slot, self.resolve, self.zero)
            if self.shards is not None and not slot.to_pack:
                self._packed.append(slot)
        else:
            self.mark_ready(slot)

    def begin_backward(self) -> None:
        """Begin a backward pass that sends. Raises `RankError` if it was computed from values before an update."""
        for slot in self.pending:
            if slot.stage == PENDING and self.accumulator_of[slot].will_run:
                self._read_stale(slot)
        self.settle()
        if self.shards is not None:
            self.shards.begin_pass()
        self.backward_scope.notice()
        self.in_backward = True
        self.passes += 1
        self.watchdog.passes += 1
        self.watchdog.flight_recorder.note("backward begins", self.passes)
        self.next = 0
        for slot in self.slots:
            slot.ready = slot.has_grad = slot.early = slot.zeroed = False
            slot.taken = None
            slot.to_pack = len(slot.parts)
            if self._lends:
                slot.renew_whole()
        for bucket in self.buckets:
            bucket.missing, bucket.writable = bucket.slots, False
            bucket.arrived, bucket.waiting_bytes = [], 0

    def _backward_ended(self) -> None:
        if not self.in_backward:
            return
        for slot in self.slots:
            if slot.early:
                raise RankError(
                    f"{slot.name}: the gradient that a compiled graph handed out was sent, and none arrived"
                )
            if not slot.ready:
                self.mark_ready(slot)
        self._packed.clear()
        self.in_backward = self.armed = False
        self.watchdog.flight_recorder.note("backward ends", self.passes)
        if self._read_elsewhere:
            self._deliver_held()
        self._module_calls.begin()  # gates may change which kernels others run
        if self.shards is not None:
            self.shards.end_pass()
        if self.tracer:
            self.tracer.switch(None)

    def _deliver_held(self) -> None:
        """Wait for averages that somebody could read without a gate: `.grad` or its memory is held elsewhere."""
        with gate.invisible():
            if self._lends and any(memory_uses(buffer) > uses for buffer, uses in self._memory_uses):
                held = self.slots  # somebody has a view, or a collective made of steps has one while it is in flight
            else:
                kept = [slot for slot in self.slots if slot.has_grad and not slot.is_spent]
                held = [slot for slot in kept if gradient_is_held(slot.parameter, slot.whole)]
        for slot in held:
            self.resolve(slot)
        for slot in self.slots if self.shards is None else ():
            if slot.plain_class is not nn.Parameter and slot.stage == SENT:  # it has no gate
                self.resolve(slot)

    def mark_ready(self, slot: Slot) -> None:
        """Note that a gradient has arrived, or is absent; pack buckets that are complete, and launch what is next."""
        grad = slot.taken if slot.early else slot.parameter.grad
        if grad is not None and grad is slot.spent:
            grad = None
            if self.shards is None:
                slot.check_cleared()
        if grad is not None and grad.layout != torch.strided:
            raise RankError(f"{slot.name}: its gradient is {grad.layout}; only dense gradients can be sent")
        slot.has_grad, slot.ready = grad is not None, True
        if not slot.early:
            slot.mark_sent()
            gate.install(slot, self.resolve, self.zero)
        for bucket in slot.buckets:
            bucket.missing -= 1
            if bucket.index in slot.parts:
                bucket.arrived.append(slot)
                bucket.waiting_bytes += slot.nbytes
                if bucket.missing == 0 or bucket.waiting_bytes > _PACK_BYTES:
                    self._pack(bucket)
            self._advance()

    def _pack(self, bucket: Bucket) -> None:
        """Copy the gradients that have arrived into the bucket, divided by the number of ranks."""
        if not bucket.writable:
            self._wait_for_buffer(bucket)
            if self.shards is not None:
                self.shards.allocate(bucket)
            bucket.writable = True
            if bucket.flags is not None:
                bucket.flags.fill_(1.0)
        arrived, bucket.arrived, bucket.waiting_bytes = bucket.arrived, [], 0
        with gate.invisible():
            small: list[tuple[Tensor, Tensor]] = []  # views of the bucket, and their gradients
            for slot in arrived:
                grad = slot.parameter.grad if slot.taken is None else slot.taken
                for part in slot.parts[bucket.index]:
                    small += self._pack_part(part, grad if slot.has_grad else None)
                slot.to_pack -= 1
                if not slot.to_pack:
                    slot.taken = None
            self._pack_small(bucket, small)
            if self._lends:
                for slot in arrived:
                    if slot.has_grad and not slot.to_pack and not slot.early:
                        slot.parameter.grad = slot.whole
        if self.shards is not None:
            self._packed += [slot for slot in arrived if slot.has_grad and not slot.to_pack]

    def _pack_part(self, part: BucketSlice, grad: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Copy a part of a gradient, unless it is small: such parts are returned, to be copied together."""
        if grad is None:
            part.view.zero_()
            if part.flag is not None:
                part.flag.zero_()
        elif part.bucket.message.wire:
            self._round(part, grad)
        elif part.view.nbytes > _SMALL_BYTES or not part.whole or grad.dtype != part.view.dtype:
            torch.mul(part.of(grad), self._scale, out=part.view)
        else:
            return [(part.view, part.of(grad))]
        return []

    def _pack_small(self, bucket: Bucket, small: list[tuple[Tensor, Tensor]]) -> None:
        if len(small) == 1:
            [(view, grad)] = small
            torch.mul(grad, self._scale, out=view)
        elif small:
            views, grads = map(list, zip(*small, strict=True))
            copy_all(views, grads)
            if bucket.flags is not None and bucket.marks is None and len(views) == len(bucket.slices):
                # Whole tensors, and flags behind them.
                data = bucket.flags.storage_offset() - bucket.buffer.storage_offset()
                bucket.buffer[:data].mul_(self._scale)
            else:
                multiply_all(views, self._scale)

    def _spend(self) -> None:
        """Take gradients that were packed before, which autograd has let go of, unless somebody else has them."""
        packed, self._packed = self._packed, []
        for slot in packed:
            with gate.invisible():
                held = slot.early or gradient_is_held(slot.parameter)
            if not held and self.shards is not None:
                self.shards.spend(slot)

    def _round(self, part: BucketSlice, grad: Tensor) -> None:
        """Pack a gradient in the bucket's format: as torch's hooks do, or with what was rounded off before."""
        residual = part.bucket.residual
        if residual is None:
            part.view.copy_(part.of(grad)).div_(self.group.size())
            return
        at = part.view.storage_offset() - part.bucket.buffer.storage_offset()
        residual = residual.as_strided(part.view.shape, part.view.stride(), int(at))
        residual.add_(part.of(grad), alpha=self._scale)
        part.view.copy_(residual)
        residual.sub_(part.view).nan_to_num_(0.0, 0.0, 0.0)  # an overflow is not made up for

    def _advance(self) -> None:
        """Launch buckets in the plan's order, up to the first one that lacks a gradient."""
        while self.next < len(self._outgoing) and self._outgoing[self.next].missing == 0:
            self._launch(self._outgoing[self.next])
            self.next += 1

    def _launch(self, bucket: Bucket) -> None:
        self.watchdog.flight_recorder.note("message goes out", self.passes, bucket.index, bucket.label)
        with gate.invisible():
            if self._checks:
                self._checks.check(bucket, self.passes, self.forwards, self.watchdog)
            bucket.work = self._channel(bucket.buffer, bucket.message, bucket.residual)
        if self.tracer:
            self.tracer.message(bucket.label, bucket.buffer.nbytes, bucket.work)
        if self.shards is not None:
            self.shards.launched(bucket)

    # ---- afterwards: receiving ---------------------------------------------------

    @not_compiled  # type: ignore[untyped-decorator]
    def resolve(self, slot: Slot) -> None:
        """Bring one parameter up to date: deliver its averaged gradient, and update it if `step()` was called.

        An update also updates every other parameter whose gradient has arrived,
        since one call of the optimizer costs less than one call for each. If
        the parameter's own gradient is still in flight, the others are updated
        first. Inside the backward pass, a gradient that was sent stays this rank's
        own, as user hooks see it under DDP. Several threads may call it.

        Raises `RankError` inside a backward pass if the gradient was released
        and is partitioned (see [Note: lent gradients]), and after it if gradients
        are sharded.
        """
        with self._lock, outside_transforms():
            if slot.stage == SENT and self.in_backward:
                self._read_in_backward(slot)
            elif slot.stage == SENT and self.shards is not None:
                raise RankError(
                    f"{slot.name}: the average of its gradient is sharded, and no rank has all of it: clip with "
                    "clip_grad_norm_() or clip_grad_value_() of legato.attachment(model), scale with "
                    "legato.GradScaler, and clear with zero_grad() of the optimizer or of the model"
                )
            elif slot.stage == SENT:
                self.deliver(slot.buckets[-1].last_of)
            elif slot.stage == PENDING:
                if not self._arrived(slot):
                    self._update(self._take_pending(-1))
                self._update(self._take_pending(slot.buckets[-1].index))

    def _read_in_backward(self, slot: Slot) -> None:
        if slot.has_grad and not slot.to_pack and (slot.is_spent or (self._lends and slot.whole is None)):
            keeps = "gradient_as_bucket_view=False" if self._lends else "a plan without shards"
            raise RankError(
                f"{slot.name}: its gradient is in flight in {len(slot.slices)} messages, and cannot be read before "
                f"the backward pass has ended (use {keeps} to keep it in place)"
            )
        for bucket in slot.buckets:  # what the reader does to it must not be sent
            if slot in bucket.arrived:
                self._pack(bucket)

    def deliver(self, slots: list[Slot]) -> None:
        """Wait for the averages of these gradients."""
        with self._lock:
            sent = [slot for slot in slots if slot.stage == SENT]
            self._deliver(sent)
            for slot in sent:
                gate.remove(slot)

    def settle(self) -> None:
        """Bring every parameter up to date."""
        with self._lock, outside_transforms():
            if self.shards is None:
                self.deliver(self._in_arrival_order)
            self._update(self._take_pending(-1))
            self._update(self._take_pending(len(self.buckets)))
            self._module_calls.end()

    def zero(self, slot: Slot, set_to_none: bool) -> None:
        """Do to a gradient what `zero_grad` does, also if it is in flight or not used yet."""
        if slot.stage == PENDING and slot.update is not None:
            slot.zero_after = zeroing(set_to_none)
            return
        if slot.stage == SENT:
            if set_to_none or self.in_backward or self.shards is not None:
                gate.remove(slot)  # the average is dropped
            else:  # it may lie in a message in flight; and if only another rank had one, it is a zero here, too
                self.resolve(slot)
        if self.shards is not None or slot.spent is not None:
            slot.zero(set_to_none)
        else:
            zeroing(set_to_none)(slot.parameter)

    def expect(self, slots: list[Slot]) -> None:
        """Let the new values of parameters, which other ranks send, arrive when they are read, or now."""
        with gate.invisible():
            later = [slot for slot in slots if self.plan.forward_overlap and self.may_wait(slot)]
        self.postpone(later, None)
        now = [slot for slot in slots if slot.stage != PENDING]
        for slot in now:
            slot.mark_stepped(None)
        self._update(now)

    def postpone(self, slots: list[Slot], update: Update | None) -> None:
        """Let the updates of these parameters, whose gradients were sent, wait until they are read."""
        with self._lock:
            for slot in slots:
                slot.mark_stepped(update)
            if slots:
                self.pending = deque(slot for slot in self._in_arrival_order if slot.stage == PENDING)
                self._module_calls.begin()
                if not self._replaces_functions:
                    self._replaces_functions = True
                    gate.functions.begin()

    def _take_pending(self, last: int) -> list[Slot]:
        """The parameters whose updates wait for bucket `last` or an earlier one, or for none any more."""
        taken = []
        while self.pending and (self.pending[0].buckets[-1].index <= last or self._arrived(self.pending[0])):
            taken.append(self.pending.popleft())
        return [slot for slot in taken if slot.stage == PENDING]

    def _update(self, slots: list[Slot]) -> None:
        if self._replaces_functions and not self.pending:
            self._replaces_functions = False
            gate.functions.end()
        if not slots:
            return
        try:
            if self.shards is None:
                self._deliver(slots)
            else:
                self._wait_for(slots)
        except BaseException:
            self.pending.extendleft(reversed(slots))  # who reads them later has to wait, or to fail, again
            raise
        by_update: dict[int, list[Slot]] = {}
        for slot in slots:
            by_update.setdefault(id(slot.update), []).append(slot)
        resume = self.tracer.switch("optimizer") if self.tracer else None
        for group in by_update.values():
            update = group[0].update
            for slot in group:
                slot.mark_updating()
            with without_overrides():  # their gates stay until they are up to date: other threads may read
                if self.shards is not None:
                    self.shards.receive(group)
                else:
                    assert update is not None
                    update.apply([slot.parameter for slot in group])
                    for slot in group:
                        if slot.zero_after is not None:
                            slot.zero_after(slot.parameter)
            for slot in group:
                gate.remove(slot)
        if self.tracer:
            self.tracer.switch(resume)

    def _arrived(self, slot: Slot) -> bool:
        return all(bucket.has_arrived for bucket in slot.buckets)

    def _deliver(self, slots: list[Slot]) -> None:
        """Wait for averaged gradients, and make them the parameters' `.grad`."""
        self._wait_for(slots)
        grads, views = [], []
        with gate.invisible():
            for slot in slots:
                if not slot.has_grad and not any(p.flag is not None and p.flag.abs().item() > 0 for p in slot.slices):
                    continue
                optimizer_only = slot.update is not None and slot.zero_after is set_to_none
                if slot.whole is not None and (optimizer_only or self._lends):
                    slot.parameter.grad = slot.whole
                    continue
                if slot.parameter.grad is None:
                    slot.parameter.grad = torch.empty_like(slot.parameter)
                grad = slot.parameter.grad
                if len(slot.slices) == 1 and grad.dtype == slot.slices[0].view.dtype:
                    grads.append(grad)
                    views.append(slot.slices[0].view)
                else:
                    slot.unpack_into(grad)
            if grads:
                copy_all(grads, views)

    def _wait_for(self, slots: list[Slot]) -> None:
        for slot in slots:
            for bucket in slot.buckets:
                self._wait(bucket)

    def _wait_for_buffer(self, bucket: Bucket) -> None:
        """Wait until the buffer can be written: dropped gradients, or an all_gather, may still be in flight."""
        self._wait(bucket)
        if bucket.gathered is not None:
            self._wait(bucket.gathered)

    def _wait(self, bucket: Bucket) -> None:
        work = bucket.work
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
        bucket.work = None
        self.watchdog.flight_recorder.note("message came in", self.passes, bucket.index, bucket.label)
        if self.tracer:
            self.tracer.switch(resume)

    def _gather_numbers(self, numbers: Sequence[float], doing: str) -> list[tuple[float, ...]]:
        """The numbers of all ranks; `doing` is what they are for, if a rank fails."""
        try:
            return gather_numbers(numbers, self.group, self.watchdog.wait)
        except RuntimeError as error:
            raise self.watchdog.failure(f"{doing} after backward pass {self.passes}", error) from error

    # ---- failures ----------------------------------------------------------------

    def status(self) -> str:
        """Say what this rank is doing, for the error messages of other ranks."""
        if not self.in_backward:
            return f"is between backward passes, {self.passes} done"
        bucket = self._outgoing[min(self.next, len(self._outgoing) - 1)]
        missing = next((part.slot.name for part in bucket.slices if not part.slot.ready), "")
        where = f"is in backward pass {self.passes}, at message {bucket.index} ({bucket.label})"
        return where + (f", which lacks the gradient of {missing}" if missing else "")


def reducer_of(parameter: nn.Parameter) -> Reducer | None:
    """The reducer that averages the parameter's gradients."""
    return cast("Reducer | None", _reducers.get(parameter, lambda: None)())
