"""The parts of a model (a graph of layers, and variables), and a builder that tracks shapes.

The functions in the modules `image` and `sequence` add layers to a `Builder`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from legato.core.job import LanguageModel
from legato.zoo.device import PRECISIONS

__all__ = ["DEFAULT_DEVICE", "Builder", "Gradient", "Layer", "Model", "Value", "Variable", "flatten", "reshape"]

#: The papers' models are trained in 32-bit floating point, by default on this device.
DEFAULT_DEVICE = "v100"

#: How a layer is differentiated:
#: *split*: one op computes the gradient of its input, and another the gradients of its variables, which no op waits
#: for (convolution, dense, LSTM);
#: *fused*: one op computes all gradients (normalization, pooling, activation, attention, loss);
#: *weights*: only its variables have gradients, and its input has none (embedding);
#: *identity*: the gradient of its output is also the gradient of each input, which costs nothing (addition).
Gradient = Literal["split", "fused", "weights", "identity"]


@dataclass(frozen=True, slots=True)
class Variable:
    """An array of the model. A variable is trained, unless it is a moving mean or variance of a batch normalization."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, in 32-bit floating point."""
        return PRECISIONS["fp32"] * self.size


@dataclass(frozen=True, slots=True)
class Layer:
    """One forward computation, on one sample.

    `inputs` are indices of earlier layers (the samples are not listed), and `variables` are indices of the trainable
    variables that the layer reads. In `flops`, a multiply-add of a matrix product counts as two operations. `moved` is
    the number of values that the layer reads and writes, and `outputs` is the number of values that it writes. `block`
    names the part of the model that is computed again as a whole if activations are recomputed; `block` is empty if the
    layer is in no block.
    """

    name: str
    inputs: tuple[int, ...]
    variables: tuple[int, ...]
    gradient: Gradient
    flops: int
    moved: int
    outputs: int
    block: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """A model; layers are in the order of the forward pass, variables in the order of their creation.

    `batch_size`, `device` and `precision` are the defaults for training; `language` is the shape of a language model.
    """

    name: str
    batch_size: int
    layers: tuple[Layer, ...]
    variables: tuple[Variable, ...]
    device: str = DEFAULT_DEVICE
    precision: str = "fp32"
    language: LanguageModel | None = None

    @property
    def trainable(self) -> tuple[Variable, ...]:
        """The variables that have a gradient."""
        return tuple(variable for variable in self.variables if variable.trainable)

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(variable.size for variable in self.trainable)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients, in the model's default precision."""
        return PRECISIONS[self.precision] * self.parameters

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass of one sample (a multiply-add counts as two)."""
        return sum(layer.flops for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Value:
    """The output of a layer for one sample; `layer` is None for the samples themselves."""

    net: Builder
    layer: int | None
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def reshape(x: Value, *shape: int) -> Value:
    """Return the values, or a slice of the values, in another shape. No values are moved, so this takes no time."""
    return replace(x, shape=shape)


def flatten(x: Value) -> Value:
    """Return all values of a sample in one row."""
    return reshape(x, x.size)


class Builder:
    """A collector of layers and variables; `build` returns the model."""

    def __init__(self, name: str, batch_size: int, *, device: str = DEFAULT_DEVICE, precision: str = "fp32") -> None:
        self._name = name
        self._batch_size = batch_size
        self._device = device
        self._precision = precision
        self._layers: list[Layer] = []
        self._variables: list[Variable] = []
        self._scope = ""
        self._block = ""

    def input(self, *shape: int) -> Value:
        """Return the samples, each of this shape: (height, width, channels) for images, (length,) for texts."""
        return Value(self, None, shape)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of layers and variables added in this context with `name/`."""
        outer = self._scope
        self._scope = f"{outer}{name}/"
        try:
            yield
        finally:
            self._scope = outer

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        """Open a scope of this name; its layers are computed again together if activations are recomputed."""
        with self.scope(name):
            self._block = self._scope.removesuffix("/")
            try:
                yield
            finally:
                self._block = ""

    def variable(self, name: str, *shape: int, trainable: bool = True) -> int:
        """Add a variable and return its index."""
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
        """Add a layer; return its output of this shape. By default, it reads each input and writes the output once."""
        outputs = math.prod(shape)
        if moved is None:
            moved = sum(x.size for x in inputs) + outputs
        known = tuple(dict.fromkeys(x.layer for x in inputs if x.layer is not None))
        self._layers.append(
            Layer(self._scope + name, known, tuple(variables), gradient, flops, moved, outputs, self._block)
        )
        return Value(self, len(self._layers) - 1, tuple(shape))

    def build(self) -> Model:
        """Return the model."""
        return Model(
            self._name,
            self._batch_size,
            tuple(self._layers),
            tuple(self._variables),
            device=self._device,
            precision=self._precision,
        )
