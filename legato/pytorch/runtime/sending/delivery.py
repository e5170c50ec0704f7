"""Delivery: brings averaged gradients, and updates that wait for them, to their parameters.

[Note: lent gradients] With `gradient_as_bucket_view`, the memory of a gradient is released as soon as the gradient has
been copied into its buckets, as in DDP. If one view of the buckets covers the whole gradient, this view becomes the
user's `.grad`. If the plan partitions the gradient, `.grad` is None until the gradient is assembled again.

[Note: streams] On an accelerator, legato delivers averages and runs updates on the stream on which DDP and the
optimizer would do so: the stream on which the backward pass or `step()` was called (the home stream). A program that
reads on another stream has already made this stream wait for the home stream, but not for the work that legato adds
later. So the gate makes the other stream wait again at the first read. The first read removes the gate, so later reads
would not wait. Therefore the first read on another stream brings everything up to date, the host waits until this work
is done, and from then on updates are never postponed (`Readers.note_streams`). Until then, gates are installed again
after each forward pass, to notice reads on another stream before the backward pass.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from legato.core.errors import RankError
from legato.core.plan import Plan
from legato.pytorch.device import current_stream
from legato.pytorch.private.dynamo import on_compilation
from legato.pytorch.private.tensors import copy_all, memory_uses, outside_transforms, without_overrides
from legato.pytorch.runtime.sending import packing
from legato.pytorch.runtime.sending.messages import Messages
from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.buckets import IDLE, PENDING, SENT, Bucket, Slot
from legato.pytorch.runtime.waiting.readers import ModuleCalls, Readers, gradient_is_held, parameter_is_held
from legato.pytorch.runtime.waiting.update import Update, set_to_none, zeroing

__all__ = ["Delivery"]


class Delivery:
    """Delivers gradients and updates to one model's parameters, under a plan without shards.

    `lends` says whether `.grad` may be a view of a bucket (see [Note: lent gradients]). A sharded plan uses the
    subclass `Shards` instead.
    """

    #: Whether gradients leave their parameters for good when they are packed.
    takes_gradients = False

    def __init__(
        self,
        plan: Plan,
        slots: Sequence[Slot],
        buckets: Sequence[Bucket],
        messages: Messages,
        readers: Readers,
        lends: bool = False,
    ) -> None:
        self.slots, self.buckets, self.messages, self.readers = slots, buckets, messages, readers
        self.overlaps = plan.forward_overlap
        #: The buckets whose messages go out in a backward pass.
        self.outgoing = buckets
        self.by_parameter = {id(slot.parameter): slot for slot in slots}
        self.pending: deque[Slot] = deque()  # in the order in which their gradients arrive
        self._lends = lends
        self._lock = threading.RLock()  # several threads may read parameters
        self._in_arrival_order = sorted(slots, key=lambda slot: max(bucket.index for bucket in slot.buckets))
        # The parameters whose bytes only torch can reach, and whose reads a gate sees.
        self._gateable = {slot for slot in slots if readers.is_gateable(slot)}
        self._module_calls = ModuleCalls(self.settle, readers.is_own, readers.note_compilation)
        self._replaces_functions = False  # while updates wait
        self._device = slots[0].parameter.device
        self._at_look = None if self._device.type == "cpu" else self._look
        self._home: torch.Stream | None = None  # see [Note: streams]
        self._watched: list[Slot] = []  # parameters that have gates though they are up to date
        self._watch = ExitStack()
        self._received: dict[Any, bool] = {}  # for keys without a gradient on this rank: whether another rank had one
        lent = [memory for slot in slots for memory in slot.keep_apart()] + [b.buffer for b in buckets] if lends else []
        by_storage = {memory.untyped_storage().data_ptr(): memory for memory in lent}
        self._memory_uses = [(memory, memory_uses(memory)) for memory in by_storage.values()]

    def close(self) -> None:
        """Release parameters and buckets.

        If the user holds a gradient that is a view of a bucket, the bucket's memory stays alive.
        """
        self._watch_no_longer()
        if self._replaces_functions:
            gate.functions.end()
        for slot in self.slots:
            if slot.stage != IDLE:  # its gradient was sharded, and was never used
                gate.remove(slot)
            with gate.invisible():
                lent = slot.parameter.grad is slot.whole and not slot.is_apart
                if slot.whole is not None and lent and not gradient_is_held(slot.parameter, slot.whole):
                    slot.parameter.grad = slot.whole.clone()
            slot.release()
        for bucket in self.buckets:
            bucket.release()
        self._memory_uses.clear()

    # ---- forward and backward passes -----------------------------------------------

    def before_forward(self) -> None:
        """Deliver the gradients that nothing has read yet, so that the next pass adds its gradients to them."""
        self._watch_no_longer()
        self._module_calls.end()
        with self._lock, outside_transforms():
            self.deliver(self._in_arrival_order)

    def before_pass(self) -> None:
        """Bring everything up to date, and prepare the parameters for a backward pass that sends gradients."""
        self._watch_no_longer()
        self.settle()
        self._received.clear()
        for slot in self.slots:
            slot.begin_pass(self._lends)

    def check_cleared(self, slot: Slot) -> None:
        """Raise `RankError` if a backward pass is about to add to a gradient that an earlier plan has taken."""
        with without_overrides():
            slot.check_cleared()

    def pack(self, bucket: Bucket) -> None:
        """Divide the gradients that have arrived by the number of ranks, and copy them to the bucket."""
        with gate.invisible():
            if not bucket.writable:
                self._prepare_buffer(bucket)
            packed = packing.pack(bucket, self.messages.group.size())
        self.packed(packed)

    def _prepare_buffer(self, bucket: Bucket) -> None:
        """Wait until the buffer can be written: a message with averages that nothing read may still be in flight."""
        self.messages.wait(bucket)
        if bucket.gathered is not None:
            self.messages.wait(bucket.gathered)
        bucket.writable = True
        if bucket.flags is not None:
            bucket.flags.fill_(1.0)

    def packed(self, slots: Iterable[Slot]) -> None:
        """Record that these gradients have arrived and are packed completely."""
        if self._lends:
            with gate.invisible():
                for slot in slots:
                    grad, whole = slot.parameter.grad, slot.whole
                    slot.parameter.grad = whole
                    if slot.is_apart and grad is not None and whole is not None and grad is not whole:
                        whole.copy_(grad)

    def after_accumulation(self) -> None:
        """Record that autograd has just added a gradient to `.grad`, and holds no earlier gradient any more."""

    def launch(self, bucket: Bucket) -> None:
        """Launch the message of a bucket."""
        self.messages.launch(bucket)

    def after_pass(self) -> None:
        """Wait for averages that code may read without a gate. For all others, a gate waits when they are read."""
        self._come_home()
        if self.readers.read_gradients:
            for slot in self._read_without_gate():
                self.resolve(slot)
        self._module_calls.begin()  # gates may change the kernels that other code runs

    def _read_without_gate(self) -> Sequence[Slot]:
        """Return the parameters that have no gate, or whose `.grad` (or its memory) is also held by another object."""
        with gate.invisible():
            # True if another object has a view of a bucket; a collective made of rounds has one while it is in flight.
            viewed = self._lends and any(memory_uses(buffer) > uses for buffer, uses in self._memory_uses)
            if viewed or not self.readers.gradients_wait:
                return self.slots
            return [
                slot
                for slot in self.slots
                if slot.plain_class is not nn.Parameter
                or (slot.has_grad and gradient_is_held(slot.parameter, slot.whole))
            ]

    def _come_home(self) -> None:
        """Make the current stream the home stream, on which waiting work will run."""
        self._home = current_stream(self._device)

    @contextmanager
    def _at_home(self) -> Iterator[None]:
        """Run waiting work on the home stream (see [Note: streams])."""
        home, reader = self._home, current_stream(self._device)
        if home is None or reader is None or reader == home:
            yield
            return
        with home:
            yield
            if not self.readers.several_streams:
                self.readers.note_streams()
                self.settle()
                home.synchronize()
        reader.wait_stream(home)

    def watch_streams(self) -> None:
        """Install gates that notice reads on other streams until the next pass, although everything is up to date."""
        if self._home is not None and self.overlaps and not self.readers.several_streams:
            self._watched = [slot for slot in self._gateable if slot.stage == IDLE]
            for slot in self._watched:
                self.install_gate(slot)
            self._watch.enter_context(on_compilation(self._watch_no_longer))

    def install_gate(self, slot: Slot) -> None:
        """Install a gate, which brings the parameter up to date when it is read."""
        gate.install(slot, self.resolve, self.zero, self._at_look)

    def _look(self) -> None:
        """Let a reader on another stream wait for all work that was queued on the home stream."""
        if not self.messages.in_backward:
            with self._lock, outside_transforms(), self._at_home():
                pass

    def _watch_no_longer(self) -> None:
        for slot in self._watched:
            if slot.stage == IDLE:
                gate.hide(slot)
        self._watched = []
        self._watch.close()

    # ---- reads -----------------------------------------------------------------------

    def resolve(self, slot: Slot) -> None:
        """Bring one parameter up to date: deliver its averaged gradient, and update it if `step()` was called.

        The same call of the optimizer also updates every other parameter whose gradient has arrived, because one call
        costs less than a call for each parameter. If the parameter's own gradient is still in flight, the other
        parameters are updated first. Inside the backward pass, a gradient that was sent keeps the value of this rank:
        the user's hooks see the same value under DDP. Several threads may call this method.

        Raises `RankError` if gradients are sharded.
        """
        with self._lock, outside_transforms():
            if slot.stage == SENT and self.messages.in_backward:
                self._read_in_backward(slot)
            elif slot.stage == SENT:
                self._read_gradient(slot)
            elif slot.stage == PENDING:
                if not slot.buckets[-1].has_arrived:
                    self._update(self._take_pending(-1))
                self._update(self._take_pending(slot.buckets[-1].index))

    def _read_in_backward(self, slot: Slot) -> None:
        with gate.invisible():
            is_gone = slot.has_grad and not slot.to_pack and slot.is_spent
        if is_gone:
            raise RankError(
                f"{slot.name}: its gradient is in flight in {len(slot.slices)} messages, and cannot be read before "
                "the backward pass has ended (use a plan without shards to keep it in place)"
            )
        self._pack_now(slot)

    def _pack_now(self, slot: Slot) -> None:
        """Pack a gradient, because the program may change it, and its changes must not be sent."""
        for bucket in slot.buckets:
            if slot in bucket.arrived:
                self.pack(bucket)

    def _read_gradient(self, slot: Slot) -> None:
        """Deliver an averaged gradient, and all gradients that become complete with the same message."""
        self.deliver(slot.buckets[-1].last_of)

    def deliver(self, slots: Iterable[Slot]) -> None:
        """Wait for the averages of these gradients; ignore gradients that were not sent or are already delivered."""
        with self._lock:
            if sent := [slot for slot in slots if slot.stage == SENT]:
                with self._at_home():
                    self._arrive(sent)
                for slot in sent:
                    gate.remove(slot)

    def settle(self) -> None:
        """Bring every parameter up to date. Inside a backward pass, sent gradients keep this rank's local values."""
        with self._lock, outside_transforms():
            if not self.messages.in_backward:
                self.deliver(self._in_arrival_order)
            self._update(self._take_pending(-1))
            self._update(self._take_pending(len(self.buckets)))
            self._module_calls.end()

    def zero(self, slot: Slot, set_to_none: bool) -> None:
        """Do to a gradient what `zero_grad` does, even if the gradient is in flight or has not been used yet."""
        if slot.stage == PENDING and slot.update is not None:
            slot.zero_after = zeroing(set_to_none)
            return
        if slot.stage == SENT:
            if self.messages.in_backward:
                self._pack_now(slot)  # as under DDP, the average will become `.grad` nevertheless
            elif set_to_none or self.takes_gradients:
                gate.remove(slot)  # the average is dropped
            else:  # it may lie in a message in flight, and is a zero here too if only another rank had a gradient
                self.resolve(slot)
        if self.takes_gradients or slot.spent is not None:
            slot.zero(set_to_none)
        else:
            with without_overrides():
                zeroing(set_to_none)(slot.parameter)

    # ---- updates -----------------------------------------------------------------------

    def may_wait(self, slot: Slot) -> bool:
        """Return whether the update may wait until the parameter is read, because every read passes its gate."""
        gated = self.overlaps and slot.stage == SENT and slot in self._gateable
        return gated and self.readers.may_wait(slot.parameter) and not parameter_is_held(slot.parameter)

    def postpone(self, slots: Sequence[Slot], update: Update | None) -> None:
        """Postpone the updates of these parameters, whose gradients were sent, until the parameters are read."""
        with self._lock:
            self._come_home()
            for slot in slots:
                slot.mark_stepped(update)
            if slots:
                self.pending = deque(slot for slot in self._in_arrival_order if slot.stage == PENDING)
                self._module_calls.begin()
                if not self._replaces_functions:
                    self._replaces_functions = True
                    gate.functions.begin()

    def _take_pending(self, last: int) -> list[Slot]:
        """Take parameters from the queue, until one needs a bucket after `last` and its gradient has not arrived."""
        taken = []
        while self.pending and ((end := self.pending[0].buckets[-1]).index <= last or end.has_arrived):
            taken.append(self.pending.popleft())
        return [slot for slot in taken if slot.stage == PENDING]

    def _update(self, slots: Sequence[Slot]) -> None:
        if self._replaces_functions and not self.pending:
            self._replaces_functions = False
            gate.functions.end()
        if slots:
            with self._at_home():
                self._update_at_home(slots)

    def _update_at_home(self, slots: Sequence[Slot]) -> None:
        try:
            self._arrive(slots)
        except BaseException:
            self.pending.extendleft(reversed(slots))  # a later reader has to wait, or fail, again
            raise
        by_update: dict[int, list[Slot]] = {}
        for slot in slots:
            by_update.setdefault(id(slot.update), []).append(slot)
        tracer = self.messages.tracer
        resume = tracer.switch("optimizer") if tracer else None
        for group in by_update.values():
            update = group[0].update
            for slot in group:
                slot.mark_updating()
            with without_overrides():  # other threads may read, so gates stay until the parameters are up to date
                self._apply(group)
            for slot in group:
                gate.remove(slot)
            if update is not None:
                update.applied(len(group))
        if tracer:
            tracer.switch(resume)

    def _apply(self, slots: Sequence[Slot]) -> None:
        """Update parameters whose updates belong to the same call of `step()`."""
        update = slots[0].update
        assert update is not None
        update.apply([slot.parameter for slot in slots])
        for slot in slots:
            if slot.zero_after is not None:
                slot.zero_after(slot.parameter)

    def _arrive(self, slots: Iterable[Slot]) -> None:
        """Wait for averaged gradients, one after another; unpack each of them with all that have arrived by then."""
        together: list[Slot] = []
        for slot in slots:
            if together and not slot.buckets[-1].has_arrived:
                self._unpack(together)
                together = []
            self._wait_for([slot])
            together.append(slot)
        self._unpack(together)

    def _unpack(self, slots: Sequence[Slot]) -> None:
        grads, views = [], []
        with gate.invisible():
            self._receive(slots)
            for slot in slots:
                if not slot.has_grad and not self._received.get(slot):
                    continue
                optimizer_only = slot.update is not None and slot.zero_after is set_to_none
                if slot.whole is not None and (optimizer_only or self._lends):
                    slot.parameter.grad = slot.whole
                    if slot.is_apart:
                        slot.unpack_into(slot.whole)
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

    def _receive(self, slots: Iterable[Slot]) -> None:
        """Find out which of the gradients that are missing on this rank exist on another rank.

        On an accelerator, the host has to wait for the answer, so it asks once for all parameters.
        """
        asked = slots if self._device.type == "cpu" else [s for s in self.slots if s.stage in (SENT, PENDING)]
        absent = [slot for slot in asked if not slot.has_grad and slot not in self._received]
        self._wait_for(absent)
        self._ask({slot: piece.flag for slot in absent for piece in slot.slices if piece.flag is not None})

    def _ask(self, flags: Mapping[Any, Tensor]) -> None:
        """Note for each key whether any rank had a gradient; if so, the key's flag, summed over the ranks, is not 0."""
        if flags:
            counts = torch.stack([flag.reshape(()).abs().float() for flag in flags.values()])
            self._received.update(zip(flags, counts.gt(0).tolist(), strict=True))

    def _wait_for(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            for bucket in slot.buckets:
                self.messages.wait(bucket)
