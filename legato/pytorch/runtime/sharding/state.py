"""The states of sharded optimizers: gathered into states of whole parameters, and divided again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from legato.core.errors import InputError
from legato.pytorch.network.agreement import gather_bytes, sum_tensors
from legato.pytorch.private.tensors import without_overrides
from legato.pytorch.runtime.sharding.shards import Shard, Shards

__all__ = ["is_elementwise", "take_state", "uneven", "whole_state"]

State = dict[Any, dict[str, Any]]

#: The kinds of entries of a state: one value for each element; a tensor with one number, on the parameter's device or
#: on the CPU; or a plain value.
_ELEMENTS, _TENSOR, _CPU_TENSOR, _VALUE = "elements", "tensor", "tensor on the CPU", "value"
#: Entries that are one number for the whole parameter, even if the parameter has no dimensions either.
_NUMBERS = ("step", "eta", "mu", "mu_product")


def whole_state(optimizer: Optimizer, shards: Shards | None) -> Any:
    """Return the optimizer's state for whole parameters.

    If the state is sharded, all ranks must call this, and each of them gets the whole state. Raises `RankError` if a
    rank does not call it.
    """
    if shards is None or optimizer not in shards.optimizers:
        return vars(optimizer).get("state")
    state, mine = vars(optimizer)["state"], shards.of(optimizer)
    facts = [(s.piece.slot.name, {k: _fact(s, k, v) for k, v in state.get(s.flat, {}).items()}) for s in mine]
    watchdog = shards.messages.watchdog
    try:
        watchdog.meet("state_dict() of a sharded optimizer")
        return _gathered(shards, state, mine, facts, watchdog.wait)
    except RuntimeError as error:
        raise watchdog.failure("gathering the state of a sharded optimizer", error) from error


def _gathered(shards: Shards, state: State, mine: list[Shard], facts: list[Any], wait: Callable[[Any], None]) -> State:
    """Return the state of whole parameters; `facts` has what this rank tells the other ranks about its shards."""
    known: dict[str, dict[str, Any]] = {}
    for told in gather_bytes(json.dumps(facts).encode(), shards.group, wait):
        for name, entries in json.loads(told):
            known.setdefault(name, {}).update(entries)
    flats = {shard.flat for shard in mine}
    whole: State = {key: entries for key, entries in state.items() if key not in flats}
    parts: list[Tensor] = []
    for slot in shards.slots:
        entries = {key: _from_fact(fact, slot.parameter) for key, fact in known.get(slot.name, {}).items()}
        if entries:
            whole[slot.parameter] = entries
            parts += [v for k, v in entries.items() if known[slot.name][k][0] == _ELEMENTS]
    for shard in mine:
        for key, value in state.get(shard.flat, {}).items():
            if is_elementwise(shard, value):
                shard.piece.of(whole[shard.piece.slot.parameter][key]).view(-1).copy_(value)
    sum_tensors(parts, shards.group, wait)
    return whole


def take_state(optimizer: Optimizer, whole: Any, shards: Shards | None) -> None:
    """Give the optimizer a state of whole parameters; a sharded optimizer keeps only this rank's shards of it."""
    if shards is None:
        if whole is not vars(optimizer).get("state"):
            vars(optimizer)["state"] = defaultdict(dict, whole)
        return
    whole = whole or {}
    # Parameters that were added since the last pass are not sharded yet.
    mine = {slot.parameter: slot.name for slot in shards.slots_of(optimizer)}
    state: State = _ShardedState(mine)
    state.update({key: entries for key, entries in whole.items() if key not in mine})
    for shard in shards.of(optimizer):
        if entries := whole.get(shard.piece.slot.parameter):
            state[shard.flat] = {key: _part(shard, key, value) for key, value in entries.items()}
    vars(optimizer)["state"] = state


class _ShardedState(dict[Any, dict[str, Any]]):
    """The state of a sharded optimizer: its keys are this rank's shards, and the parameters that are not sharded."""

    def __init__(self, sharded: dict[nn.Parameter, str]) -> None:
        super().__init__()
        self._sharded = sharded

    def __missing__(self, key: Any) -> dict[str, Any]:
        if isinstance(key, nn.Parameter) and key in self._sharded:
            raise InputError(
                f"{self._sharded[key]}: its optimizer state is sharded, no rank has all of it: call state_dict() on "
                "all ranks"
            )
        entries: dict[str, Any] = {}
        self[key] = entries
        return entries


def is_elementwise(shard: Shard, value: Any) -> bool:
    """Return whether an entry of a shard's state has one value for each element of the shard."""
    return isinstance(value, Tensor) and value.shape == (shard.piece.stop - shard.piece.start,)


def _fact(shard: Shard, key: str, value: Any) -> tuple[str, str, Any]:
    """Return what other ranks need to know about an entry of a shard's state."""
    if is_elementwise(shard, value):
        return _ELEMENTS, str(value.dtype).removeprefix("torch."), None
    if isinstance(value, Tensor) and value.dim() == 0:
        kind = _TENSOR if value.device == shard.flat.device else _CPU_TENSOR
        return kind, str(value.dtype).removeprefix("torch."), value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return _VALUE, "", value
    raise uneven(shard, key)


def uneven(shard: Shard, key: str) -> InputError:
    """Return the error for an entry that has several values, but not one for each element of the shard."""
    return InputError(f"the optimizer's state {key!r} of {shard.piece.slot.name!r} is not one value for each element")


def _from_fact(fact: tuple[str, str, Any], parameter: nn.Parameter) -> Any:
    kind, dtype, value = fact
    if kind == _ELEMENTS:
        with without_overrides():  # with the parameter's strides, as in torch's own states
            return torch.zeros_like(parameter, dtype=getattr(torch, dtype))
    if kind == _VALUE:
        return value
    return torch.tensor(value, dtype=getattr(torch, dtype), device=parameter.device if kind == _TENSOR else "cpu")


def _part(shard: Shard, key: str, value: Any) -> Any:
    """Return this rank's part of an entry of a whole parameter's state."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == shard.piece.slot.parameter.shape and (value.dim() or key not in _NUMBERS):
        return shard.piece.of(value).reshape(-1).clone()
    if value.dim():
        raise uneven(shard, key)
    return value.clone()
