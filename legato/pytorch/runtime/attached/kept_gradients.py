"""Gradients to which a program keeps references; with `gradient_as_bucket_view`, they move to each new bucket.

With `gradient_as_bucket_view`, DDP keeps each `.grad` in its bucket, as the same tensor in all passes. A program may
list the gradients once, and from then on read, clip or send them through its list, whatever `zero_grad` does to
`.grad`. A plan's buckets may replace DDP's buckets, and DDP's buckets may come back. Each time, all tensors that were a
parameter's `.grad` get the memory of its new `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.buckets import Slot

__all__ = ["KeptGradients", "kept_gradients"]


class KeptGradients:
    """The tensors that were `.grad` of a model's trained parameters after a backward pass, and still exist."""

    def __init__(self) -> None:
        self._parameters: Mapping[str, nn.Parameter] = {}
        self._known: dict[str, list[TensorWeakRef]] = {}

    def train(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Record that these parameters are trained from now on."""
        self._parameters, self._known = parameters, {name: self._known.get(name, []) for name in parameters}

    def note(self) -> None:
        """Remember the current gradients."""
        with gate.invisible():
            for name, parameter in self._parameters.items():
                self._note(name, parameter.grad)

    @contextmanager
    def moving(self, slots: Callable[[], Iterable[Slot]] | None = None) -> Iterator[None]:
        """Move the gradients noted so far, with their values, to the buckets that are made inside this context.

        `slots()` returns the place of each gradient in the new buckets. Without `slots`, the new buckets are DDP's own,
        and DDP moves each `.grad` itself.
        """
        absent = {}
        with gate.invisible():
            for name, parameter in self._parameters.items():
                if parameter.grad is not None and all(parameter.grad is not t for t in self._kept(name)):
                    self._known[name].append(TensorWeakRef(parameter.grad))
                elif parameter.grad is None and (kept := self._kept(name)):
                    absent[name], parameter.grad = parameter, kept[-1]
        try:
            yield
        finally:
            with gate.invisible():
                for slot in () if slots is None else slots():
                    self._settle_in(slot)
                for name, parameter in self._parameters.items():
                    self._follow(name, parameter.grad)
                for parameter in absent.values():
                    parameter.grad = None

    def _note(self, name: str, grad: Tensor | None) -> None:
        if grad is not None:  # when DDP first rebuilds its buckets, it leaves such tensors itself
            kept = [t for t in self._kept(name) if t is not grad and t.data_ptr() == grad.data_ptr()]
            self._known[name] = [TensorWeakRef(tensor) for tensor in (*kept, grad)]

    def _kept(self, name: str) -> list[Tensor]:
        """Return the gradients that still exist and have the parameter's shape, dtype and device, from old to new."""
        like = self._parameters[name]
        found = [tensor for reference in self._known[name] if (tensor := reference()) is not None]
        return [t for t in found if (t.shape, t.dtype, t.device) == (like.shape, like.dtype, like.device)]

    def _settle_in(self, slot: Slot) -> None:
        """Move `.grad` to its memory in a plan's bucket, but keep the same tensor object."""
        grad, place = slot.parameter.grad, slot.whole
        if grad is None or place is None or grad.layout != place.layout:
            return
        if (grad.shape, grad.dtype, grad.device) == (place.shape, place.dtype, place.device):
            place.copy_(grad)
            grad.data = place
            slot.whole = grad

    def _follow(self, name: str, grad: Tensor | None) -> None:
        """Let tensors that used to be `.grad` share the memory of the current `.grad`."""
        if grad is not None:
            for other in self._kept(name):
                if other is not grad:
                    other.data = grad
            self._note(name, grad)


_of_models: WeakKeyDictionary[nn.Module, KeptGradients] = WeakKeyDictionary()


def kept_gradients(ddp: nn.Module, parameters: Mapping[str, nn.Parameter]) -> KeptGradients:
    """Return the model's kept gradients, which outlive an attachment; record that `parameters` are now trained."""
    found = _of_models.setdefault(ddp, KeptGradients())
    found.train(parameters)
    return found
