"""The reducer: receives gradients from autograd, packs them into buckets, and sends these in one fixed order.

Nothing that happens on one rank alone can change the order of messages. docs/runtime.md ("The same order on every
rank") has the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from legato.core.errors import RankError
from legato.core.plan import Plan
from legato.pytorch.runtime.autograd import Accumulator, BackwardScope
from legato.pytorch.runtime.sending.delivery import Delivery
from legato.pytorch.runtime.sending.messages import Connection, Messages
from legato.pytorch.runtime.sending.packing import PACK_BYTES
from legato.pytorch.runtime.sharding.shards import Shards
from legato.pytorch.runtime.waiting.buckets import ABSENT, ARRIVED, AWAITED, EARLY, IDLE, PENDING, Slot, make_buckets
from legato.pytorch.runtime.waiting.readers import Readers, settle_before_leaving

__all__ = ["Reducer"]


class Reducer:
    """Averages the gradients of one model over the ranks of a group, as a plan says.

    If the reducer is `armed` when a backward pass begins, the pass sends gradients, and `ended()` is called after the
    pass. As in DDP, a forward pass arms the reducer (see `legato.pytorch.runtime.attached.attachment`). Under a sharded
    plan, each rank runs a part of each step of the `optimizers`. Raises `PlanError` if the plan is for another
    model (`buckets.check_plan`).
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        connection: Connection,
        readers: Readers,
        ended: Callable[[], None] = lambda: None,
        *,
        gradient_as_bucket_view: bool = False,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self.plan, self.readers, self._ended = plan, readers, ended
        self.messages = Messages(connection)
        owners = optimizers if plan.shard != "none" else ()  # otherwise a rank's own optimizer would change messages
        number = {id(p): i for i, o in enumerate(owners) for g in o.param_groups for p in g["params"]}
        ranks = connection.group.size()
        self.slots, self.buckets = make_buckets(plan, parameters, ranks, lambda p: number.get(id(p), -1))
        #: The object that brings averages to the parameters.
        self.delivery: Delivery
        if plan.shard == "none":
            self.delivery = Delivery(
                plan, self.slots, self.buckets, self.messages, readers, lends=gradient_as_bucket_view
            )
        else:
            self.delivery = Shards(plan, self.slots, self.buckets, self.messages, readers, optimizers)
        self.armed = False  # whether the next backward pass sends
        #: Whether a gradient that a hook has dropped is absent; otherwise it counts as zeros, as in DDP.
        self.find_unused = False
        self.backward_scope = BackwardScope(lambda: self.armed, self._backward_ended)
        self.next = 0  # the place of the bucket to launch next
        self.closed = False
        for slot in self.slots:
            slot.find_spent()
        self.accumulator_of = {
            s: Accumulator(s.parameter, partial(self._before_accumulation, s), partial(self._gradient_ready, s))
            for s in self.slots
        }
        settle_before_leaving(self)

    @property
    def shards(self) -> Shards | None:
        """Return this rank's shards if the plan is sharded, else None."""
        return self.delivery if isinstance(self.delivery, Shards) else None

    @property
    def in_backward(self) -> bool:
        """Return whether a backward pass that sends gradients is running, or has failed."""
        return self.messages.in_backward

    def settle(self) -> None:
        """Bring every parameter up to date."""
        self.delivery.settle()

    def watch(self) -> AbstractContextManager[None]:
        """Return a context that watches which operations read parameters in a forward pass."""
        return self.readers.watch(self.slots, self.delivery.install_gate)

    def close(self) -> None:
        """Bring everything up to date, remove all hooks from the parameters, and free the buckets."""
        if self.closed:
            return
        if not self.in_backward:  # otherwise the pass has failed, and other ranks may never send the missing messages
            self.settle()
        self.closed = True
        for accumulator in self.accumulator_of.values():
            accumulator.remove()
        self.delivery.close()

    def begin_forward(self) -> None:
        """Prepare for a forward pass. Raises `RankError` if the last backward pass did not finish."""
        if self.in_backward:
            raise RankError(
                "the last backward pass did not finish (an exception in it?), and the ranks may be out of step: "
                "start again from a checkpoint"
            )
        self.backward_scope.forget()
        self.delivery.before_forward()

    # ---- backward pass -------------------------------------------------------------

    def _before_accumulation(self, slot: Slot, gradients: Sequence[Tensor | None] = (), *_: Any) -> None:
        """Prepare for an addition to `.grad`: make sure that `.grad` is up to date and not in flight."""
        if slot.offered is not None:
            slot.compare(gradients[0] if gradients else None)
        if slot.spent is not None:
            self.delivery.check_cleared(slot)
        if slot.gradient == EARLY:
            slot.taken = None  # `.grad` will hold the parts that are not packed yet
        elif not self.messages.in_backward and self.armed:
            self.begin_backward()
        elif self.messages.in_backward and slot.gradient != AWAITED:
            raise RankError(
                f"{slot.name}: a second gradient in one backward pass (checkpointing with use_reentrant=True over a "
                "shared parameter?), where the first passes had one; use use_reentrant=False"
            )
        elif slot.stage == PENDING:
            self._read_stale(slot)
        elif slot.stage != IDLE:
            self.delivery.resolve(slot)

    def _read_stale(self, slot: Slot) -> None:
        """Raise `RankError` on all ranks, because a gradient arrives while its parameter's update still waits."""
        error = RankError(
            f"{slot.name} was read before its last update, by something that legato cannot see; "
            f"keep it from waiting: distribute(..., current=[{slot.name!r}])"
        )
        raise self.messages.watchdog.failure(f"backward pass {self.messages.passes + 1}", error) from error

    def begin_backward(self) -> None:
        """Begin a pass that sends gradients. Raises `RankError` if a parameter was read before its pending update."""
        for slot in self.delivery.pending:
            if slot.stage == PENDING and self.accumulator_of[slot].will_run:
                self._read_stale(slot)
        self.delivery.before_pass()
        self.backward_scope.notice()
        self.messages.begin_pass()
        self.next = 0
        for bucket in self.buckets:
            bucket.missing, bucket.writable = bucket.slots, False
            bucket.arrived, bucket.waiting_bytes = [], 0

    def _gradient_ready(self, slot: Slot, *_: Any) -> None:
        if not self.messages.in_backward:
            return
        self.delivery.after_accumulation()
        if slot.gradient != EARLY:
            self.mark_ready(slot, not self.find_unused)
            return
        slot.gradient = ARRIVED
        if not slot.to_pack:
            self.delivery.packed([slot])
        self._mark_sent(slot)

    def mark_ready(self, slot: Slot, counts: bool = False) -> None:
        """Record that a gradient arrived or is absent; pack gradients if there are enough; launch complete buckets.

        If it is absent but `counts`, it counts as zeros.
        """
        early = slot.gradient == EARLY
        grad = slot.taken if early else slot.parameter.grad
        if grad is not None and grad is slot.spent:
            grad = None
            if not self.delivery.takes_gradients:
                slot.check_cleared()
        if grad is not None and grad.layout != torch.strided:
            raise RankError(f"{slot.name}: its gradient is {grad.layout}; only dense gradients can be sent")
        if not early:
            slot.gradient = ABSENT if grad is None and not counts else ARRIVED
            self._mark_sent(slot)
        for bucket in slot.buckets:
            bucket.missing -= 1
            if bucket.index in slot.parts:
                bucket.arrived.append(slot)
                bucket.waiting_bytes += slot.nbytes
                if bucket.missing == 0 or bucket.waiting_bytes > PACK_BYTES:
                    self.delivery.pack(bucket)
            self._advance()

    def _mark_sent(self, slot: Slot) -> None:
        slot.mark_sent()
        self.delivery.install_gate(slot)

    def _advance(self) -> None:
        """Launch buckets in the plan's order, up to the first bucket that lacks a gradient."""
        outgoing = self.delivery.outgoing
        while self.next < len(outgoing) and outgoing[self.next].missing == 0:
            self.delivery.launch(outgoing[self.next])
            self.next += 1

    def _backward_ended(self) -> None:
        if not self.in_backward:
            return
        for slot in self.slots:
            if slot.gradient == EARLY:
                raise RankError(
                    f"{slot.name}: the gradient that a compiled graph handed out was sent, and none arrived"
                )
            if slot.gradient == AWAITED:
                self.mark_ready(slot)
        self.armed = False
        self.messages.end_pass()
        self.delivery.after_pass()
        if self.messages.tracer:
            self.messages.tracer.switch(None)
        self._ended()

    # ---- failures ----------------------------------------------------------------

    def status(self) -> str:
        """Describe what this rank is doing, for the error messages of other ranks."""
        if not self.in_backward:
            return f"is between backward passes, {self.messages.passes} done"
        bucket = self.delivery.outgoing[min(self.next, len(self.delivery.outgoing) - 1)]
        missing = next((part.slot.name for part in bucket.slices if part.slot.gradient == AWAITED), "")
        where = f"is in backward pass {self.messages.passes}, at message {bucket.index} ({bucket.label})"
        return where + (f", which lacks the gradient of {missing}" if missing else "")
