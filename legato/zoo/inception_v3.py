"""Inception v3 (Szegedy et al. 2015) as it is trained, with its auxiliary classifier.

TicTac and Caramel train TF-slim's model, and the Network Operator Edition trains the model of the older Inception
release. Both have the same variables. The order and the names here are from the older release. That release creates the
auxiliary classifier in the middle, after the last 17 x 17 module. Section 8.5 of the Network Operator Edition adds
copies of `mixed_35x35x288b` and `mixed_17x17x768e`. The older release has 1001 classes. This model has only 1000
classes, but this changes no printed digit of Table 7.
"""

from __future__ import annotations

from legato.zoo.builder import Builder, Model, Value, flatten
from legato.zoo.image import conv_norm, dense, global_pool, loss, pool
from legato.zoo.inception import Branch, Conv, Fork, Pool, module

__all__ = ["inception_v3"]


def inception_v3() -> Model:
    """Return the model of 196 variables (103.54 MiB); a batch has 32 images (TicTac, Table 1)."""
    net = Builder("inception-v3", 32)
    x = conv_norm(net.input(299, 299, 3), "conv0", 32, 3, 2, "valid")
    x = conv_norm(x, "conv1", 32, 3, 1, "valid")
    x = pool(conv_norm(x, "conv2", 64, 3), "pool1", 3, 2, "valid")
    x = conv_norm(x, "conv3", 80, 1)
    x = pool(conv_norm(x, "conv4", 192, 3, 1, "valid"), "pool2", 3, 2, "valid")
    for name, projection in (("256a", 32), ("288a", 64), ("288b", 64)):
        x = module(x, f"mixed_35x35x{name}", _module_35(projection), conv_norm)
    x = module(x, "mixed_17x17x768a", _REDUCTION_35, conv_norm, reduction="valid")
    for name, width in (("768b", 128), ("768c", 160), ("768d", 160), ("768e", 192)):
        x = module(x, f"mixed_17x17x{name}", _module_17(width), conv_norm)
    _auxiliary(x)
    x = module(x, "mixed_8x8x1280a", _REDUCTION_17, conv_norm, reduction="valid")
    for name in ("2048a", "2048b"):
        x = module(x, f"mixed_8x8x{name}", _MODULE_8, conv_norm)
    loss(dense(global_pool(x, "pool3"), "logits", 1000))
    return net.build()


def _module_35(projection: int) -> list[Branch]:
    return [
        [Conv(64)],
        [Conv(48), Conv(64, 5)],
        [Conv(64), Conv(96, 3), Conv(96, 3)],
        [Pool(), Conv(projection)],
    ]


def _module_17(width: int) -> list[Branch]:
    row, column = (1, 7), (7, 1)
    return [
        [Conv(192)],
        [Conv(width), Conv(width, row), Conv(192, column)],
        [Conv(width), Conv(width, column), Conv(width, row), Conv(width, column), Conv(192, row)],
        [Pool(), Conv(192)],
    ]


_REDUCTION_35: list[Branch] = [
    [Conv(384, 3, 2)],
    [Conv(64), Conv(96, 3), Conv(96, 3, 2)],
    [Pool(2)],
]
_REDUCTION_17: list[Branch] = [
    [Conv(192), Conv(320, 3, 2)],
    [Conv(192), Conv(192, (1, 7)), Conv(192, (7, 1)), Conv(192, 3, 2)],
    [Pool(2)],
]
_FORK = Fork((Conv(384, (1, 3)), Conv(384, (3, 1))))
_MODULE_8: list[Branch] = [
    [Conv(320)],
    [Conv(384), _FORK],
    [Conv(448), Conv(384, 3), _FORK],
    [Pool(), Conv(192)],
]


def _auxiliary(x: Value) -> None:
    with x.net.scope("aux_logits"):
        x = conv_norm(pool(x, "pool", 5, 3, "valid"), "proj", 128, 1)
        x = conv_norm(x, "conv", 768, 5, 1, "valid")
        loss(dense(flatten(x), "logits", 1000))
