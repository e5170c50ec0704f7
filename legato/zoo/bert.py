"""BERT-base (Devlin et al. 2018) in pre-training: 12 layers, width 768, 12 heads, and MLPs of width 3072.

The model has both heads of pre-training: the head for masked words, which shares the table of word embeddings (a tensor
with two readers), and the head for the next sentence. The paper says 110 million parameters; the exact number is
110,106,428, in 206 tensors. Sequences have 128 words, as in nine tenths of the paper's pre-training (appendix A.2).
"""

from __future__ import annotations

from legato.zoo.builder import Builder, Model, Value, reshape
from legato.zoo.image import activation, add, dense, loss
from legato.zoo.sequence import attention, embedding, layer_norm

__all__ = ["bert_base"]

_LAYERS, _WIDTH, _INNER, _HEADS, _VOCABULARY = 12, 768, 3072, 12, 30_522
_POSITIONS, _LENGTH, _BATCH = 512, 128, 32


def bert_base() -> Model:
    """Return the model of 206 tensors and 110,106,428 parameters; a batch has 32 sequences of 128 words."""
    net = Builder("bert-base", _BATCH)
    words = net.variable("word_embeddings", _VOCABULARY, _WIDTH)
    tokens = net.input(_LENGTH)
    x = embedding(tokens, "word_embeddings", _VOCABULARY, _WIDTH, weights=words)
    x = add(x, embedding(tokens, "position_embeddings", _POSITIONS, _WIDTH), "position/add")
    x = add(x, embedding(tokens, "token_type_embeddings", 2, _WIDTH), "token_type/add")
    x = layer_norm(x, "embeddings/norm")
    for i in range(_LAYERS):
        with net.block(f"layer{i}"):
            x = _layer(x)
    first = activation(dense(reshape(x, _WIDTH), "pooler", _WIDTH), "pooler/tanh")
    y = layer_norm(activation(dense(x, "mlm/transform", _WIDTH), "mlm/gelu"), "mlm/norm")
    loss(dense(y, "mlm/decoder", _VOCABULARY, weights=words), "mlm/loss")
    loss(dense(first, "next_sentence", 2), "next_sentence/loss")
    return net.build()


def _layer(x: Value) -> Value:
    query, key, value = (dense(x, f"attention/{name}", _WIDTH) for name in ("query", "key", "value"))
    y = dense(attention("attention/core", query, key, value, _HEADS), "attention/output", _WIDTH)
    x = layer_norm(add(x, y, "attention/add"), "attention/norm")
    y = dense(activation(dense(x, "intermediate", _INNER), "gelu"), "output", _WIDTH)
    return layer_norm(add(x, y, "output/add"), "output/norm")
