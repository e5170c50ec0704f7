"""Sharded optimizers: each rank updates only its own chunk of every message, and sends the new values (ZeRO).

docs/sharding.md has the papers, and what users see.

[Note: shards] A reduce_scatter leaves a rank with the averaged gradients of one chunk of the buffer. The parts of
parameters in this chunk are the rank's *shards*. `optimizer.step()` waits for the reduce_scatters in the plan's order.
While it waits, it updates the shards whose gradients have arrived, and writes the new values into the chunk. The
updates use the user's own optimizer, on flat parameters that share the model's memory. Then the all_gathers are
launched, in the plan's order. A parameter waits for its all_gather when it is read.

[Note: what a rank must not do alone] The reduce_scatters before the first all_gather are launched in the backward pass.
All messages from the first all_gather on are launched, in the plan's order, when `step()` of an optimizer is called;
optimizers do not share buckets. Clipping launches all reduce_scatters first. If a program does not call `step()`, the
all_gathers are launched before the next backward pass, with the old values. So the order of messages is the same on all
ranks if all ranks make the same calls in the same order.

[Note: gradients] After the step, `.grad` is a NaN without memory of its own, so that neither a reader nor another
backward pass mistakes it for a gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from legato.core.errors import InputError, RankError
from legato.core.plan import Plan
from legato.pytorch.device import Fetched
from legato.pytorch.private.optimizers import SubstituteScaler, has_step_hooks, hooked_step
from legato.pytorch.private.tensors import copy_all, without_overrides
from legato.pytorch.runtime.sending.delivery import Delivery
from legato.pytorch.runtime.sending.messages import Messages
from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.buckets import PENDING, SENT, Bucket, BucketSlice, Slot
from legato.pytorch.runtime.waiting.readers import Readers, gradient_is_held
from legato.pytorch.runtime.waiting.update import Update, reducers_of, users_class

__all__ = ["ELEMENTWISE", "GradScaler", "Shard", "Shards", "check_shardable", "shards_of"]

#: torch's elementwise optimizers: the update of an element depends only on the element, its gradient and its state.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def check_shardable(optimizer: Optimizer, others: Sequence[Optimizer] = ()) -> None:
    """Raise `InputError` unless the optimizer updates each element alone, and `others` have none of its parameters."""
    base = users_class(optimizer)
    if base not in ELEMENTWISE and not getattr(base, "steps_elements_alone", False):
        raise InputError(
            f"optimizer: {base.__name__} cannot be sharded (expected one that treats every element alone: "
            f"{', '.join(kind.__name__ for kind in ELEMENTWISE)}, or a class with steps_elements_alone = True)"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise InputError(f"optimizer: a differentiable {base.__name__} cannot be sharded")
    taken = {key for other in others for key in _parameters(other)}
    if taken.intersection(_parameters(optimizer)):
        raise InputError(
            f"optimizer: {base.__name__} has a parameter of another optimizer, and is sharded (expected one optimizer "
            "for each parameter)"
        )


@dataclass(eq=False, slots=True)
class Shard:
    """The part of a parameter that this rank updates, as a flat parameter."""

    piece: BucketSlice
    at: int  # its place in the chunk
    flag: int  # the place of the element that counts the ranks with a gradient
    flat: nn.Parameter

    def place(self) -> None:
        """Let the shard share the parameter's memory, or hold a copy of the values if the memory is not contiguous."""
        self.flat.data = self.piece.of(self.piece.slot.parameter.detach()).reshape(-1)

    def leave(self) -> None:
        """Release the shard's memory, because a parameter may wait only if nothing else shares its memory."""
        self.flat.grad = None
        self.flat.data = self.flat.new_empty(0)


