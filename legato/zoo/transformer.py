"""The base Transformer (Vaswani et al. 2017): 6 + 6 layers, width 512, 8 heads, and MLPs of width 2048.

`transformer` is PACE's model, from MXNet's Sockeye. It normalizes before each block and after the last block, has no
biases in attention, computes query, key and value of self-attention with one matrix, and shares no embeddings. So
PACE's model has the 164 tensors of PACE's Table II. The vocabulary (31,000 words on both sides) is inferred from the
91.8 million parameters, and sentences are assumed to have 32 words.

`transformer-shared` is the original model, in which both embeddings and the output layer share one table (37,000 words,
section 5.1). So three parts of the model read this tensor. The original model has 63.1 million parameters, although the
paper's Table 3 says 65 million.
"""

from __future__ import annotations

from legato.zoo.builder import Builder, Model, Value, reshape
from legato.zoo.image import activation, add, dense, loss
from legato.zoo.sequence import attention, embedding, layer_norm

__all__ = ["transformer", "transformer_shared"]

_LAYERS, _WIDTH, _INNER, _HEADS = 6, 512, 2048, 8
_LENGTH, _BATCH = 32, 64


def transformer() -> Model:
    """Return the model of 164 tensors and 91.8 million parameters; a batch has 64 sentences (PACE, Table II)."""
    return _transformer("transformer", 31_000, shared=False)


def transformer_shared() -> Model:
    """Return the model in which source embedding, target embedding and output layer share one table."""
    return _transformer("transformer-shared", 37_000, shared=True)


def _transformer(name: str, vocabulary: int, *, shared: bool) -> Model:
    net = Builder(name, _BATCH)
    table = net.variable("embed_weight", vocabulary, _WIDTH) if shared else None
    x = embedding(net.input(_LENGTH), "source_embed_weight", vocabulary, _WIDTH, weights=table)
    for i in range(_LAYERS):
        with net.block(f"encoder_{i}"):
            x = _feed_forward(_self_attention(x))
    encoded = layer_norm(x, "encoder_final_norm")
    x = embedding(net.input(_LENGTH), "target_embed_weight", vocabulary, _WIDTH, weights=table)
    for i in range(_LAYERS):
        with net.block(f"decoder_{i}"):
            x = _feed_forward(_attend(_self_attention(x), encoded))
    x = layer_norm(x, "decoder_final_norm")
    loss(dense(x, "output", vocabulary, weights=table, bias=not shared))
    return net.build()


def _self_attention(x: Value) -> Value:
    y = dense(layer_norm(x, "att_self/norm"), "att_self/i2h", 3 * _WIDTH, bias=False)
    part = reshape(y, x.shape[0], _WIDTH)
    y = attention("att_self/attention", part, part, part, _HEADS)
    return add(x, dense(y, "att_self/h2o", _WIDTH, bias=False), "att_self/add")


def _attend(x: Value, encoded: Value) -> Value:
    query = dense(layer_norm(x, "att_enc/norm"), "att_enc/q2h", _WIDTH, bias=False)
    keys, values = (dense(encoded, f"att_enc/{name}", _WIDTH, bias=False) for name in ("k2h", "v2h"))
    y = attention("att_enc/attention", query, keys, values, _HEADS)
    return add(x, dense(y, "att_enc/h2o", _WIDTH, bias=False), "att_enc/add")


def _feed_forward(x: Value) -> Value:
    y = activation(dense(layer_norm(x, "ff/norm"), "ff/i2h", _INNER), "ff/relu")
    return add(x, dense(y, "ff/h2o", _WIDTH), "ff/add")
