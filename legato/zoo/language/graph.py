"""The layers and variables of language models, as a graph.

Two families, which have these things in one layer of the model:

- `gpt`: layer normalizations, biases, one matrix for queries, keys and values,
  an MLP of two matrices, learned positions, and one table for the embeddings
  and the output layer (Radford et al. 2019, as GPT-2 in `gpt2`);
- `llama`: RMS normalizations, no biases, a matrix each for queries, keys and
  values, a gated MLP of three matrices, rotary positions, and two tables (Dubey
  et al. 2024, section 3.2). With `experts`, a router sends each token to some of
  several such MLPs (Jiang et al. 2024, section 2). Experts are loaded evenly and
  run as grouped matrix products; every expert's matrices are tensors of their own.

Attention is causal and keeps its scores in the kernel. GPT-3 alternates dense with
banded attention (Brown et al. 2020, section 2.1); here all of it is dense.
"""

from __future__ import annotations

from dataclasses import replace

from legato.core.errors import InputError, TooLargeError
from legato.core.job import LanguageModel
from legato.zoo.builder import Builder, Model, Value, reshape
from legato.zoo.image import activation, add, dense, loss
from legato.zoo.language.models import MODELS
from legato.zoo.sequence import causal_attention, embedding, gated, layer_norm, rms_norm, rotate

__all__ = ["SHAPES", "language_model"]

_DEVICE, _PRECISION = "h100", "bf16"
#: Layers, and layers times experts (DeepSeek-V3 has 61 x 256): up to some 150,000 ops, and 100,000 tensors.
_MOST_LAYERS, _MOST_EXPERTS = 2**12, 2**15
#: The named models that have a graph; one sequence a batch.
SHAPES = {name: shape for name, shape in MODELS.items() if shape.latent is None}


def language_model(shape: LanguageModel, name: str | None = None) -> Model:
    """Return the graph of a model, to be trained in bf16 on one sequence a batch.

    Without a name, it is called after its number of parameters, such as `llm-70.6b`. Raises `InputError` on latent
    attention, shared experts, experts of the family of GPT and more than 4,096 layers, and `TooLargeError` on more than
    32,768 layers times experts.
    """
    if shape.latent is not None or shape.shared_intermediate or (shape.experts > 1 and shape.family == "gpt"):
        what = "latent attention" if shape.latent else "these experts"
        raise InputError(f"{name or 'model'}: {what} only in whole jobs (expected --gpus, or another of their options)")
    if shape.layers > _MOST_LAYERS:
        raise InputError(f"layers: {shape.layers:,} (expected 1 to {_MOST_LAYERS:,})")
    if shape.layers * shape.experts > _MOST_EXPERTS:
        size = f"{shape.layers:,} x {shape.experts:,}"
        raise TooLargeError(f"layers x experts: {size} (expected at most {_MOST_EXPERTS:,} together)")
    net = Builder(name or "llm", 1, device=_DEVICE, precision=_PRECISION)
    _build(net, shape)
    model = replace(net.build(), language=shape)
    return model if name else replace(model, name=f"llm-{_short(model.parameters)}")


def _short(parameters: int) -> str:
    """`70.6b` for 70,553,706,496."""
    for unit, scale in (("t", 1e12), ("b", 1e9), ("m", 1e6), ("k", 1e3)):
        if parameters >= 0.9995 * scale:
            return f"{parameters / scale:.3g}{unit}"
    return str(parameters)


def _build(net: Builder, shape: LanguageModel) -> None:
    tokens = net.input(shape.sequence)
    gpt = shape.family == "gpt"
    words = net.variable("embeddings", shape.vocabulary, shape.hidden)
    x = embedding(tokens, "embeddings", shape.vocabulary, shape.hidden, weights=words)
    if gpt:
        x = add(x, embedding(tokens, "positions", shape.sequence, shape.hidden), "positions/add")
    for i in range(shape.layers):
        with net.block(f"layer{i}"):
            x = _gpt_layer(x, shape) if gpt else _llama_layer(x, shape, i in shape.mixtures)
    x = (layer_norm if gpt else rms_norm)(x, "norm")
    loss(dense(x, "output", shape.vocabulary, bias=False, weights=words if shape.tied else None))


def _gpt_layer(x: Value, shape: LanguageModel) -> Value:
    length, width = x.shape
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    y = dense(layer_norm(x, "attention/norm"), "attention/qkv", queries + 2 * keys)
    part = reshape(y, length, keys)
    y = causal_attention("attention/core", reshape(y, length, queries), part, part)
    x = add(x, dense(y, "attention/output", width), "attention/add")
    y = activation(dense(layer_norm(x, "mlp/norm"), "mlp/up", shape.intermediate), "mlp/gelu")
    return add(x, dense(y, "mlp/down", width), "mlp/add")


def _llama_layer(x: Value, shape: LanguageModel, mixture: bool) -> Value:
    y = rms_norm(x, "attention/norm")
    query = dense(y, "attention/query", shape.heads * shape.head_size, bias=False)
    keys = shape.kv_heads * shape.head_size
    key, value = (dense(y, f"attention/{name}", keys, bias=False) for name in ("key", "value"))
    query, key = rotate(query, key, "attention/rotary")
    y = causal_attention("attention/core", query, key, value)
    x = add(x, dense(y, "attention/output", shape.hidden, bias=False), "attention/add")
    y = rms_norm(x, "mlp/norm")
    return add(x, _experts(y, shape) if mixture else _mlp(y, shape), "mlp/add")


def _mlp(x: Value, shape: LanguageModel) -> Value:
    gate, up = (dense(x, f"mlp/{name}", shape.intermediate, bias=False) for name in ("gate", "up"))
    return dense(gated(gate, up, "mlp/swiglu"), "mlp/down", shape.hidden, bias=False)


def _experts(x: Value, shape: LanguageModel) -> Value:
    """A router, the rows of each expert's tokens one after another, the experts, and their weighted sum."""
    length, width = x.shape
    rows = (length * shape.active_experts, width)
    routes = dense(x, "router", shape.experts, bias=False)
    y = x.net.layer("experts/dispatch", "fused", [x, routes], rows)
    gate, up = (_grouped(y, f"experts/{name}", shape.expert_intermediate, shape) for name in ("gate", "up"))
    y = _grouped(gated(gate, up, "experts/swiglu"), "experts/down", width, shape)
    return x.net.layer("experts/combine", "fused", [y, routes], (length, width))


def _grouped(x: Value, name: str, units: int, shape: LanguageModel) -> Value:
    """A matrix product of each expert's rows with its own matrix."""
    rows, width = x.shape
    variables = [x.net.variable(f"{name}/expert{e}/weights", width, units) for e in range(shape.experts)]
    return x.net.layer(name, "split", [x], (rows, units), variables=variables, flops=2 * rows * width * units)
