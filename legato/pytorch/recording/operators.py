"""What one operator call reads and writes: from its schema, and from the tensors it was given."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Operator", "operator_of", "tensors"]

_HOST_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_RUNNING_STATISTICS = {"running_mean", "running_var"}


class Operator(NamedTuple):
    """An operator, without the tensors of one call.

    `name` is without namespace and overload. `writes` are the arguments that
    it changes in place, as (position, keyword). `random` operators advance a
    random generator; `host` operators hand a value back to Python, on which
    everything later may depend.
    """

    name: str
    writes: tuple[tuple[int, str], ...]
    random: bool
    host: bool

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        """The tensors among the arguments of a call that the operator writes to."""
        for position, keyword in self.writes:
            value = args[position] if position < len(args) else kwargs.get(keyword)
            yield from tensors(value)


@functools.cache
def operator_of(func: Any) -> Operator:
    """Look up what the schema of `func` (an OpOverload, or a higher-order operator) says.

    Batch norm is the one family whose schema hides a write: to its running
    statistics.
    """
    schema = getattr(func, "_schema", None)
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
    """The tensors in an argument or result: itself, or those in its lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
