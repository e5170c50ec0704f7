"""The modules of all Inception models. A table lists the branches of a module, whose outputs are concatenated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from legato.zoo.builder import Value
from legato.zoo.image import Padding, concat, pool

__all__ = ["Branch", "Conv", "Fork", "Pool", "Unit", "module"]

#: A function that adds a convolution and the layers after it: (value, name, channels, kernel, stride, padding).
Unit: TypeAlias = "Callable[[Value, str, int, int | tuple[int, int], int, Padding], Value]"


class Conv(NamedTuple):
    """A convolution of a branch."""

    channels: int
    kernel: int | tuple[int, int] = 1
    stride: int = 1


class Pool(NamedTuple):
    """A 3 x 3 pooling."""

    stride: int = 1


class Fork(NamedTuple):
    """Several convolutions of the same value; their outputs are concatenated."""

    convs: tuple[Conv, ...]


Branch: TypeAlias = "Sequence[Conv | Pool | Fork]"


def module(x: Value, name: str, branches: Sequence[Branch], unit: Unit, *, reduction: Padding = "same") -> Value:
    """An Inception module; `reduction` is the padding of all layers with a stride above 1."""
    with x.net.scope(name):
        return concat([_branch(x, f"branch{i}", steps, unit, reduction) for i, steps in enumerate(branches)], "concat")


def _branch(x: Value, name: str, steps: Branch, unit: Unit, reduction: Padding) -> Value:
    for i, step in enumerate(steps):
        if isinstance(step, Fork):
            x = concat([unit(x, f"{name}/conv{i}_{j}", *c, "same") for j, c in enumerate(step.convs)], f"{name}/concat")
            continue
        padding: Padding = "same" if step.stride == 1 else reduction
        if isinstance(step, Pool):
            x = pool(x, f"{name}/pool{i}", 3, step.stride, padding)
        else:
            x = unit(x, f"{name}/conv{i}", *step, padding)
    return x
