"""Checkpoints of sharded optimizers: each rank saves and loads its own shards, and no rank has the whole state.

[Note: boxes] `torch.distributed.checkpoint` describes a rank's part of a tensor by boxes: offsets and sizes in each
dimension. A shard is a range of a parameter's elements in the order of its memory, row by row of its (permuted)
dimensions. A shard of d dimensions has at most 2 d - 1 boxes: one of whole rows, and at most d - 1 for each of the
partial rows at its beginning and end, which are divided in the same way. Each box is a view of the shard. An entry is
saved under the name that torch's `get_optimizer_state_dict` gives it, with the parameter's shape. So a checkpoint does
not depend on the plan: it can be loaded by any number of ranks, under any plan, and by optimizers that are not sharded.
A sharded optimizer can also load their checkpoints.

[Note: entries without values] A program must name the entries that it wants to load, but a new optimizer has no
entries. So legato runs a step of the user's optimizer on stand-ins (parameters of two elements) to learn the names and
kinds of entries. Entries get memory when values are loaded into them. If a parameter has had no gradient, the optimizer
has no entries for it, and a checkpoint stores None under their names.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from legato.core.errors import InputError
from legato.core.text import count
from legato.pytorch.network.agreement import raise_together
from legato.pytorch.parameters import named_parameters
from legato.pytorch.private.optimizers import begin_state, begins_with_step
from legato.pytorch.private.tensors import tensor_without_memory
from legato.pytorch.runtime.sharding.shards import Shard, Shards, shards_of
from legato.pytorch.runtime.sharding.state import is_elementwise, uneven
from legato.pytorch.runtime.waiting.update import Update, reducers_of, users_class

__all__ = ["LocalShards", "OptimizerState", "boxes"]

Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the elements `start` to `stop` (exclusive) of a row-major tensor as boxes (offsets, sizes), in order."""
    if not shape:
        yield (), ()
        return
    if start >= stop:
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row) if start < first * row else ()
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row) if last * row < stop else ()


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


class LocalShards(Tensor):
    """A tensor of which this rank has only its shards, as `torch.distributed.checkpoint` saves and loads it.

    `ranges` has the elements `start` to `stop` (exclusive) of each shard. They are counted in row-major order, after
    `order` has permuted the dimensions (None does not permute). `flats` has the shards' values, or None while there are
    none. If `flats` is None, every element is saved with the value `begins`. If `begins` is None as well, None is saved
    in place of the tensor.
    """

    ranges: list[tuple[int, int]]
    flats: list[Tensor] | None
    begins: Tensor | None
    order: Sequence[int] | None

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: Any, *_: Any) -> LocalShards:
        return cast(LocalShards, tensor_without_memory(cls, shape, dtype, device))

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: Any,
        ranges: Sequence[tuple[int, int]],
        flats: Sequence[Tensor] | None = None,
        begins: Tensor | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        self.ranges, self.begins, self.order = list(ranges), begins, order
        self.flats = None if flats is None else list(flats)

    def _boxes(self) -> Iterator[tuple[Box, int, int]]:
        """Yield each box, the index of its shard, and the position in that shard at which the box begins."""
        order = self.order or range(self.dim())
        back = sorted(range(self.dim()), key=order.__getitem__)
        for i, (start, stop) in enumerate(self.ranges):
            at = 0
            for offsets, sizes in boxes([self.shape[d] for d in order], start, stop):
                yield (tuple(offsets[d] for d in back), tuple(sizes[d] for d in back)), i, at
                at += math.prod(sizes)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        if self.flats is None and self.begins is None:
            return [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)]
        kind = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, kind, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for (offsets, sizes), _, _ in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor | None:
        """Return the memory of a box; None for a tensor without values, for which no box is requested."""
        if index.offset is None:
            return None
        if self.flats is None:
            begins = torch.zeros((), dtype=self.dtype, device=self.device) if self.begins is None else self.begins
            self.flats = [begins.expand(b - a).clone() for a, b in self.ranges]
        for (offsets, sizes), i, at in self._boxes():
            if offsets == index.offset:
                flat, order = self.flats[i][at : at + math.prod(sizes)], self.order or range(self.dim())
                back = sorted(range(self.dim()), key=order.__getitem__)
                return flat.view([sizes[d] for d in order]).permute(back)
        raise KeyError(index)

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.new_empty.default:  # `async_save` makes a copy, and then copies the attributes
            tensor, shape = args[:2]
            options = kwargs or {}
            return cls(shape, options.get("dtype") or tensor.dtype, options.get("device") or tensor.device, ())
        raise InputError(f"{func}: only this rank's shards of the tensor are here, for torch.distributed.checkpoint")

    def __repr__(self, **_: Any) -> str:
        return f"LocalShards({tuple(self.shape)}, {self.dtype}, ranges={self.ranges})"