class Shards(Delivery):
    """Delivers the values of parameters that are sharded: each rank updates only its shards.

    The `owner` of a bucket is the index of its optimizer. If the plan shards gradients too, gradients keep memory only
    for this rank's shards.
    """

    takes_gradients = True

    def __init__(
        self,
        plan: Plan,
        slots: Sequence[Slot],
        buckets: Sequence[Bucket],
        messages: Messages,
        readers: Readers,
        optimizers: Sequence[Optimizer],
    ) -> None:
        super().__init__(plan, slots, buckets, messages, readers)
        self.optimizers = list(optimizers)
        self._parameters = [_parameters(optimizer) for optimizer in optimizers]
        self.group, self._rank = messages.group, messages.group.rank()
        self._scattered = [bucket for bucket in buckets if bucket.gathered is not None]
        #: Pairs of a reduce_scatter and its all_gather, in the order in which the all_gathers are launched.
        self._gathered = [(bucket.scattered, bucket) for bucket in buckets if bucket.scattered is not None]
        self.outgoing = [bucket for bucket in self._scattered if bucket.index < self._gathered[0][1].index]
        self._late: deque[Bucket] = deque()  # the other reduce_scatters, until they are launched
        self._packed: list[Slot] = []  # packed gradients that can be taken from their parameters
        self._of = {bucket: _own(bucket, self._rank, self.group.size()) for bucket in self._scattered}
        self._owed: set[int] = set()  # owners whose new values were not sent since the last backward pass
        self._averaged: set[Bucket] = set()  # buckets whose averages have arrived since then
        self._marked: dict[Bucket, float] = {}  # by all_gather: the mark that this rank has sent in it
        self._answers: list[tuple[str, float, Fetched]] = []  # the marks of all ranks, not checked yet
        self._frees = plan.shard == "gradients"  # whether to free the memory of messages that are not in flight
        self._in_flight: deque[Bucket] = deque()  # reduce_scatters whose memory is freed when they arrive
        self._takers: dict[Bucket, int] = {}  # by bucket: how many parameters have not taken their new values yet
        for bucket in self._scattered:
            self._free(bucket)

    def _unused(self) -> Slot | None:
        """Return a parameter whose gradient was sent for an optimizer that has not used it yet, or None."""
        return next((slot for slot in self.slots if slot.stage == SENT and slot.owner in self._owed), None)

    def check_used(self) -> None:
        """Raise `RankError` if sharded gradients would be lost because the sharding is about to end."""
        if (slot := self._unused()) is not None:
            raise RankError(
                f"{slot.name}: the average of its gradient is sharded, and only step() can use it: call step() or "
                "zero_grad() before the plan changes or legato is detached"
            )

    def has_changed(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer's parameters have changed since messages were assigned to optimizers."""
        return self._parameters[self.optimizers.index(optimizer)] != _parameters(optimizer)

    def close(self) -> None:
        """Release parameters and buckets, and the views of buckets that the shards hold."""
        super().close()
        self._of.clear()
        self._received.clear()

    # ---- memory --------------------------------------------------------------------

    def _allocate(self, bucket: Bucket) -> None:
        """Allocate the memory of a bucket's buffer."""
        if self._frees:
            bucket.buffer.untyped_storage().resize_(bucket.buffer.nbytes)

    def _free(self, bucket: Bucket) -> None:
        if self._frees:
            bucket.buffer.untyped_storage().resize_(0)

    def _prepare_buffer(self, bucket: Bucket) -> None:
        self._allocate(bucket)
        super()._prepare_buffer(bucket)

    def launch(self, bucket: Bucket) -> None:
        """Launch a message, and free the memory of messages that have arrived."""
        super().launch(bucket)
        if self._frees and bucket.scattered is None:
            self._in_flight.append(bucket)
            while self._in_flight and self._in_flight[0].has_arrived:
                self._average(self._in_flight.popleft())

    # ---- forward and backward passes -------------------------------------------------

    def before_forward(self) -> None:
        """Drop gradients that no optimizer uses; remove their parameters' gates, which compilers must not see."""
        self._watch_no_longer()
        self._module_calls.end()
        for slot in self.slots:
            if slot.stage == SENT and slot.owner < 0:
                gate.remove(slot)

    def before_pass(self) -> None:
        """Send the values that were not updated since the last pass. Raises `RankError` if a gradient is unused."""
        super().before_pass()
        if (slot := self._unused()) is not None:
            raise _second_pass(slot)
        for owner in sorted(self._owed):
            for first, second in self._gathered:
                if first.owner == owner:
                    self._scatter(second)
                    self._average(first)
                    self._write(first)
                    self._gather(first, second, 0.0)
        self._owed.clear()
        self._scatter()
        for first, second in self._gathered:
            self.messages.wait(first)  # a message without an optimizer may be in flight in memory that is freed now
            self.messages.wait(second)
            self._check_marks(second)
            self._free(second)
        for bucket in self._averaged:
            if bucket.owner < 0:  # their values were not written back
                for shard in self._of[bucket]:
                    shard.leave()
        self._averaged.clear()
        self._received.clear()
        self._in_flight.clear()
        self._check_answers()

    def settle(self) -> None:
        """Bring every parameter up to date. Raises `RankError` if only some ranks have called `step()`."""
        super().settle()
        self._check_answers()

    def packed(self, slots: Iterable[Slot]) -> None:
        """Note these gradients; once autograd has released them, they are taken from their parameters."""
        self._packed += slots

    def after_accumulation(self) -> None:
        """Take the gradients that `packed` has noted from their parameters, except gradients that other code holds."""
        packed, self._packed = self._packed, []
        for slot in packed:
            with gate.invisible():
                held = gradient_is_held(slot.parameter)
            if not held:
                slot.spend()

    def after_pass(self) -> None:
        """Take the remaining sent gradients. Raises `RankError` if code outside the runtime holds a sent gradient."""
        self._packed.clear()
        super().after_pass()
        self._owed = {bucket.owner for bucket in self._scattered} - {-1}
        self._late = deque(self._scattered[len(self.outgoing) :])
        for slot in self.slots:
            if slot.has_grad:
                slot.spend()

    def _read_without_gate(self) -> Sequence[Slot]:
        with gate.invisible():
            return [s for s in self.slots if s.has_grad and not s.is_spent and gradient_is_held(s.parameter)]

    def check_cleared(self, slot: Slot) -> None:
        """Raise `RankError` if a backward pass is about to add to a gradient that was taken for an optimizer."""
        with without_overrides():
            if slot.is_spent and slot.owner < 0:
                gate.remove(slot)
                slot.parameter.grad = None
            elif slot.is_spent and slot.stage == SENT:
                raise _second_pass(slot)
            slot.check_cleared()

    def _scatter(self, before: Bucket | None = None) -> None:
        """Launch the waiting reduce_scatters; with `before` (an all_gather), only those that precede it in the plan."""
        while self._late and (before is None or self._late[0].index < before.index):
            self.launch(self._late.popleft())

    # ---- gradients ----------------------------------------------------------------

    def deliver(self, slots: Iterable[Slot]) -> None:
        """Do nothing: averages stay in their buckets."""

    def _read_gradient(self, slot: Slot) -> None:
        raise RankError(
            f"{slot.name}: the average of its gradient is sharded, and no rank has all of it: clip with "
            "clip_grad_norm_() or clip_grad_value_() of legato.attachment(model), scale with "
            "legato.GradScaler, and clear with zero_grad() of the optimizer or of the model"
        )

    def _average(self, bucket: Bucket) -> None:
        """Wait for a bucket's averages, and give them to its shards as gradients unless no rank had a gradient."""
        if bucket in self._averaged:
            return
        self.messages.wait(bucket)
        with gate.invisible():
            self._find_gradients(bucket)
            chunk = bucket.buffer.view(self.group.size(), -1)[self._rank]
            if self._frees:
                chunk = chunk.clone()
                self._free(bucket)
            for shard in self._of[bucket]:
                shard.place()
                has_grad = shard.piece.slot.has_grad or self._received[shard]
                shard.flat.grad = chunk[shard.at : shard.at + shard.flat.numel()] if has_grad else None
        self._averaged.add(bucket)

    def _find_gradients(self, bucket: Bucket) -> None:
        """Find out for which of this rank's missing gradients another rank has a gradient (see `_receive`)."""
        alone = self._device.type == "cpu" or self.messages.in_backward
        sent = [b for b in self._scattered if b not in self._averaged and b not in self._late]
        flags = {}
        for each in [bucket] if alone else sent:
            absent = [s for s in self._of[each] if not s.piece.slot.has_grad and s not in self._received]
            if absent:
                self.messages.wait(each)
                chunk = each.buffer.view(self.group.size(), -1)[self._rank]
                flags |= {shard: chunk[shard.flag] for shard in absent}
        self._ask(flags)

    def averaged(self, optimizer: Optimizer | None = None) -> list[nn.Parameter]:
        """Return this rank's shards that have averaged gradients: the shards of one optimizer, or all of them.

        Without `optimizer`, this includes the shards of parameters that no optimizer has. Raises `RankError` if nothing
        was averaged since the last step.
        """
        owners = set(self._owed) if optimizer is None else {self.optimizers.index(optimizer)} & self._owed
        if not owners:
            raise RankError("no averaged gradients: a backward pass has to come first, and step() uses them up")
        found = []
        self._scatter()
        for bucket in self._scattered:
            if bucket.owner in owners or (optimizer is None and bucket.owner < 0):
                self._average(bucket)
                found += [shard.flat for shard in self._of[bucket] if shard.flat.grad is not None]
        return found

    def of(self, optimizer: Optimizer) -> list[Shard]:
        """Return this rank's shards of an optimizer's parameters."""
        owner = self.optimizers.index(optimizer)
        return [shard for bucket in self._scattered if bucket.owner == owner for shard in self._of[bucket]]

    def slots_of(self, optimizer: Optimizer) -> list[Slot]:
        """Return the optimizer's parameters that are sharded."""
        owner = self.optimizers.index(optimizer)
        return [slot for slot in self.slots if slot.owner == owner]

    def agree_on(self, found_inf: dict[torch.device, Tensor]) -> None:
        """Tell every rank, for each device, whether any rank has found an infinite gradient."""
        devices = list(dict.fromkeys(slot.parameter.device for slot in self.slots))
        for device in devices:
            found_inf.setdefault(device, torch.zeros(1, device=device))
        mine = torch.stack([found_inf[device].reshape(()).to(devices[0]) for device in devices])
        most = self.messages.gather(mine, "comparing infinite gradients").amax(0)
        for device, number in zip(devices, most, strict=True):
            found_inf[device].copy_(number)

    def clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before clipping."""
        if not norm_type > 0:
            raise InputError(f"norm_type: {norm_type:g} with a sharded plan (expected a positive number)")
        flat = self.averaged()
        mine = torch.nn.utils.get_total_norm([p.grad for p in flat if p.grad is not None], norm_type)
        norms = self.messages.gather(mine.double(), "clipping gradients by their norm")
        parameters = [slot.parameter for slot in self.slots]
        double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        norm: Tensor = torch.linalg.vector_norm(norms, norm_type)
        norm = norm.to(parameters[0].device, torch.float64 if double else torch.float32)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is {norm.item()}")
        torch.nn.utils.clip_grads_with_norm_(flat, max_norm, norm)
        return norm

    # ---- step ----------------------------------------------------------------------

    def step(self, optimizer: Optimizer, base: type[Optimizer]) -> None:
        """Update this rank's shards of the optimizer's parameters, and run its step hooks; new values arrive later."""
        mine: list[Slot] = []

        def step(_: Optimizer) -> None:
            mine.extend(self._step(optimizer, base))
            others = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in self.by_parameter]
            if others:
                Update(optimizer, base).apply(others)

        tracer = self.messages.tracer
        if tracer:
            tracer.switch("optimizer")
        (hooked_step(step) if has_step_hooks(optimizer) else step)(optimizer)
        if tracer:
            tracer.switch(None)
        with gate.invisible():
            later = [slot for slot in mine if self.may_wait(slot)]
        self.postpone(later, None)
        now = [slot for slot in mine if slot.stage != PENDING]
        for slot in now:
            slot.mark_stepped(None)
        self._update(now)

    def _step(self, optimizer: Optimizer, base: type[Optimizer]) -> list[Slot]:
        """Update the optimizer's shards, send the new values, and return the parameters that wait for new values.

        Nothing happens if nothing was sent since the last step. Raises `RankError` if there are gradients that were not
        averaged.
        """
        owner = self.optimizers.index(optimizer)
        mine = self.slots_of(optimizer)
        if owner not in self._owed:
            _check_unused(mine)
            return []
        if self.has_changed(optimizer):
            raise RankError(
                "step() of a sharded optimizer that got other parameters since the backward pass: add or remove them "
                "between step() and the next forward pass"
            )
        with without_overrides():
            for slot in mine:
                if not slot.has_grad:  # the gradient in `.grad` was not sent, and is not up to date
                    slot.check_cleared()
        update = Update(optimizer, base)
        todo = deque(bucket for bucket in self._scattered if bucket.owner == owner)
        for first, second in self._gathered:
            if first.owner == owner:
                self._scatter(second)
                while first in todo:
                    self._update_shards(todo, update)
                self._gather(first, second, 1.0)
        self._owed.discard(owner)
        return mine

    def _update_shards(self, todo: deque[Bucket], update: Update) -> None:
        """Wait for the first reduce_scatter in `todo`; update the shards of each reduce_scatter that has arrived."""
        self.messages.wait(todo[0])
        here = []
        while todo and todo[0].has_arrived and todo[0] not in self._late:
            here.append(todo.popleft())
            self._average(here[-1])
        shards = [shard for bucket in here for shard in self._of[bucket]]
        with gate.invisible():
            for shard in shards:
                self._prepare(shard)
        update.apply_to_shards([(shard.flat, shard.piece.slot.parameter) for shard in shards])
        for bucket in here:
            self._write(bucket)

    def _prepare(self, shard: Shard) -> None:
        """Give a shard its values. If the program dropped or zeroed the gradient, do so with the shard's, too."""
        slot = shard.piece.slot
        shard.place()
        if slot.stage != SENT:
            grad = None if slot.is_spent else slot.parameter.grad
            if grad is not None:
                shard.flat.grad = shard.piece.of(grad).reshape(-1)
            elif slot.zeroed and shard.flat.grad is not None:  # another rank had a gradient
                shard.flat.grad = torch.zeros_like(shard.flat)
            else:
                shard.flat.grad = None

    def _write(self, bucket: Bucket) -> None:
        """Write the values of the shards into the chunk, in place of their gradients, and release the shards."""
        self._allocate(bucket)
        with gate.invisible():
            shards = self._of[bucket]
            if shards:
                copy_all([shard.piece.view.view(-1) for shard in shards], [shard.flat.detach() for shard in shards])
            for shard in shards:
                shard.leave()

    def _gather(self, first: Bucket, second: Bucket, mark: float) -> None:
        """Send the values of a bucket's parameters, with a mark that says whether they were updated."""
        assert first.marks is not None
        first.marks[self._rank] = mark
        self._marked[second] = mark
        self._takers[second] = second.slots
        self.launch(second)

    # ---- afterwards ----------------------------------------------------------------

    def _arrive(self, slots: Iterable[Slot]) -> None:
        self._wait_for(slots)

    def _apply(self, slots: Sequence[Slot]) -> None:
        """Copy the new values, which have arrived, into the parameters to which they belong."""
        for bucket in dict.fromkeys(bucket for slot in slots for bucket in slot.buckets):
            self._check_marks(bucket)
        whole = [slot for slot in slots if len(slot.slices) == 1]
        with gate.invisible():
            if whole:
                copy_all([slot.ordered(slot.parameter) for slot in whole], [slot.slices[0].view for slot in whole])
            for slot in slots:
                if len(slot.slices) > 1:
                    slot.unpack_into(slot.parameter)
        for slot in slots:
            for bucket in slot.buckets:
                if bucket.scattered is not None:
                    self._takers[bucket] -= 1
                    if not self._takers[bucket]:
                        self._free(bucket)

    def _check_marks(self, bucket: Bucket) -> None:
        """Fetch the marks that say which ranks have updated their chunks. On a CPU, also check the marks now."""
        mine = self._marked.pop(bucket, None)
        if mine is None:
            return
        assert bucket.scattered is not None and bucket.scattered.marks is not None
        self._answers.append((bucket.label, mine, Fetched(bucket.scattered.marks)))
        if self._device.type == "cpu":
            self._check_answers()

    def _check_answers(self) -> None:
        """Raise `RankError` if only some of the ranks have updated their chunks of a message."""
        answers, self._answers = self._answers, []
        for (label, mine, _), told in zip(answers, Fetched.values([a for *_, a in answers]), strict=True):
            marks = told.abs().tolist()
            if marks != [mine] * len(marks):
                did, did_not = ([r for r, mark in enumerate(marks) if bool(mark) == way] for way in (True, False))
                raise RankError(
                    f"{label}: ranks {did} have called step(), and ranks {did_not} have not (a GradScaler that is "
                    "not legato.GradScaler?); start again from a checkpoint"
                )


class GradScaler(SubstituteScaler):
    """A `torch.amp.GradScaler`, with the same arguments, that also works with sharded optimizers.

    Alone, each rank would see only the infinite gradients in its own shards. With this scaler, all ranks skip a step
    and change the scale if any rank has found an infinite gradient.
    """

    def substitutes(self, optimizer: Optimizer) -> Any:
        """Return the optimizer or, if it is sharded, a stand-in with this rank's shards as parameters."""
        shards = shards_of(optimizer)
        if shards is None:
            return optimizer
        others = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in shards.by_parameter]
        return SimpleNamespace(param_groups=[{"params": shards.averaged(optimizer) + others}])

    def found(self, optimizer: Optimizer, found_inf: dict[torch.device, Tensor]) -> None:
        """Tell all ranks whether any rank has found an infinite gradient."""
        shards = shards_of(optimizer)
        if shards is not None:
            shards.agree_on(found_inf)


