"""The layers and variables of language models, as a graph.

There are two families of models:

- `gpt` has layer normalizations, biases, one matrix for queries, keys and values, MLPs of two matrices, learned
  positions, and one table for the embeddings and the output layer (Radford et al. 2019, like GPT-2 in `gpt2`).
- `llama` has RMS normalizations, no biases, separate matrices for queries, keys and values, gated MLPs of three
  matrices, rotary positions, and two tables (Dubey et al. 2024, section 3.2). With `experts`, a layer has several gated
  MLPs, and a router sends each token to some of them (Jiang et al. 2024, section 2). Experts have equal loads and run
  as grouped matrix products; each matrix of each expert is its own tensor.

Attention is causal, and its scores stay inside the kernel. GPT-3 alternates dense with banded attention (Brown et al.
2020, section 2.1); here, all attention is dense.
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
#: The most layers, and the most layers times experts (DeepSeek-V3 has 61 x 256). This allows about 150,000 ops and
#: 100,000 tensors.
_MOST_LAYERS, _MOST_EXPERTS = 2**12, 2**15
#: The named models that have a graph; a batch is one sequence.
SHAPES = {name: shape for name, shape in MODELS.items() if shape.latent is None}


def language_model(shape: LanguageModel, name: str | None = None) -> Model:
    """Return the graph of a model that is trained in bf16, with a batch of one sequence.

    Without `name`, the model's name is made from its number of parameters, such as `llm-70.6b`. Raises `InputError` on
    latent attention, shared experts, experts in the `gpt` family and more than 4,096 layers, and `TooLargeError` if
    layers times experts exceed 32,768.
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
    """Return a number of parameters in short form, such as `70.6b` for 70,553,706,496."""
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
    """Add a router, the sorting of tokens by expert, the experts, and the weighted sum of the experts' outputs."""
    length, width = x.shape
    rows = (length * shape.active_experts, width)
    routes = dense(x, "router", shape.experts, bias=False)
    y = x.net.layer("experts/dispatch", "fused", [x, routes], rows)
    gate, up = (_grouped(y, f"experts/{name}", shape.expert_intermediate, shape) for name in ("gate", "up"))
    y = _grouped(gated(gate, up, "experts/swiglu"), "experts/down", width, shape)
    return x.net.layer("experts/combine", "fused", [y, routes], (length, width))


def _grouped(x: Value, name: str, units: int, shape: LanguageModel) -> Value:
    """Add one layer that multiplies the tokens (rows) of each expert by this expert's matrix."""
    rows, width = x.shape
    variables = [x.net.variable(f"{name}/expert{e}/weights", width, units) for e in range(shape.experts)]
    return x.net.layer(name, "split", [x], (rows, units), variables=variables, flops=2 * rows * width * units)
