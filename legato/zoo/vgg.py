"""VGG (Simonyan, Zisserman 2014).

`vgg-16` and `vgg-19` are the paper's configurations D and E with biases, as in TF-slim (TicTac, Caramel) and MXNet
(PACE). `vgg-16-299` is the model that the Network Operator Edition measured with Inception's training script. The model
has 299 x 299 images, batch normalization after every convolution, 1001 classes, and a first fully connected layer with
an input of 9 x 9 x 512.
"""

from __future__ import annotations

from legato.zoo.builder import Builder, Model, Value, flatten
from legato.zoo.image import activation, conv, conv_norm, dense, loss, pool

__all__ = ["vgg_16", "vgg_16_299", "vgg_19"]

_CHANNELS = (64, 128, 256, 512, 512)


def vgg_16() -> Model:
    """Return the model of 32 variables and 138,357,544 parameters; a batch has 32 images (TicTac, Table 1)."""
    return _vgg("vgg-16", (2, 2, 3, 3, 3), 32)


def vgg_19() -> Model:
    """Return the model of 38 variables and 143,667,240 parameters; a batch has 32 images (TicTac, Table 1)."""
    return _vgg("vgg-19", (2, 2, 4, 4, 4), 32)


def vgg_16_299() -> Model:
    """Return the model of 6.58 Gb, of which `fc1` has 5.44 Gb; a batch has 32 images.

    These sizes are from the Network Operator Edition, Tables 2 and 7, sections 8 and 9.1.
    """
    return _vgg("vgg-16-299", (2, 2, 3, 3, 3), 32, size=299, norm=True, classes=1001)


def _vgg(
    name: str, convs: tuple[int, ...], batch_size: int, *, size: int = 224, norm: bool = False, classes: int = 1000
) -> Model:
    net = Builder(name, batch_size)
    x = net.input(size, size, 3)
    for block, (count, channels) in enumerate(zip(convs, _CHANNELS, strict=True), start=1):
        for i in range(1, count + 1):
            layer = f"conv{block}_{i}"
            x = conv_norm(x, layer, channels, 3) if norm else _conv_relu(x, layer, channels)
        x = pool(x, f"pool{block}", 2, 2, "valid")
    x = flatten(x)
    for layer in ("fc1", "fc2"):
        x = activation(dense(x, layer, 4096), f"{layer}/relu")
    loss(dense(x, "fc3", classes))
    return net.build()


def _conv_relu(x: Value, name: str, channels: int) -> Value:
    return activation(conv(x, name, channels, 3), f"{name}/relu")
