"""Connects compiled graphs (`legato.pytorch.compiled`) to a reducer, which sends gradients and delivers parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from legato.pytorch.private.tensors import has_gradient_hooks
from legato.pytorch.runtime.reducer import Reducer
from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.buckets import AWAITED, EARLY, IDLE, PENDING, Slot

__all__ = ["GraphSender"]

#: The number of passes in which a gradient must have arrived unchanged before it is sent early.
_KEPT = 2


@dataclass(frozen=True)
class GraphSender:
    """A reducer's interface for compiled graphs."""

    reducer: Reducer

    @property
    def node_order(self) -> tuple[str, ...]:
        """Return the order in which the plan runs the nodes of compiled graphs."""
        return self.reducer.plan.node_order

    # ---- backward graphs ----------------------------------------------------------

    def messages_of(self, parameter: nn.Parameter) -> list[int]:
        """Return the positions, in the plan, of the messages that carry the parameter's gradient."""
        slot = self._slot(parameter)
        return [] if slot is None else [bucket.index for bucket in slot.buckets if bucket.index in slot.parts]

    def hand_over(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Send a gradient that a compiled graph has just computed, before autograd adds it to `.grad`.

        A gradient is sent early only if autograd will add it unchanged: no hook may change it, nothing else may be
        added to it, and it must have arrived unchanged in the previous passes.
        """
        slot, reducer = self._slot(parameter), self.reducer
        if slot is None or slot.kept < 0 or not reducer.armed:
            return
        slot.offer(grad)
        if slot.kept < _KEPT or not self._arrives_unchanged(slot, grad):
            return
        if not reducer.in_backward:
            reducer.begin_backward()
        if slot.gradient != AWAITED:
            return  # a second gradient in this pass: an error is raised when it arrives
        with gate.invisible():
            before = parameter.grad
            slot.taken = grad if before is None else before + grad
        slot.gradient = EARLY
        reducer.mark_ready(slot)

    def _arrives_unchanged(self, slot: Slot, grad: Tensor) -> bool:
        """Return whether autograd will add this very gradient to the parameter's `.grad`, as far as is known now."""
        parameter, reducer = slot.parameter, self.reducer
        return (
            (slot.stage == IDLE or not reducer.in_backward)
            and not has_gradient_hooks(parameter)
            and (grad.dtype, grad.shape) == (parameter.dtype, parameter.shape)
            and reducer.accumulator_of[slot].will_run
        )

    def learn_from(self, before: Reducer) -> None:
        """Take over what the reducer of a previous plan has learned about the gradients of compiled graphs."""
        known = before.delivery.by_parameter
        for key, slot in self.reducer.delivery.by_parameter.items():
            if key in known:
                slot.kept = known[key].kept

    # ---- forward graphs -----------------------------------------------------------

    def late_message_of(self, parameter: nn.Parameter) -> int:
        """Return the position of the message for which the parameter may wait in a compiled forward pass (-1: none)."""
        slot = self._slot(parameter)
        if slot is None or not self.reducer.delivery.overlaps or not self.reducer.readers.may_wait(parameter):
            return -1
        return slot.buckets[-1].index

    def update(self, parameter: nn.Parameter) -> None:
        """Bring a parameter up to date, even if it has no gate that would do this at the next read."""
        slot = self._slot(parameter)
        if slot is not None and slot.stage == PENDING:
            self.reducer.delivery.resolve(slot)

    def settle(self) -> None:
        """Bring every parameter up to date."""
        self.reducer.settle()

    def hide_gates(self) -> None:
        """Hide the gates of waiting parameters, which catch reads, before a forward pass that is one compiled graph."""
        for slot in self.waiting():
            gate.hide(slot)

    def show_gates(self) -> str:
        """Restore hidden gates after a compiled pass; return the name of the first parameter that had one, or ""."""
        hidden = [slot for slot in self.waiting() if not isinstance(slot.parameter, gate.GatedParameter)]
        for slot in hidden:
            self.reducer.delivery.install_gate(slot)
        return hidden[0].name if hidden else ""

    def waiting(self) -> list[Slot]:
        """Return the parameters whose updates wait."""
        return [slot for slot in self.reducer.delivery.pending if slot.stage == PENDING]

    def _slot(self, parameter: nn.Parameter) -> Slot | None:
        return self.reducer.delivery.by_parameter.get(id(parameter))
