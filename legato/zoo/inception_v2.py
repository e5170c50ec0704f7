"""Inception v2 (Ioffe, Szegedy 2015: the batch normalization paper), as TF-slim defines it and TicTac uses it.

The first layer is a separable convolution. It has a 7 x 7 convolution of each channel into 8 channels, and a 1 x 1
convolution into 64 channels. One batch normalization (only with beta) follows.
"""

from __future__ import annotations

from legato.zoo.builder import Builder, Model
from legato.zoo.image import activation, batch_norm, conv, conv_norm, dense, depthwise, global_pool, loss, pool
from legato.zoo.inception import Branch, Conv, Pool, module

__all__ = ["inception_v2"]

#: Channels of each module: 1x1; 3x3 reduce, 3x3; double 3x3 reduce, double 3x3; pool projection.
_MODULES = {
    "3a": (64, 64, 64, 64, 96, 32),
    "3b": (64, 64, 96, 64, 96, 64),
    "4a": (224, 64, 96, 96, 128, 128),
    "4b": (192, 96, 128, 96, 128, 128),
    "4c": (160, 128, 160, 128, 160, 96),
    "4d": (96, 128, 192, 160, 192, 96),
    "5a": (352, 192, 320, 160, 224, 128),
    "5b": (352, 192, 320, 192, 224, 128),
}
#: Channels of the modules that halve the size: 3x3 reduce, 3x3; double 3x3 reduce, double 3x3.
_REDUCTIONS = {"3c": (128, 160, 64, 96), "4e": (128, 192, 192, 256)}


def inception_v2() -> Model:
    """Return the model of 141 variables (42.64 MiB); a batch has 128 images (TicTac, Table 1)."""
    net = Builder("inception-v2", 128)
    x = depthwise(net.input(224, 224, 3), "conv1", 8, 7, 2)
    x = batch_norm(conv(x, "conv1_pointwise", 64, 1, bias=False), "conv1/bn")
    x = pool(activation(x, "conv1/relu"), "pool1", 3, 2)
    x = conv_norm(conv_norm(x, "conv2_reduce", 64, 1), "conv2", 192, 3)
    x = pool(x, "pool2", 3, 2)
    for name in ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        branches = _reduction(*_REDUCTIONS[name]) if name in _REDUCTIONS else _module(*_MODULES[name])
        x = module(x, f"inception_{name}", branches, conv_norm)
    loss(dense(global_pool(x, "pool5"), "logits", 1000))
    return net.build()


def _module(one: int, reduce: int, three: int, double_reduce: int, double: int, projection: int) -> list[Branch]:
    return [
        [Conv(one)],
        [Conv(reduce), Conv(three, 3)],
        [Conv(double_reduce), Conv(double, 3), Conv(double, 3)],
        [Pool(), Conv(projection)],
    ]


def _reduction(reduce: int, three: int, double_reduce: int, double: int) -> list[Branch]:
    return [
        [Conv(reduce), Conv(three, 3, 2)],
        [Conv(double_reduce), Conv(double, 3), Conv(double, 3, 2)],
        [Pool(2)],
    ]
