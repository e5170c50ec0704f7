"""Two versions of GoogLeNet (Szegedy et al. 2014).

`googlenet` is Caffe's bvlc_googlenet, which MG-WFBP trains. The model has biases, two local response normalizations,
and the two auxiliary classifiers that are used in training. The classifiers have 6.4 million of the model's 13.4
million parameters. `inception-v1` is TF-slim's model, which TicTac trains. The model has batch normalization with only
beta, no auxiliary classifiers, and 3 x 3 convolutions in the place of the paper's 5 x 5.
"""

from __future__ import annotations

from legato.zoo.builder import Builder, Model, Value, flatten
from legato.zoo.image import (
    Padding,
    activation,
    conv,
    conv_norm,
    dense,
    global_pool,
    local_response_norm,
    loss,
    pool,
)
from legato.zoo.inception import Branch, Conv, Pool, Unit, module

__all__ = ["googlenet", "inception_v1"]

#: Channels of each module (the paper's Table 1): 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection.
_MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def inception_v1() -> Model:
    """Return the model of 116 variables (25.24 MiB); a batch has 128 images (TicTac, Table 1)."""
    net = Builder("inception-v1", 128)
    x = pool(conv_norm(net.input(224, 224, 3), "conv1", 64, 7, 2), "pool1", 3, 2)
    x = conv_norm(conv_norm(x, "conv2_reduce", 64, 1), "conv2", 192, 3)
    x = pool(x, "pool2", 3, 2)
    for name in _MODULES:
        x = _module(x, name, conv_norm, widest=3)
    loss(dense(global_pool(x, "pool5"), "logits", 1000))
    return net.build()


def googlenet() -> Model:
    """Return the model of 128 variables (about 13 million parameters); a batch has 64 images (MG-WFBP, section VI)."""
    net = Builder("googlenet", 64)
    x = pool(_conv_relu(net.input(224, 224, 3), "conv1", 64, 7, 2), "pool1", 3, 2)
    x = local_response_norm(x, "norm1")
    x = _conv_relu(_conv_relu(x, "conv2_reduce", 64, 1), "conv2", 192, 3)
    x = pool(local_response_norm(x, "norm2"), "pool2", 3, 2)
    for name in _MODULES:
        x = _module(x, name, _conv_relu, widest=5)
        if name in ("4a", "4d"):
            _auxiliary(x, f"loss{name}")
    loss(dense(global_pool(x, "pool5"), "logits", 1000))
    return net.build()


def _module(x: Value, name: str, unit: Unit, widest: int) -> Value:
    one, three_reduce, three, five_reduce, five, projection = _MODULES[name]
    branches: list[Branch] = [
        [Conv(one)],
        [Conv(three_reduce), Conv(three, 3)],
        [Conv(five_reduce), Conv(five, widest)],
        [Pool(), Conv(projection)],
    ]
    x = module(x, f"inception_{name}", branches, unit)
    return pool(x, f"pool{name}", 3, 2) if name in ("3b", "4e") else x


def _auxiliary(x: Value, name: str) -> None:
    with x.net.scope(name):
        x = _conv_relu(pool(x, "pool", 5, 3, "valid"), "conv", 128, 1)
        x = activation(dense(flatten(x), "fc", 1024), "fc/relu")
        loss(dense(x, "logits", 1000))


def _conv_relu(
    x: Value, name: str, channels: int, kernel: int | tuple[int, int], stride: int = 1, padding: Padding = "same"
) -> Value:
    return activation(conv(x, name, channels, kernel, stride, padding), f"{name}/relu")