def _parameters(optimizer: Optimizer) -> list[int]:
    """Return the ids of an optimizer's parameters."""
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def shards_of(optimizer: Any) -> Shards | None:
    """Return the shards of the optimizer's parameters; None if they are not sharded now."""
    return next((r.shards for r in reducers_of(optimizer) if r.shards is not None), None)


def _check_unused(slots: Sequence[Slot]) -> None:
    """Raise `RankError` if a parameter has a gradient that no backward pass has sent since the last step."""
    with without_overrides():
        for slot in slots:
            if slot.parameter.grad is not None:
                raise RankError(
                    f"{slot.name}: step() without an averaged gradient: the last backward pass ran under "
                    "no_sync(), or step() was called twice without zero_grad() in between"
                )


def _second_pass(slot: Slot) -> RankError:
    return RankError(
        f"{slot.name}: a second backward pass before step() or zero_grad(): the average of its gradient is sharded, "
        "and nothing can be added to it; use no_sync() for all backward passes but the last"
    )


def _own(bucket: Bucket, rank: int, ranks: int) -> list[Shard]:
    """Return the shards of a rank in a bucket."""
    first = bucket.buffer.storage_offset()
    chunk = bucket.buffer.numel() // ranks
    shards = []
    for piece in bucket.slices:
        at = piece.view.storage_offset() - first
        if at // chunk == rank:
            assert piece.flag is not None
            flag = int(piece.flag.storage_offset() - first) - rank * chunk
            flat = nn.Parameter(piece.view.new_empty(0))
            # For optimizers that treat parameters differently.
            flat.shard_of = piece.slot.parameter  # pyrefly: ignore[missing-attribute]
            shards.append(Shard(piece, int(at) - rank * chunk, flag, flat))
    return shards
