"""Language models by their shape: decoders of the families of GPT-3 and of Llama 3, and mixtures of experts.

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

Shapes are the published ones:

- `gpt3`: 175.0 billion parameters in Brown et al. 2020, Table 2.1; exactly
  174,604,259,328 with its vocabulary of 50,257 and 2048 positions
- `llama-3-8b`, `llama-3-70b`, `llama-3-405b`: Dubey et al. 2024 (arXiv 2407.21783), Table 3;
  8,030,261,248, 70,553,706,496 and 405,853,388,800, as released
- `mixtral-8x7b`: Jiang et al. 2024 (arXiv 2401.04088), Table 1; 46,702,792,704, of
  which a token uses 12,879,925,248
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from legato.core.errors import InputError, TooLargeError
from legato.zoo.builder import Builder, Model, Value, reshape
from legato.zoo.image import activation, add, dense, loss
from legato.zoo.sequence import causal_attention, embedding, gated, layer_norm, rms_norm, rotate

__all__ = ["SHAPES", "Shape", "language_model"]

_DEVICE, _PRECISION = "h100", "bf16"
#: Layers, and layers times experts (DeepSeek-V3 has 61 x 256): up to some 150,000 ops, and 100,000 tensors.
_MOST_LAYERS, _MOST_EXPERTS = 2**12, 2**15
#: Every number of a shape; the bytes of a matrix of this width and height are far within 64 bits.
_MOST = 2**24


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a language model.

    `hidden` is the width of the model, `heads` the number of heads of the
    queries, and `kv_heads` that of the keys and values, by default the same.
    `vocabulary` counts tokens, `sequence` the tokens of a sequence.
    `intermediate` is the width of the MLP, by default four times `hidden` (`gpt`)
    or three and a half times (`llama`, as in Llama 3 8B and 70B). Each token uses
    `active_experts` of `experts` MLPs. `tied`: one table for the embeddings and
    the output layer, by default in `gpt` only. Raises `InputError` on numbers
    that are out of range (more than 4,096 layers, for instance) or do not divide
    each other, and `TooLargeError` on more than 32,768 layers times experts.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int = 8192
    kv_heads: int | None = None
    intermediate: int | None = None
    experts: int = 1
    active_experts: int = 1
    tied: bool | None = None
    family: Literal["gpt", "llama"] = "llama"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            most = _MOST_LAYERS if field.name == "layers" else _MOST
            if isinstance(value, int) and not isinstance(value, bool) and not 1 <= value <= most:
                raise InputError(f"{field.name}: {value:,} (expected 1 to {most:,})")
        if self.hidden % self.heads:
            raise InputError(f"hidden: {self.hidden} (expected a multiple of the {self.heads} heads)")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise InputError(f"kv_heads: {self.kv_heads} (expected a divisor of the {self.heads} heads)")
        if self.active_experts > self.experts:
            raise InputError(f"active_experts: {self.active_experts} (expected at most the {self.experts} experts)")
        if self.experts > 1 and self.family == "gpt":
            raise InputError(f"experts: {self.experts} (expected 1: only the family of llama has experts)")
        if self.layers * self.experts > _MOST_EXPERTS:
            size = f"{self.layers:,} x {self.experts:,}"
            raise TooLargeError(f"layers x experts: {size} (expected at most {_MOST_EXPERTS:,} together)")

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.hidden // self.heads * (self.heads if self.kv_heads is None else self.kv_heads)

    @property
    def inner(self) -> int:
        """Width of the MLP."""
        if self.intermediate is not None:
            return self.intermediate
        return 4 * self.hidden if self.family == "gpt" else 7 * self.hidden // 2


#: The named models; one sequence a batch.
SHAPES: dict[str, Shape] = {
    "gpt3": Shape(96, 12_288, 96, 50_257, 2048, family="gpt"),
    "llama-3-8b": Shape(32, 4096, 32, 128_256, kv_heads=8, intermediate=14_336),
    "llama-3-70b": Shape(80, 8192, 64, 128_256, kv_heads=8, intermediate=28_672),
    "llama-3-405b": Shape(126, 16_384, 128, 128_256, kv_heads=8, intermediate=53_248),
    "mixtral-8x7b": Shape(32, 4096, 32, 32_000, 32_768, kv_heads=8, intermediate=14_336, experts=8, active_experts=2),
}


def language_model(shape: Shape, name: str | None = None) -> Model:
    """Return the model of a shape, to be trained in bf16 on one sequence a batch.

    Without a name, it is called after its number of parameters, such as `llm-70.6b`.
    """
    net = Builder(name or "llm", 1, device=_DEVICE, precision=_PRECISION)
    _build(net, shape)
    model = net.build()
    return model if name else replace(model, name=f"llm-{_short(model.parameters)}")


def _short(parameters: int) -> str:
    """`70.6b` for 70,553,706,496."""
    for unit, scale in (("t", 1e12), ("b", 1e9), ("m", 1e6), ("k", 1e3)):
        if parameters >= 0.9995 * scale:
            return f"{parameters / scale:.3g}{unit}"
    return str(parameters)


def _build(net: Builder, shape: Shape) -> None:
    tokens = net.input(shape.sequence)
    gpt = shape.family == "gpt"
    tied = gpt if shape.tied is None else shape.tied
    words = net.variable("embeddings", shape.vocabulary, shape.hidden)
    x = embedding(tokens, "embeddings", shape.vocabulary, shape.hidden, weights=words)
    if gpt:
        x = add(x, embedding(tokens, "positions", shape.sequence, shape.hidden), "positions/add")
    for i in range(shape.layers):
        with net.block(f"layer{i}"):
            x = _gpt_layer(x, shape) if gpt else _llama_layer(x, shape)
    x = (layer_norm if gpt else rms_norm)(x, "norm")
    loss(dense(x, "output", shape.vocabulary, bias=False, weights=words if tied else None))


def _gpt_layer(x: Value, shape: Shape) -> Value:
    length, width = x.shape
    y = dense(layer_norm(x, "attention/norm"), "attention/qkv", width + 2 * shape.kv_width)
    part = reshape(y, length, shape.kv_width)
    y = causal_attention("attention/core", reshape(y, length, width), part, part)
    x = add(x, dense(y, "attention/output", width), "attention/add")
    y = activation(dense(layer_norm(x, "mlp/norm"), "mlp/up", shape.inner), "mlp/gelu")
    return add(x, dense(y, "mlp/down", width), "mlp/add")


def _llama_layer(x: Value, shape: Shape) -> Value:
    y = rms_norm(x, "attention/norm")
    query = dense(y, "attention/query", shape.hidden, bias=False)
    key, value = (dense(y, f"attention/{name}", shape.kv_width, bias=False) for name in ("key", "value"))
    query, key = rotate(query, key, "attention/rotary")
    y = causal_attention("attention/core", query, key, value)
    x = add(x, dense(y, "attention/output", shape.hidden, bias=False), "attention/add")
    y = rms_norm(x, "mlp/norm")
    return add(x, _mlp(y, shape) if shape.experts == 1 else _experts(y, shape), "mlp/add")


def _mlp(x: Value, shape: Shape) -> Value:
    gate, up = (dense(x, f"mlp/{name}", shape.inner, bias=False) for name in ("gate", "up"))
    return dense(gated(gate, up, "mlp/swiglu"), "mlp/down", shape.hidden, bias=False)


def _experts(x: Value, shape: Shape) -> Value:
    """A router, the rows of each expert's tokens one after another, the experts, and their weighted sum."""
    length, width = x.shape
    rows = (length * shape.active_experts, width)
    routes = dense(x, "router", shape.experts, bias=False)
    y = x.net.layer("experts/dispatch", "fused", [x, routes], rows)
    gate, up = (_grouped(y, f"experts/{name}", shape.inner, shape) for name in ("gate", "up"))
    y = _grouped(gated(gate, up, "experts/swiglu"), "experts/down", width, shape)
    return x.net.layer("experts/combine", "fused", [y, routes], (length, width))


def _grouped(x: Value, name: str, units: int, shape: Shape) -> Value:
    """A matrix product of each expert's rows with its own matrix."""
    rows, width = x.shape
    variables = [x.net.variable(f"{name}/expert{e}/weights", width, units) for e in range(shape.experts)]
    return x.net.layer(name, "split", [x], (rows, units), variables=variables, flops=2 * rows * width * units)
