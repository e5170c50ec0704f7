"""ResNet v1 (He et al. 2015) and v2 (He et al. 2016, activation before the convolutions), in the papers' variants.

| names | definition | batch normalization | stride of a stage |
|---|---|---|---|
| `resnet-v1-50`, `-101` (TicTac, Caramel) | TF-slim | beta only | last unit, 3 x 3 |
| `resnet-v2-50`, `-101`, `-152`, `-200` (TicTac, Caramel) | TF-slim | beta only | last unit, 3 x 3 |
| `resnet-v2-101-gamma`, `-200-gamma` (Network Operator Edition) | TF-slim | beta and gamma | last unit, 3 x 3 |
| `resnet-v1-50-caffe` (MG-WFBP) | the authors' Caffe model | beta and gamma | first unit, 1 x 1 |
| `resnet-v2-50-mxnet` (PACE) | MXNet's example | beta and gamma, also on the images | first unit, 3 x 3 |

TF-slim's v2 has biases in the first convolution, in the third convolution of each unit, and in the convolution of the
shortcut. TF-slim's batch normalization has only beta, unless TF-slim's `resnet_arg_scope` is used. Table 1 of TicTac
shows that TicTac did not use this scope, and Table 7 of the Network Operator Edition shows that the authors of this
paper used it. In some releases, Caffe's first convolution also has biases; here it has none, as in the paper.
"""

from __future__ import annotations

from legato.zoo.builder import Builder, Model, Value
from legato.zoo.image import activation, add, batch_norm, conv, conv_norm, dense, global_pool, loss, pool

__all__ = [
    "resnet_v1_50",
    "resnet_v1_50_caffe",
    "resnet_v1_101",
    "resnet_v2_50",
    "resnet_v2_50_mxnet",
    "resnet_v2_101",
    "resnet_v2_101_gamma",
    "resnet_v2_152",
    "resnet_v2_200",
    "resnet_v2_200_gamma",
]

#: The number of units in each of the four stages.
_UNITS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
_WIDTHS = (64, 128, 256, 512)


def resnet_v1_50() -> Model:
    """Return the model of 108 variables (97.39 MiB); a batch has 32 images (TicTac, Table 1)."""
    return _slim_v1("resnet-v1-50", 50, 32)


def resnet_v1_101() -> Model:
    """Return the model of 210 variables (169.74 MiB); a batch has 64 images (TicTac, Table 1)."""
    return _slim_v1("resnet-v1-101", 101, 64)


def resnet_v1_50_caffe() -> Model:
    """Return the model of 25.5 million parameters; a batch has 32 images (MG-WFBP, section VI)."""
    net = Builder("resnet-v1-50-caffe", 32)
    x = conv_norm(net.input(224, 224, 3), "conv1", 64, 7, 2, gamma=True)
    x = pool(x, "pool1", 3, 2)
    for stage, unit, width, _ in _units(50):
        with net.scope(f"block{stage}/unit{unit}"):
            x = _unit_v1(x, width, 2 if unit == 1 and stage > 1 else 1, strided=1, gamma=True)
    return _head(net, x)


def resnet_v2_50() -> Model:
    """Return the model of 125 variables (97.45 MiB); a batch has 64 images (TicTac, Table 1)."""
    return _slim_v2("resnet-v2-50", 50, 64)


def resnet_v2_101() -> Model:
    """Return the model of 244 variables (169.86 MiB); a batch has 32 images (TicTac, Table 1)."""
    return _slim_v2("resnet-v2-101", 101, 32)


def resnet_v2_152() -> Model:
    """Return the model of 363 variables and 229.5 MiB (Caramel, section 6; TicTac, section 2.2).

    No batch size is published; a batch has 32 images here.
    """
    return _slim_v2("resnet-v2-152", 152, 32)


def resnet_v2_200() -> Model:
    """Return the largest model of TF-slim's v2; the only paper with a ResNet-200 uses `resnet-v2-200-gamma`."""
    return _slim_v2("resnet-v2-200", 200, 32)


def resnet_v2_101_gamma() -> Model:
    """Return the model of 1.42 Gb; a batch has 32 images (Network Operator Edition, Table 2, section 8)."""
    return _slim_v2("resnet-v2-101-gamma", 101, 32, gamma=True)


