"""What a model is made of: its layers, as a graph, and its variables, in the order of their creation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["FLOAT_BYTES", "Gradient", "Layer", "Network", "Variable"]

#: All models are trained in 32-bit floating point, as in the papers.
FLOAT_BYTES = 4

#: How a layer is differentiated:
#: *split*: the gradients of its input and of its variables are two ops, the second a leaf (convolution, dense, LSTM);
#: *fused*: one op computes them all (normalization, pooling, activation, attention, loss);
#: *weights*: its input has no gradient, only its variables have (embedding);
#: *identity*: its gradient is the gradient of each of its inputs, and costs nothing (addition).
Gradient = Literal["split", "fused", "weights", "identity"]


@dataclass(frozen=True, slots=True)
class Variable:
    """One array that the model keeps: trained, or (moving mean and variance of a batch normalization) not."""

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
        return FLOAT_BYTES * self.size


@dataclass(frozen=True, slots=True)
class Layer:
    """One forward computation, on one sample.

    `inputs` are indices of earlier layers (the samples themselves are not among
    them), `variables` indices of trainable variables that it reads. `flops`
    counts the multiply-adds of matrix products, two each; `moved` and `outputs`
    are the values that it reads and writes, and those that it writes.
    """

    name: str
    inputs: tuple[int, ...]
    variables: tuple[int, ...]
    gradient: Gradient
    flops: int
    moved: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Network:
    """A model; layers in the order of the forward pass, variables in the order of their creation."""

    name: str
    batch_size: int
    layers: tuple[Layer, ...]
    variables: tuple[Variable, ...]

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
        """Bytes of all gradients."""
        return FLOAT_BYTES * self.parameters

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass of one sample (a multiply-add is two)."""
        return sum(layer.flops for layer in self.layers)
