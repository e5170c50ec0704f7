"""AlexNet v2 (Krizhevsky 2014), as TF-slim's `alexnet_v2` defines it and TicTac and Caramel use it.

The model has one tower with biases and without normalization. The input of the fully connected layers is 5 x 5 x 256.
"""

from __future__ import annotations

from legato.zoo.builder import Builder, Model, Value, flatten
from legato.zoo.image import Padding, activation, conv, dense, loss, pool

__all__ = ["alexnet_v2"]


def alexnet_v2() -> Model:
    """Return the model of 16 variables (191.89 MiB); a batch has 512 images (TicTac, Table 1)."""
    net = Builder("alexnet-v2", 512)
    x = net.input(224, 224, 3)
    x = pool(_conv(x, "conv1", 64, 11, 4, "valid"), "pool1", 3, 2, "valid")
    x = pool(_conv(x, "conv2", 192, 5), "pool2", 3, 2, "valid")
    x = _conv(x, "conv3", 384, 3)
    x = _conv(x, "conv4", 384, 3)
    x = pool(_conv(x, "conv5", 256, 3), "pool5", 3, 2, "valid")
    x = flatten(x)
    for name in ("fc6", "fc7"):
        x = activation(dense(x, name, 4096), f"{name}/relu")
    loss(dense(x, "fc8", 1000))
    return net.build()


def _conv(x: Value, name: str, channels: int, kernel: int, stride: int = 1, padding: Padding = "same") -> Value:
    return activation(conv(x, name, channels, kernel, stride, padding), f"{name}/relu")
