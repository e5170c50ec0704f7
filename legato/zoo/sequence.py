"""The layers of sequence models, on values of shape (length, width). Dropout is left out, as in `image.py`."""

from __future__ import annotations

from legato.zoo.builder import Value, reshape

__all__ = ["attention", "causal_attention", "embedding", "gated", "layer_norm", "lstm", "rms_norm", "rotate"]


def embedding(tokens: Value, name: str, vocabulary: int, width: int, *, weights: int | None = None) -> Value:
    """Add a lookup of a table's row for every token; `weights` is the index of an existing table to use.

    The gradient is a dense table, which is the default of the papers' frameworks.
    """
    table = tokens.net.variable(name, vocabulary, width) if weights is None else weights
    shape = (*tokens.shape, width)
    moved = 2 * tokens.size * width  # only the rows that are looked up
    return tokens.net.layer(f"{name}/lookup", "weights", [tokens], shape, variables=[table], moved=moved)


def layer_norm(x: Value, name: str) -> Value:
    """Add a layer normalization, with gamma and beta."""
    variables = [x.net.variable(f"{name}/{vector}", x.shape[-1]) for vector in ("gamma", "beta")]
    return x.net.layer(name, "fused", [x], x.shape, variables=variables, moved=3 * x.size)


def rms_norm(x: Value, name: str) -> Value:
    """Add a root mean square normalization, with gamma."""
    gamma = x.net.variable(f"{name}/gamma", x.shape[-1])
    return x.net.layer(name, "fused", [x], x.shape, variables=[gamma], moved=3 * x.size)


def rotate(query: Value, keys: Value, name: str) -> tuple[Value, Value]:
    """Add rotary position embeddings of queries and keys, as one layer without variables."""
    length, width = query.shape
    both = query.net.layer(name, "fused", [query, keys], (length, width + keys.shape[1]))
    return reshape(both, length, width), reshape(both, length, keys.shape[1])


def gated(gate: Value, x: Value, name: str) -> Value:
    """Add the product of an activation of one value and another value of the same shape, as in SwiGLU."""
    return x.net.layer(name, "fused", [gate, x], x.shape)


def attention(name: str, query: Value, keys: Value, values: Value, heads: int = 1) -> Value:
    """Add dot-product attention without variables: scores, their softmax, and the weighted sum of the values.

    The scores, of shape (heads, query length, key length), are written twice and read twice.
    """
    scores = heads * query.shape[0] * keys.shape[0]
    flops = 2 * query.shape[0] * keys.shape[0] * (query.shape[1] + values.shape[1])
    shape = (query.shape[0], values.shape[1])
    moved = 2 * query.size + keys.size + values.size + 4 * scores
    return query.net.layer(name, "fused", [query, keys, values], shape, flops=flops, moved=moved)


def causal_attention(name: str, query: Value, keys: Value, values: Value) -> Value:
    """Add self-attention in which a token sees itself and earlier tokens, as one kernel without variables.

    The scores stay in the kernel (FlashAttention), and are computed only for pairs of tokens in which one sees the
    other. Several heads of queries may share a head of keys and values, which are then narrower.
    """
    length, width = query.shape
    pairs = length * (length + 1) // 2
    moved = 2 * query.size + keys.size + values.size
    return query.net.layer(name, "fused", [query, keys, values], query.shape, flops=4 * pairs * width, moved=moved)


def lstm(x: Value, name: str, hidden: int, *, initial: Value | None = None) -> Value:
    """Add an LSTM over the whole sequence as one layer, as in cuDNN.

    As in MXNet, the layer has four variables: input-to-hidden and hidden-to-hidden weights and biases. `initial` is the
    value of the state before the first token.
    """
    net, (length, width) = x.net, x.shape
    variables = [
        net.variable(f"{name}/{part}", *shape)
        for part, shape in (
            ("i2h_weight", (4 * hidden, width)),
            ("i2h_bias", (4 * hidden,)),
            ("h2h_weight", (4 * hidden, hidden)),
            ("h2h_bias", (4 * hidden,)),
        )
    ]
    flops = 2 * length * 4 * hidden * (width + hidden)
    moved = x.size + length * 10 * hidden  # four gates are written and read, the cell and the output are written
    inputs = [x] if initial is None else [x, initial]
    return net.layer(name, "split", inputs, (length, hidden), variables=variables, flops=flops, moved=moved)
