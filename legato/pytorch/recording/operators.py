"""Finds what an operator call reads and writes, from the operator's schema and the tensors in its arguments."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from legato.pytorch.private.tensors import operator_schema

__all__ = ["Operator", "operator_of", "tensors"]

_HOST_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_RUNNING_STATISTICS = {"running_mean", "running_var"}


class Operator(NamedTuple):
    """The properties of an operator, independent of a call.

    `name` has no namespace and no overload. `writes` has the (position, keyword) of each argument that the operator
    changes in place. `random` operators advance a random generator. `host` operators return a value to Python, so every
    later op may depend on this value.
    """

    name: str
    writes: tuple[tuple[int, str], ...]
    random: bool
    host: bool

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        """Yield the tensors that an operator writes, from the arguments of its call."""
        for position, keyword in self.writes:
            value = args[position] if position < len(args) else kwargs.get(keyword)
            yield from tensors(value)


@functools.cache
def operator_of(func: Any) -> Operator:
    """Return the properties of `func` (an OpOverload, or a higher-order operator), from its schema.

    Batch norm writes the running statistics, but its schemas do not say so; therefore these arguments are added.
    """
    schema = operator_schema(func)
    if schema is None:
        return Operator(str(func.name()), (), random=False, host=False)
    name = schema.name.split("::")[-1]
    hidden = _RUNNING_STATISTICS if "batch_norm" in name and "backward" not in name else set()
    writes = tuple(
        (i, arg.name)
        for i, arg in enumerate(schema.arguments)
        if (arg.alias_info is not None and arg.alias_info.is_write) or arg.name in hidden
    )
    tags = set(func.tags)
    return Operator(name, writes, random=torch.Tag.nondeterministic_seeded in tags, host=bool(tags & _HOST_TAGS))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an argument or a result: the value itself, or the tensors in its lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
