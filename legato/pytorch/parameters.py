"""Which parameters take part.

Whether the model is still made of what was distributed.

[Note: census] A parameter that is added, unfrozen, or put in another's place
after the model was distributed would be trained on each rank by itself, and
nothing would look wrong (so it is in DDP). So would one that is cast or moved,
for autograd forgets the hooks on it. Looking at every module's own dictionaries
and at every parameter before a forward pass costs some tens of microseconds.
"""

from __future__ import annotations

from typing import Any

import msgspec
from torch import nn

from legato.core.errors import RankError
from legato.core.plan import Message, Plan, Slice

__all__ = ["ModuleFingerprint", "extend_plan", "participating_parameters", "trained_parameters"]


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient and are not empty, by name; a shared one once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad and p.numel()}


class ModuleFingerprint:
    """What a module consists of: its modules, its parameters, which of them are frozen."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        tables: list[dict[str, Any]] = [t for m in self._modules for t in (m._modules, m._parameters)]
        self._tables = [(table, list(table.values())) for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._kinds = [(name, p, p.dtype, p.device) for name, p in module.named_parameters()]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._optimized = any(type(m).__module__.startswith("torch._dynamo") for m in self._modules)

    def changed(self) -> bool:
        """Whether a module or parameter is another one now, or a frozen parameter is not frozen any more.

        Raises `RankError` if a parameter was cast or moved.
        """
        for name, p, dtype, device in self._kinds:
            if p.dtype is not dtype or p.device != device:
                raise RankError(
                    f"{name}: {p.dtype} on {p.device}, and was {dtype} on {device}; "
                    "move and cast the model before it is distributed"
                )
        for table, before in self._tables:
            if len(table) != len(before):
                return True
            for a, b in zip(table.values(), before, strict=True):
                if a is not b:
                    return True
        return any(self._empty) or any(p.requires_grad for p in self._frozen)

    def compiled(self) -> bool:
        """Whether `torch.compile` has to do with any of the modules."""
        return self._optimized or any(m._compiled_call_impl is not None for m in self._modules)


def extend_plan(plan: Plan, parameters: dict[str, nn.Parameter]) -> Plan:
    """The plan with one more message at its end, for the parameters that it does not know."""
    known = {piece.tensor for message in plan.messages for piece in message.slices}
    new = tuple(Slice(n, 0, p.numel() * p.element_size()) for n, p in parameters.items() if n not in known)
    return msgspec.structs.replace(plan, messages=(*plan.messages, Message(new))) if new else plan


def participating_parameters(module: nn.Module, before: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters that took part `before`, also those that were frozen since, and those that are new.

    Raises `RankError` if one of them is not the module's any more.
    """
    everything = dict(module.named_parameters())
    for name, p in before.items():
        if everything.get(name) is not p:
            raise RankError(f"parameter {name!r} was replaced after the model was distributed; distribute it last")
    return {**before, **trained_parameters(module)}