class OptimizerState:
    """The state of an optimizer, to be saved and loaded by `torch.distributed.checkpoint`.

        state = {"model": model, "optimizer": legato.OptimizerState(model, optimizer)}
        torch.distributed.checkpoint.save(state, checkpoint_id="...")

    If the optimizer is sharded, each rank saves and loads only its own shards. The checkpoint has the form that torch's
    `get_optimizer_state_dict` returns. So the checkpoint can be loaded on a different number of ranks, under another
    plan, sharded or not, and by torch without legato. `model` is the model that `legato.distribute` has returned, or
    any other model whose optimizers are not sharded.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the entries by parameter name, and the groups, for `torch.distributed.checkpoint` to save or to fill.

        Nothing is sent. Raises `InputError` if the optimizer has parameters that are not the model's, or a state that
        cannot be sharded.
        """
        shards = self._shards()
        if shards is None:
            return get_optimizer_state_dict(self._model, self._optimizer)
        names, state = self._names(), vars(self._optimizer)["state"]
        first, begun = _first_entries(self._optimizer, shards), _begun_entries(self._optimizer, shards)
        found = {
            names[p]: _entries(held, state, first[p], begun[p]) for p, held in _held(self._optimizer, shards).items()
        }
        for p in names:
            if id(p) not in shards.by_parameter and state.get(p):
                found[names[p]] = dict(state[p])
        groups = [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
            | {"params": [names[p] for p in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        return {"state": found, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict` into the optimizer; `torch.distributed.checkpoint` calls this on all ranks.

        If the checkpoint is of another optimizer or lacks some of the entries of a parameter, raises `RankError` on all
        ranks, and leaves the settings as they are.
        """
        shards = self._shards()
        if shards is None:
            _load_whole(self._model, self._optimizer, state_dict)
            return
        problem, state, settings = "", {}, []
        try:
            settings = self._settings(state_dict["param_groups"])
            state = self._state(state_dict["state"], _first_entries(self._optimizer, shards, settings), shards)
        except InputError as error:
            problem = str(error)
        raise_together(problem, shards.group)
        for group, changed in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(changed)
        vars(self._optimizer)["state"] = state

    def _shards(self) -> Shards | None:
        """Bring everything up to date, and return the optimizer's shards; None if it is not sharded now."""
        for reducer in reducers_of(self._optimizer):
            reducer.settle()
        return shards_of(self._optimizer)

    def _names(self) -> dict[nn.Parameter, str]:
        """Return the names of the optimizer's parameters."""
        names = {p: name for name, p in named_parameters(self._model).items()}
        mine = [p for group in self._optimizer.param_groups for p in group["params"]]
        if any(p not in names for p in mine):
            raise InputError("optimizer: it has parameters that are not the model's, and have no name in a checkpoint")
        return {p: names[p] for p in mine}

    def _settings(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the settings of the loaded groups; raise `InputError` if a group has other parameters here."""
        names = self._names()
        for i, (group, other) in enumerate(zip(self._optimizer.param_groups, saved, strict=True)):
            mine = [names[p] for p in group["params"]]
            if mine != other["params"]:
                both = mine, other["params"]
                here, there = (f"{count(len(found), 'parameter')}, {found[:1]} ..." for found in both)
                raise InputError(f"group {i} of the optimizer: {here}; in the checkpoint {there}")
        return [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in saved]

    def _state(
        self, saved: dict[str, Any], first: dict[nn.Parameter, Any], shards: Shards
    ) -> dict[Any, dict[str, Any]]:
        """Return the loaded entries, by shard for sharded parameters and by parameter for all others."""
        names = self._names()
        state: dict[Any, Any] = defaultdict(dict)
        for p, held in _held(self._optimizer, shards).items():
            entries = saved[names[p]]
            if lacking := sorted(first[p].keys() - entries.keys()):
                raise InputError(
                    f"{names[p]}: with the checkpoint's settings, the optimizer keeps {lacking[0]!r}, and with its own "
                    "it does not: make the optimizer with the settings with which it was saved"
                )
            loaded = {key for key, value in entries.items() if _has_values(value)}
            if not loaded or ("step" in loaded and _is_new(self._optimizer, entries)):
                continue
            if empty := [key for key, value in entries.items() if isinstance(value, LocalShards) and key not in loaded]:
                raise InputError(f"{names[p]}: the checkpoint has {min(loaded)!r} of its state, and no {empty[0]!r}")
            for i, shard in enumerate(held):
                state[shard.flat] = {key: _part(value, i, first[p].get(key)) for key, value in entries.items()}
        state.update(
            (p, dict(saved[name])) for p, name in names.items() if id(p) not in shards.by_parameter and name in saved
        )
        return state


def _held(optimizer: Optimizer, shards: Shards) -> dict[nn.Parameter, list[Shard]]:
    """Return this rank's shards, by the parameter to which they belong."""
    held: dict[nn.Parameter, list[Shard]] = {}
    for shard in shards.of(optimizer):
        held.setdefault(shard.piece.slot.parameter, []).append(shard)
    return held


def _first_entries(
    optimizer: Any, shards: Shards, settings: Sequence[dict[str, Any]] | None = None
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the entries that the optimizer's first step makes for each parameter.

    The entries come from a step on stand-ins of two elements. If given, `settings` are used in this step instead of the
    settings of the optimizer's groups.
    """
    blank, stand_ins = _blank(optimizer, shards)
    if settings is not None:
        blank.param_groups = [{**group, **new} for group, new in zip(optimizer.param_groups, settings, strict=True)]
    Update(blank, users_class(optimizer)).apply_to_shards((stand_in, p) for p, stand_in in stand_ins.items())
    return {p: vars(blank)["state"].get(stand_in, {}) for p, stand_in in stand_ins.items()}


def _begun_entries(optimizer: Any, shards: Shards) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the entries that stand-ins of two elements have before their first step; none if these are unknown."""
    blank, stand_ins = _blank(optimizer, shards)
    for group in optimizer.param_groups if begins_with_step(blank) else ():
        begin_state(blank, {**group, "params": [stand_ins[p] for p in group["params"] if p in stand_ins]})
    return {p: vars(blank)["state"].get(stand_in, {}) for p, stand_in in stand_ins.items()}


def _blank(optimizer: Any, shards: Shards) -> tuple[Any, dict[nn.Parameter, nn.Parameter]]:
    """Return the optimizer without a state, and for each parameter a stand-in with two elements and a zero gradient."""
    stand_ins = {}
    for p in _held(optimizer, shards):
        stand_ins[p] = nn.Parameter(torch.zeros(2, dtype=p.dtype, device=p.device))
        stand_ins[p].grad = torch.zeros_like(stand_ins[p])
        stand_ins[p].shard_of = p  # pyrefly: ignore[missing-attribute]
    return optimizer._with_state({}), stand_ins


def _entries(
    held: list[Shard], state: dict[Any, dict[str, Any]], first: dict[str, Any], begun: dict[str, Any]
) -> dict[str, Any]:
    """Return the entries of a parameter. If the parameter's shards have no state yet, the entries have no values."""
    mine = state.get(held[0].flat)
    if not mine:
        known = begun if begun.keys() == first.keys() else {}
        return {key: _without_values(value, held, known.get(key)) for key, value in first.items()}
    if late := sorted(mine.keys() - first.keys()):
        raise InputError(
            f"{held[0].piece.slot.name}: its state {late[0]!r} is not there after a first step, and could not be "
            "loaded; save optimizer.state_dict()"
        )
    found: dict[str, Any] = {}
    for key, value in mine.items():
        if is_elementwise(held[0], value):
            flats = [state[shard.flat][key] for shard in held]
            found[key] = _elements(value, held, flats)
        elif isinstance(value, Tensor) and value.dim():
            raise uneven(held[0], key)
        else:
            found[key] = value
    return found


def _elements(
    value: Tensor, held: list[Shard], flats: list[Tensor] | None, begins: Tensor | None = None
) -> LocalShards:
    """Return an entry with one value for each element of a parameter; it has the dtype and device of `value`."""
    slot, ranges = held[0].piece.slot, [(shard.piece.start, shard.piece.stop) for shard in held]
    return LocalShards(slot.parameter.shape, value.dtype, value.device, ranges, flats, begins, slot.order)


def _without_values(value: Any, held: list[Shard], begins: Any) -> LocalShards:
    """Return an entry without values, into which a checkpoint can be loaded; `value` is a stand-in's entry.

    `begins` is the stand-in's entry before its first step, or None if it is unknown.
    """
    begins = begins.flatten()[0] if isinstance(begins, Tensor) else None
    if isinstance(value, Tensor) and value.dim():
        return _elements(value, held, None, begins)
    number = value if isinstance(value, Tensor) else torch.zeros((), dtype=torch.float64)
    return LocalShards((), number.dtype, number.device, [(0, 1)], None, begins)


def _has_values(value: Any) -> bool:
    return value.flats is not None if isinstance(value, LocalShards) else value is not None


def _is_new(optimizer: Optimizer, entries: dict[str, Any]) -> bool:
    """Return whether a parameter has never had a gradient: its entries have the values of before the first step."""
    step = entries.get("step")
    step = step.flats[0] if isinstance(step, LocalShards) and step.flats else step
    return step is not None and begins_with_step(optimizer) and float(step) == 0


def _part(value: Any, i: int, like: Any) -> Any:
    """Return shard i's part of an entry (or a copy of a single number); `like` is the same entry of a stand-in."""
    if isinstance(value, LocalShards):
        assert value.flats is not None
        is_number = isinstance(like, Tensor) and not like.dim()
        return value.flats[0].view(()).clone() if is_number else value.flats[i]
    return value.clone() if isinstance(value, Tensor) else value


def _load_whole(model: nn.Module, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state of whole parameters, except the entries of parameters that have never had a gradient."""
    given = {
        name: entries
        for name, entries in state_dict["state"].items()
        if any(value is not None for value in entries.values()) and not _is_new(optimizer, entries)
    }
    options = StateDictOptions(strict=False)
    set_optimizer_state_dict(model, optimizer, {**state_dict, "state": given}, options=options)