def resnet_v2_200_gamma() -> Model:
    """Return the model of 2.06 Gb; a batch has 32 images (Network Operator Edition, Tables 2 and 7, section 8)."""
    return _slim_v2("resnet-v2-200-gamma", 200, 32, gamma=True)


def resnet_v2_50_mxnet() -> Model:
    """Return the model of 157 tensors and 25.5 million parameters; a batch has 32 images (PACE, Table II)."""
    net = Builder("resnet-v2-50-mxnet", 32)
    x = batch_norm(net.input(224, 224, 3), "bn_data", gamma=True)
    x = pool(conv_norm(x, "conv0", 64, 7, 2, gamma=True), "pool0", 3, 2)
    for stage, unit, width, _ in _units(50):
        with net.scope(f"stage{stage}/unit{unit}"):
            x = _unit_v2(x, width, 2 if unit == 1 and stage > 1 else 1, gamma=True, bias=False)
    return _head(net, activation(batch_norm(x, "bn1", gamma=True), "relu1"))


def _slim_v1(name: str, depth: int, batch_size: int) -> Model:
    net = Builder(name, batch_size)
    x = pool(conv_norm(net.input(224, 224, 3), "conv1", 64, 7, 2), "pool1", 3, 2)
    for stage, unit, width, last in _units(depth):
        with net.scope(f"block{stage}/unit{unit}"):
            x = _unit_v1(x, width, 2 if last and stage < 4 else 1, strided=2, gamma=False)
    return _head(net, x)


def _slim_v2(name: str, depth: int, batch_size: int, *, gamma: bool = False) -> Model:
    net = Builder(name, batch_size)
    x = pool(conv(net.input(224, 224, 3), "conv1", 64, 7, 2), "pool1", 3, 2)
    for stage, unit, width, last in _units(depth):
        with net.scope(f"block{stage}/unit{unit}"):
            x = _unit_v2(x, width, 2 if last and stage < 4 else 1, gamma=gamma, bias=True)
    return _head(net, activation(batch_norm(x, "postnorm", gamma=gamma), "postnorm/relu"))


def _units(depth: int) -> list[tuple[int, int, int, bool]]:
    """Yield (stage, unit, width, whether it is the stage's last unit) for every residual unit."""
    stages = enumerate(zip(_UNITS[depth], _WIDTHS, strict=True), start=1)
    return [(stage, i, width, i == count) for stage, (count, width) in stages for i in range(1, count + 1)]


def _unit_v1(x: Value, width: int, stride: int, *, strided: int, gamma: bool) -> Value:
    """Add a bottleneck unit, in which convolution number `strided` (1, 2 or 3) has the stride."""
    strides = [stride if i == strided else 1 for i in (1, 2, 3)]
    if x.shape[2] == 4 * width:
        shortcut = x if stride == 1 else pool(x, "shortcut/subsample", 1, stride)
    else:
        shortcut = conv_norm(x, "shortcut", 4 * width, 1, stride, gamma=gamma, relu=False)
    x = conv_norm(x, "conv1", width, 1, strides[0], gamma=gamma)
    x = conv_norm(x, "conv2", width, 3, strides[1], gamma=gamma)
    x = conv_norm(x, "conv3", 4 * width, 1, strides[2], gamma=gamma, relu=False)
    return activation(add(shortcut, x, "add"), "relu")


def _unit_v2(x: Value, width: int, stride: int, *, gamma: bool, bias: bool) -> Value:
    """Add a bottleneck unit with activations before its convolutions.

    `bias` says whether the third convolution and the shortcut's convolution have biases.
    """
    before = activation(batch_norm(x, "preact/bn", gamma=gamma), "preact/relu")
    if x.shape[2] == 4 * width:
        shortcut = x if stride == 1 else pool(x, "shortcut/subsample", 1, stride)
    else:
        shortcut = conv(before, "shortcut", 4 * width, 1, stride, bias=bias)
    y = conv_norm(before, "conv1", width, 1, gamma=gamma)
    y = conv_norm(y, "conv2", width, 3, stride, gamma=gamma)
    return add(shortcut, conv(y, "conv3", 4 * width, 1, bias=bias), "add")


def _head(net: Builder, x: Value) -> Model:
    loss(dense(global_pool(x, "pool5"), "logits", 1000))
    return net.build()
