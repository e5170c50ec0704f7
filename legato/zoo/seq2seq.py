"""Seq2Seq (Sutskever et al. 2014) with attention, as PACE trains it with MXNet's Sockeye.

PACE publishes 67.2 million parameters in 32 tensors (Table II) and 4096 tokens per batch, but no configuration. The
configuration in this module matches PACE's numbers exactly: three encoder layers, of which the first is bidirectional,
three decoder layers, width 512 everywhere, dot-product attention to the encoder, and an output layer that reads the
decoder's state and its context. The vocabulary (26,900 words on both sides) is inferred from the number of parameters,
and sentences are assumed to have 32 words.
"""

from __future__ import annotations

from legato.zoo.builder import Builder, Model
from legato.zoo.image import concat, dense, loss
from legato.zoo.sequence import attention, embedding, lstm

__all__ = ["seq2seq"]

_WIDTH, _VOCABULARY, _LENGTH, _BATCH = 512, 26_900, 32, 128


def seq2seq() -> Model:
    """Return the model of 32 tensors and 67.2 million parameters; a batch has 128 sentences (PACE, Table II)."""
    net = Builder("seq2seq", _BATCH)
    x = embedding(net.input(_LENGTH), "source_embed_weight", _VOCABULARY, _WIDTH)
    x = concat([lstm(x, f"encoder_{way}_l0", _WIDTH // 2) for way in ("forward", "reverse")], "encoder_l0/concat")
    for i in (1, 2):
        x = lstm(x, f"encoder_l{i}", _WIDTH)
    encoded = x
    x = embedding(net.input(_LENGTH), "target_embed_weight", _VOCABULARY, _WIDTH)
    for i in (0, 1, 2):
        x = lstm(x, f"decoder_l{i}", _WIDTH, initial=encoded)
    context = attention("attention", x, encoded, encoded)
    loss(dense(concat([x, context], "output/concat"), "output", _VOCABULARY))
    return net.build()
