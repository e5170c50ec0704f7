"""The layers of convolutional networks, on values of shape (height, width, channels).

Variables are created in TensorFlow's order and have its names: weights, then biases, or the beta, gamma, moving mean
and moving variance of a batch normalization. Dropout is left out, since it has no variables and is fused with its
neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from legato.zoo.builder import Value

__all__ = [
    "Padding",
    "activation",
    "add",
    "batch_norm",
    "concat",
    "conv",
    "conv_norm",
    "dense",
    "depthwise",
    "global_pool",
    "local_response_norm",
    "loss",
    "pool",
]

#: TensorFlow's padding. With *same*, the output has the input's size, divided by the stride and rounded up; *valid*
#: uses only whole windows.
Padding = Literal["same", "valid"]
Kernel = int | tuple[int, int]


def _pair(kernel: Kernel) -> tuple[int, int]:
    return (kernel, kernel) if isinstance(kernel, int) else kernel


def _window(x: Value, kernel: Kernel, stride: int, padding: Padding) -> tuple[int, int]:
    """Return the height and width of the output of a sliding window."""
    sizes = (
        math.ceil(size / stride) if padding == "same" else (size - k) // stride + 1
        for size, k in zip(x.shape[:2], _pair(kernel), strict=True)
    )
    height, width = sizes
    return height, width


def conv(
    x: Value,
    name: str,
    channels: int,
    kernel: Kernel,
    stride: int = 1,
    padding: Padding = "same",
    *,
    bias: bool = True,
) -> Value:
    """Add a convolution with weights (height, width, in, out), and biases (out)."""
    (kh, kw), depth, net = _pair(kernel), x.shape[2], x.net
    height, width = _window(x, kernel, stride, padding)
    variables = [net.variable(f"{name}/weights", kh, kw, depth, channels)]
    if bias:
        variables.append(net.variable(f"{name}/biases", channels))
    flops = 2 * kh * kw * depth * channels * height * width
    return net.layer(name, "split", [x], (height, width, channels), variables=variables, flops=flops)


def depthwise(x: Value, name: str, multiplier: int, kernel: Kernel, stride: int = 1) -> Value:
    """Add a separate convolution of each channel into `multiplier` channels, without biases."""
    (kh, kw), depth = _pair(kernel), x.shape[2]
    height, width = _window(x, kernel, stride, "same")
    weights = x.net.variable(f"{name}/depthwise_weights", kh, kw, depth, multiplier)
    shape = (height, width, depth * multiplier)
    return x.net.layer(name, "split", [x], shape, variables=[weights], flops=2 * kh * kw * math.prod(shape))


def batch_norm(x: Value, name: str, *, gamma: bool = False) -> Value:
    """Add a batch normalization with beta, optionally gamma, and two moving averages that are not trained."""
    net, depth = x.net, x.shape[-1]
    trained = ["beta", "gamma"] if gamma else ["beta"]
    variables = [net.variable(f"{name}/{vector}", depth) for vector in trained]
    for average in ("moving_mean", "moving_variance"):
        net.variable(f"{name}/{average}", depth, trainable=False)
    return net.layer(name, "fused", [x], x.shape, variables=variables, moved=3 * x.size)  # read twice, written once


def conv_norm(
    x: Value,
    name: str,
    channels: int,
    kernel: Kernel,
    stride: int = 1,
    padding: Padding = "same",
    *,
    gamma: bool = False,
    relu: bool = True,
) -> Value:
    """Add a convolution without biases, a batch normalization, and a ReLU if `relu`."""
    x = conv(x, name, channels, kernel, stride, padding, bias=False)
    x = batch_norm(x, f"{name}/bn", gamma=gamma)
    return activation(x, f"{name}/relu") if relu else x


def activation(x: Value, name: str) -> Value:
    """Add an elementwise activation such as ReLU, GELU or tanh."""
    return x.net.layer(name, "fused", [x], x.shape)


def local_response_norm(x: Value, name: str) -> Value:
    """Add a local response normalization, which also keeps its divisor for the backward pass."""
    return x.net.layer(name, "fused", [x], x.shape, moved=3 * x.size)


def pool(x: Value, name: str, kernel: Kernel, stride: int = 1, padding: Padding = "same") -> Value:
    """Add a maximum or average over a window."""
    return x.net.layer(name, "fused", [x], (*_window(x, kernel, stride, padding), x.shape[2]))


def global_pool(x: Value, name: str) -> Value:
    """Add an average of every channel, with an output of shape (channels,)."""
    return x.net.layer(name, "fused", [x], x.shape[2:])


def dense(x: Value, name: str, units: int, *, bias: bool = True, weights: int | None = None) -> Value:
    """Add a fully connected layer on the last axis. To reuse a variable of another layer, give its index: `weights`."""
    net, width = x.net, x.shape[-1]
    variables = [net.variable(f"{name}/weights", width, units) if weights is None else weights]
    if bias:
        variables.append(net.variable(f"{name}/biases", units))
    shape = (*x.shape[:-1], units)
    return net.layer(name, "split", [x], shape, variables=variables, flops=2 * width * math.prod(shape))


def add(x: Value, y: Value, name: str) -> Value:
    """Add the sum of two branches."""
    return x.net.layer(name, "identity", [x, y], x.shape)


def concat(branches: Sequence[Value], name: str) -> Value:
    """Concatenate branches along the last axis."""
    first = branches[0]
    return first.net.layer(name, "fused", branches, (*first.shape[:-1], sum(x.shape[-1] for x in branches)))


def loss(x: Value, name: str = "loss") -> Value:
    """Add the softmax and cross entropy of the logits, where the backward pass starts."""
    return x.net.layer(name, "fused", [x], (1,), moved=3 * x.size)
