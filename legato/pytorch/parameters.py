"""The parameters of a model whose gradients are averaged, and how changes of the model are detected.

[Note: fingerprint] A parameter that is added, replaced or unfrozen after the
model was distributed would be trained on each rank separately, and no error
would show it (this happens in DDP). The same holds for a parameter that is cast
or moved, since autograd drops the hooks on it. So before each forward pass the
dictionaries of all modules and all parameters are compared with what was
distributed, which takes some tens of microseconds.
"""

from __future__ import annotations

from typing import Any

import msgspec
from torch import nn

from legato.core.errors import RankError
from legato.core.plan import Message, Plan, Slice
from legato.pytorch._private import (
    ignored_parameters,
    is_compiled,
    is_compiled_in_place,
    module_tables,
    without_overrides,
)

__all__ = [
    "ModuleFingerprint",
    "extend_plan",
    "participating_parameters",
    "sparse_parameters",
    "trained_parameters",
]


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters with dense gradients, by name; a shared one appears once.

    Without those that are empty, those that DDP was told to ignore, and those
    of `sparse_parameters`.
    """
    left_out = {*ignored_parameters(module), *sparse_parameters(module)}
    return {n: p for n, p in module.named_parameters() if p.requires_grad and p.numel() and n not in left_out}


def sparse_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of embeddings that were made with `sparse=True`, by name.

    Without those that other modules share: their gradients are dense.
    """
    weights: set[int] = set()
    others: set[int] = set()
    for m in module.modules():
        sparse = isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
        (weights if sparse else others).update(map(id, m.parameters(recurse=False)))
    if not weights:
        return {}
    ignored = ignored_parameters(module)
    return {
        n: p
        for n, p in module.named_parameters()
        if id(p) in weights and id(p) not in others and p.requires_grad and n not in ignored
    }


class ModuleFingerprint:
    """The modules and parameters of a model, and which of these are frozen, at the time of creation."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        tables: list[dict[str, Any]] = [t for m in self._modules for t in module_tables(m, "modules", "parameters")]
        self._tables = [(table, list(table.values())) for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._kinds = [(name, p, p.dtype, p.device) for name, p in module.named_parameters()]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._compiled = any(map(is_compiled, self._modules))

    def changed(self) -> bool:
        """Whether a module or parameter was added, removed or replaced, or a frozen parameter was unfrozen.

        Raises `RankError` if a parameter was cast or moved.
        """
        with without_overrides():
            for name, p, dtype, device in self._kinds:
                if p.dtype is not dtype or p.device != device:
                    raise RankError(
                        f"{name}: {p.dtype} on {p.device} (expected {dtype} on {device}, as when the model was "
                        "distributed; move and cast it before)"
                    )
        for table, before in self._tables:
            if len(table) != len(before):
                return True
            for a, b in zip(table.values(), before, strict=True):
                if a is not b:
                    return True
        return any(self._empty) or any(p.requires_grad for p in self._frozen)

    def compiled(self) -> bool:
        """Whether `torch.compile` was applied to any of the modules."""
        return self._compiled or any(map(is_compiled_in_place, self._modules))


def extend_plan(plan: Plan, parameters: dict[str, nn.Parameter]) -> Plan:
    """Add one message to the plan, with the parameters that are not in it: the last one, or the last of its halves."""
    known = {piece.tensor for message in plan.messages for piece in message.slices}
    new = tuple(Slice(n, 0, p.numel() * p.element_size()) for n, p in parameters.items() if n not in known)
    if not new:
        return plan
    if plan.shard == "none":
        return msgspec.structs.replace(plan, messages=(*plan.messages, Message(new)))
    first = [message for message in plan.messages if message.kind == "reduce_scatter"]
    second = [message for message in plan.messages if message.kind == "all_gather"]
    halves = Message(new, "reduce_scatter"), Message(new, "all_gather")
    return msgspec.structs.replace(plan, messages=(*first, halves[0], *second, halves[1]))


def participating_parameters(module: nn.Module, before: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters of `before`, including those frozen since, and all new trained ones, by name.

    Raises `RankError` if the module does not have one of them any more.
    """
    everything = dict(module.named_parameters())
    for name, p in before.items():
        if everything.get(name) is not p:
            raise RankError(f"parameter {name!r} was replaced after the model was distributed; distribute it last")
    return {**before, **trained_parameters(module)}
