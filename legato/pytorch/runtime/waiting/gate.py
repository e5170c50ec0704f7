"""Gates: the first operation that reads an outdated parameter waits until the parameter is up to date.

[Note: gates] Hooks on modules miss functional use of a parameter (`nn.MultiheadAttention`, `F.linear(x,
model.other.weight)`), so the gate is installed on the parameter itself: its class is swapped for `GatedParameter`,
whose `__torch_function__` sees every operation on it from Python. The first operation that reads the parameter brings
it up to date and restores its plain class; from then on reading costs nothing extra. While only the *gradient* is in
flight (before `optimizer.step()`), the value is current, and only access to `.grad` waits. Access to shape, dtype and
other metadata never waits.

[Note: constructors] Functions that make a tensor from any data (listed in `torch.overrides.get_ignored_functions`), and
the transforms of `torch.func`, read a parameter without a call of its `__torch_function__`. Such functions are replaced
by versions that bring their arguments up to date first.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import unwrap
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from legato.pytorch.private.dynamo import scripted_as
from legato.pytorch.private.tensors import PRIVATE_METADATA, TRANSFORMS, invisible, without_overrides
from legato.pytorch.runtime.waiting.buckets import PENDING, SENT, UPDATING, Slot

__all__ = [
    "GatedParameter",
    "functions",
    "hide",
    "install",
    "invisible",
    "methods",
    "remove",
    "resolve",
    "slot_of",
    "with_current_values",
]

_GET_GRAD, _SET_GRAD = (getattr(Tensor.grad, name) for name in ("__get__", "__set__"))
_GRAD = frozenset((_GET_GRAD, _SET_GRAD, getattr(Tensor.grad, "__delete__")))  # noqa: B009
_ZERO_GRAD = frozenset(unwrap(kind.zero_grad).__code__ for kind in (nn.Module, torch.optim.Optimizer))
_METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout", "grad_fn", "is_cuda", "is_cpu",
        "is_sparse", "is_quantized", "is_meta", "is_mps", "is_xpu", "is_nested", "output_nr", "names",
        "itemsize", "nbytes", "retains_grad", "is_mkldnn", *PRIVATE_METADATA,
    ) if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in (
        "size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous", "is_floating_point",
        "is_complex", "get_device", "type", "is_signed", "storage_offset", "ndimension", "__len__",
        "register_hook", "register_post_accumulate_grad_hook", "is_pinned", "is_shared", "is_conj", "is_neg",
        "is_inference",
    )]
    + list[Any]((torch.is_floating_point, torch.is_complex, torch.numel))
)  # fmt: skip


class _PlainToAsk(type(nn.Parameter)):
    """A metaclass that makes `type(p) == nn.Parameter` True for a gated parameter, as torch's optimizers require.

    `type(p) is nn.Parameter` remains False.
    """

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is nn.Parameter

    def __hash__(cls) -> int:
        return hash(nn.Parameter)


class GatedParameter(nn.Parameter, metaclass=_PlainToAsk):
    """A parameter that is brought up to date by the first operation that reads it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _METADATA:
            for parameter in _gated((*args, *kwargs.values())):
                slot = slot_of(parameter)
                if slot is None:  # another thread has brought it up to date
                    continue
                if func in _GRAD and _is_zeroed(parameter, slot, func, args):
                    return None
                copied = func == Tensor.detach and _makes_a_parameter(sys._getframe(1))
                resolve(parameter, gradient=func in _GRAD or copied)
                slot.was_read = slot.was_read or func not in _GRAD
                if copied:  # its class is plain by now, and the new parameter must have the same class
                    with without_overrides():
                        return Tensor._make_subclass(type(parameter), args[0])
        with without_overrides():
            return func(*args, **kwargs)

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        """Return the plain parameter's representation."""
        with _plain(self) as parameter:
            return repr(parameter)

    def as_subclass(self, cls: type[Tensor]) -> Any:
        """Return the parameter, up to date, as a tensor of another class."""
        resolve(self)
        return Tensor.as_subclass(self, cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter that is up to date."""
        with _plain(self) as parameter:
            return copy.deepcopy(parameter, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:  # pyrefly: ignore[bad-override-param-name]
        """Pickle a plain parameter that is up to date."""
        with _plain(self) as parameter:  # a copy, because its gate may come back before its attributes are written
            plain = nn.Parameter(parameter.detach(), parameter.requires_grad)
            vars(plain).update(vars(parameter))
            return plain.__reduce_ex__(protocol)


def _makes_a_parameter(caller: FrameType | None) -> bool:
    """Return whether the caller is `nn.Parameter(...)`, directly or through a mode (such as a default device's)."""
    while caller is not None and caller.f_code.co_name == "__torch_function__":
        caller = caller.f_back
    return caller is not None and caller.f_code is nn.Parameter.__new__.__code__


@contextmanager
def _plain(parameter: GatedParameter) -> Iterator[nn.Parameter]:
    """Bring the parameter up to date, and yield it with its plain class.

    At the end of the context, the parameter gets its gate back if its gradient has not arrived yet. Code that copies
    the parameter gets a plain copy, which needs no gate because it has no gradient.
    """
    slot = slot_of(parameter)
    assert slot is not None
    resolve(parameter)
    gated = type(parameter)
    slot.was_read = True
    parameter.__class__ = slot.plain_class
    waiting = vars(parameter).pop("_legato_gate", None)
    try:
        yield parameter
    finally:
        if waiting is not None:
            parameter._legato_gate = waiting  # pyrefly: ignore[missing-attribute]
            parameter.__class__ = gated


def slot_of(parameter: GatedParameter) -> Slot | None:
    """Return the slot of a parameter with a gate; None if another thread has just removed the gate."""
    return cast("Slot | None", vars(parameter).get("_legato_gate", (None,))[0])


def resolve(parameter: GatedParameter, gradient: bool = False) -> None:
    """Bring a parameter up to date; with `gradient`, bring its gradient up to date as well."""
    slot, resolve_slot, _, look = vars(parameter).get("_legato_gate", (None, None, None, None))
    if slot is not None and (slot.stage in (PENDING, UPDATING) or (slot.stage == SENT and gradient)):
        resolve_slot(slot)
    elif look is not None:
        look()


def _is_zeroed(parameter: GatedParameter, slot: Slot, func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the caller only zeroes the gradient (`p.grad = None`, `zero_grad()`); if so, do it without a wait.

    `zero_grad` of a module or an optimizer reads each gradient only to see whether there is one.
    """
    zero = vars(parameter)["_legato_gate"][2]
    if zero is None or slot.stage not in (PENDING, SENT):
        return False
    if func == _SET_GRAD and args[1] is None:
        zero(slot, True)
        return True
    caller = sys._getframe(2)
    if func == _GET_GRAD and caller.f_code in _ZERO_GRAD:
        zero(slot, caller.f_locals["set_to_none"])
        return True
    return False


def _gated(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) is GatedParameter:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _gated(value)
        elif isinstance(value, dict):
            yield from _gated(value.values())


def install(
    slot: Slot,
    resolve: Callable[[Slot], None],
    zero: Callable[[Slot, bool], None] | None = None,
    look: Callable[[], None] | None = None,
) -> None:
    """Install a gate: reads of the parameter (or, in stage SENT, of its gradient) first call `resolve(slot)`.

    For `zero_grad`, the gate calls `zero(slot, set_to_none)`, since the gradient may be in flight. A read of a
    parameter that is already up to date calls `look()` instead of `resolve(slot)`.

    A parameter whose class is a subclass of `nn.Parameter` gets no gate.
    """
    if slot.plain_class is nn.Parameter:
        if slot.gate is None:  # made only once, because millions of small objects keep the garbage collector busy
            slot.gate = (slot, resolve, zero, look)
        slot.parameter._legato_gate = slot.gate  # pyrefly: ignore[missing-attribute]
        slot.parameter.__class__ = GatedParameter


def remove(slot: Slot) -> None:
    """Mark the slot as settled, and give the parameter its plain class back."""
    slot.mark_settled()
    hide(slot)


def hide(slot: Slot) -> None:
    """Remove a parameter's gate. If the parameter waits, only a compiled graph reads it, and updates it first."""
    slot.parameter.__class__ = slot.plain_class
    vars(slot.parameter).pop("_legato_gate", None)


class Constructors:
    """A set of functions that are replaced while parameters may wait (see [Note: constructors]).

    Several models may call `begin()`; the functions are restored when each of them has called `end()`.
    """

    def __init__(self, names: dict[Any, tuple[str, ...]]) -> None:
        self._names = names
        self._users = 0
        self._before: list[tuple[Any, str, Any]] = []  # what was replaced; None for an inherited attribute

    @property
    def in_use(self) -> bool:
        """Return whether the functions are replaced."""
        return self._users > 0

    def begin(self) -> None:
        """Replace the functions."""
        self._users += 1
        if self._users > 1:
            return
        for owner, names in self._names.items():
            for name in names:
                self._before.append((owner, name, vars(owner).get(name)))
                plain = with_current_values(getattr(owner, name))
                setattr(owner, name, staticmethod(plain) if name in ("__new__", "_make_subclass") else plain)

    def end(self) -> None:
        """Restore the functions, unless another model still needs the replacements."""
        self._users -= 1
        if self._users:
            return
        for owner, name, before in self._before:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._before.clear()


#: Functions that are replaced only while parameters wait, because compilers recognize the original functions.
functions = Constructors(
    {
        torch: (
            "tensor", "as_tensor", "asarray", "sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor",
            "sparse_bsr_tensor", "sparse_bsc_tensor", "sparse_compressed_tensor", "to_dlpack",
        ),
        torch.utils.dlpack: ("to_dlpack",),
        torch.nested: ("nested_tensor", "as_nested_tensor"),
        **TRANSFORMS,
    }
)  # fmt: skip
#: Methods that are replaced as long as legato runs passes, because each change of a class empties Python's caches for
#: it.
methods = Constructors({Tensor: ("__new__", "_make_subclass", "new_tensor", "new")})


@cache
def with_current_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of the function that brings its arguments up to date first. The version exists forever."""

    def construct(*args: Any, **kwargs: Any) -> Any:
        for parameter in _gated((*args, *kwargs.values())):
            resolve(parameter)
        return function(*args, **kwargs)

    scripted_as(construct, function)
    return construct
