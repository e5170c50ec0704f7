"""GPT-2 (Radford et al. 2019) in its four sizes, on sequences of 1024 tokens.

The output layer uses the table of token embeddings, so this tensor has two readers. The sizes match the released models
(124, 355, 774 and 1,558 million parameters). The paper's Table 2 says 117, 345, 762 and 1,542 million, which
contradicts its own numbers of layers and widths.
"""

from __future__ import annotations

from legato.zoo.builder import Builder, Model, Value, reshape
from legato.zoo.image import activation, add, dense, loss
from legato.zoo.sequence import attention, embedding, layer_norm

__all__ = ["gpt2", "gpt2_large", "gpt2_medium", "gpt2_xl"]

_VOCABULARY, _LENGTH = 50_257, 1024


def gpt2() -> Model:
    """Return the model of 148 tensors and 124,439,808 parameters; a batch has 8 sequences."""
    return _gpt2("gpt2", 12, 768, 12, 8)


def gpt2_medium() -> Model:
    """Return the model of 292 tensors and 354,823,168 parameters; a batch has 4 sequences."""
    return _gpt2("gpt2-medium", 24, 1024, 16, 4)


def gpt2_large() -> Model:
    """Return the model of 436 tensors and 774,030,080 parameters; a batch has 4 sequences."""
    return _gpt2("gpt2-large", 36, 1280, 20, 4)


def gpt2_xl() -> Model:
    """Return the model of 580 tensors and 1,557,611,200 parameters; a batch has 2 sequences."""
    return _gpt2("gpt2-xl", 48, 1600, 25, 2)


def _gpt2(name: str, layers: int, width: int, heads: int, batch_size: int) -> Model:
    net = Builder(name, batch_size)
    tokens = net.input(_LENGTH)
    words = net.variable("wte", _VOCABULARY, width)
    x = embedding(tokens, "wte", _VOCABULARY, width, weights=words)
    x = add(x, embedding(tokens, "wpe", _LENGTH, width), "wpe/add")
    for i in range(layers):
        with net.block(f"h{i}"):
            x = _block(x, heads)
    loss(dense(layer_norm(x, "ln_f"), "lm_head", _VOCABULARY, bias=False, weights=words))
    return net.build()


def _block(x: Value, heads: int) -> Value:
    length, width = x.shape
    part = reshape(dense(layer_norm(x, "ln_1"), "attn/c_attn", 3 * width), length, width)
    y = attention("attn/core", part, part, part, heads)
    x = add(x, dense(y, "attn/c_proj", width), "attn/add")
    y = activation(dense(layer_norm(x, "ln_2"), "mlp/c_fc", 4 * width), "mlp/gelu")
    return add(x, dense(y, "mlp/c_proj", width), "mlp/add")
