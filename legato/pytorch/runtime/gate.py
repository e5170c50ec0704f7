"""Waiting where a parameter is *read*, whoever reads it.

[Note: gates] Hooks on modules miss functional use of a parameter
(`nn.MultiheadAttention`, `F.linear(x, model.other.weight)`), so a parameter
that is not up to date carries the gate itself: its class is swapped for
`GatedParameter`, whose `__torch_function__` sees every operation on it from
Python. The first one that reads brings the parameter up to date, which swaps
the class back; from then on it costs nothing. While only the *gradient* is on
its way (`optimizer.step()` not called yet) the value is current, and only
access to `.grad` waits. Questions about shape, dtype and the like never wait.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from legato.pytorch.runtime.buckets import PENDING, SENT, Slot

__all__ = ["GatedParameter", "install", "invisible", "remove"]

_GRAD = frozenset(getattr(Tensor.grad, name) for name in ("__get__", "__set__", "__delete__"))
_METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout", "grad_fn", "is_cuda", "is_cpu",
        "is_sparse", "is_quantized", "is_meta", "is_mps", "is_xpu", "is_nested", "output_nr", "_version", "names",
        "itemsize", "nbytes", "retains_grad", "is_mkldnn", "_backward_hooks", "_post_accumulate_grad_hooks",
    ) if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in (
        "size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous", "is_floating_point",
        "is_complex", "get_device", "type", "is_signed", "storage_offset", "ndimension", "__len__",
        "register_hook", "register_post_accumulate_grad_hook", "is_pinned", "is_shared", "is_conj", "is_neg",
        "is_inference",
    )]
    + list[Any]((torch.is_floating_point, torch.is_complex, torch.numel))
)  # fmt: skip


class GatedParameter(nn.Parameter):
    """A parameter that is brought up to date by the first operation that reads it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _METADATA:
            for parameter in _gated((args, kwargs)):
                slot, resolve = parameter._legato_gate
                if slot.stage == PENDING or (slot.stage == SENT and func in _GRAD):
                    resolve(slot)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is a plain parameter, up to date."""
        _resolve(self)
        return copy.deepcopy(cast(nn.Parameter, self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is pickled is a plain parameter, up to date."""
        _resolve(self)
        return self.__reduce_ex__(protocol)


def _resolve(parameter: GatedParameter) -> None:
    """Whatever is outstanding is brought in; the parameter is of its own class afterwards."""
    slot, resolve = parameter._legato_gate  # type: ignore[attr-defined]
    resolve(slot)


def _gated(values: Any) -> Iterator[Any]:
    if type(values) is GatedParameter:
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _gated(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _gated(value)


def install(slot: Slot, resolve: Callable[[Slot], None]) -> None:
    """From here on, reading the parameter (or its gradient) calls `resolve(slot)` first."""
    if slot.plain_class is nn.Parameter:
        slot.parameter._legato_gate = (slot, resolve)  # type: ignore[attr-defined]
        slot.parameter.__class__ = GatedParameter


def remove(slot: Slot) -> None:
    """The parameter and its gradient are up to date."""
    slot.mark_settled()
    slot.parameter.__class__ = slot.plain_class
    vars(slot.parameter).pop("_legato_gate", None)


@contextmanager
def invisible() -> Iterator[None]:
    """What the runtime itself computes is no part of the user's graph, and no business of a dispatch mode."""
    modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), modes:
        yield
