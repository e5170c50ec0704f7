"""A network under construction; the layers of `image` and `sequence` grow it, and follow the shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from legato.zoo.network import Gradient, Layer, Network, Variable

__all__ = ["Builder", "Value", "flatten", "reshape"]


@dataclass(frozen=True, slots=True)
class Value:
    """What a layer computes, of one sample; `layer` is None for the samples themselves."""

    net: Builder
    layer: int | None
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def reshape(x: Value, *shape: int) -> Value:
    """The same values, or a slice of them, in another shape: a view, which costs nothing."""
    return replace(x, shape=shape)


def flatten(x: Value) -> Value:
    """All values of a sample in one row."""
    return reshape(x, x.size)


class Builder:
    """Collects layers and variables; `build` makes the network of them."""

    def __init__(self, name: str, batch_size: int) -> None:
        self._name = name
        self._batch_size = batch_size
        self._layers: list[Layer] = []
        self._variables: list[Variable] = []
        self._scope = ""

    def input(self, *shape: int) -> Value:
        """The samples, each of this shape: (height, width, channels) of an image, (length,) of a text."""
        return Value(self, None, shape)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names of layers and variables made inside begin with `name/`."""
        outer = self._scope
        self._scope = f"{outer}{name}/"
        try:
            yield
        finally:
            self._scope = outer

    def variable(self, name: str, *shape: int, trainable: bool = True) -> int:
        """A new variable's index."""
        self._variables.append(Variable(self._scope + name, shape, trainable))
        return len(self._variables) - 1

    def layer(
        self,
        name: str,
        gradient: Gradient,
        inputs: Sequence[Value],
        shape: Sequence[int],
        *,
        variables: Sequence[int] = (),
        flops: int = 0,
        moved: int | None = None,
    ) -> Value:
        """A new layer's output, of this shape. By default it moves its inputs and its output once."""
        outputs = math.prod(shape)
        if moved is None:
            moved = sum(x.size for x in inputs) + outputs
        known = tuple(dict.fromkeys(x.layer for x in inputs if x.layer is not None))
        self._layers.append(Layer(self._scope + name, known, tuple(variables), gradient, flops, moved, outputs))
        return Value(self, len(self._layers) - 1, tuple(shape))

    def build(self) -> Network:
        """The network as it stands."""
        return Network(self._name, self._batch_size, tuple(self._layers), tuple(self._variables))
