"""The layers of sequence models, on values of shape (length, width). Dropout is left out, as in `image`."""

from __future__ import annotations

from legato.zoo.builder import Value, reshape

__all__ = ["attention", "causal_attention", "embedding", "gated", "layer_norm", "lstm", "rms_norm", "rotate"]


def embedding(tokens: Value, name: str, vocabulary: int, width: int, *, weights: int | None = None) -> Value:
    """Look up a row of the table for every token; `weights` is the index of a table to share.

    The gradient is a dense table, as in the papers' frameworks by default.
    """
    table = tokens.net.variable(name, vocabulary, width) if weights is None else weights
    shape = (*tokens.shape, width)
    moved = 2 * tokens.size * width  # only the rows that it looks up
    return tokens.net.layer(f"{name}/lookup", "weights", [tokens], shape, variables=[table], moved=moved)


def layer_norm(x: Value, name: str) -> Value:
    """Layer normalization: gamma and beta."""
    variables = [x.net.variable(f"{name}/{vector}", x.shape[-1]) for vector in ("gamma", "beta")]
    return x.net.layer(name, "fused", [x], x.shape, variables=variables, moved=3 * x.size)


def rms_norm(x: Value, name: str) -> Value:
    """Root mean square normalization: gamma."""
    gamma = x.net.variable(f"{name}/gamma", x.shape[-1])
    return x.net.layer(name, "fused", [x], x.shape, variables=[gamma], moved=3 * x.size)


def rotate(query: Value, keys: Value, name: str) -> tuple[Value, Value]:
    """Rotary position embeddings of queries and keys, in one layer, no variables."""
    length, width = query.shape
    both = query.net.layer(name, "fused", [query, keys], (length, width + keys.shape[1]))
    return reshape(both, length, width), reshape(both, length, keys.shape[1])


def gated(gate: Value, x: Value, name: str) -> Value:
    """An activation of one value times another value of the same shape: SwiGLU."""
    return x.net.layer(name, "fused", [gate, x], x.shape)


def attention(name: str, query: Value, keys: Value, values: Value, heads: int = 1) -> Value:
    """Dot-product attention, no variables: scores, their softmax, and the weighted sum of the values.

    The scores, (heads, query length, key length), are written and read twice.
    """
    scores = heads * query.shape[0] * keys.shape[0]
    flops = 2 * query.shape[0] * keys.shape[0] * (query.shape[1] + values.shape[1])
    shape = (query.shape[0], values.shape[1])
    moved = 2 * query.size + keys.size + values.size + 4 * scores
    return query.net.layer(name, "fused", [query, keys, values], shape, flops=flops, moved=moved)


def causal_attention(name: str, query: Value, keys: Value, values: Value) -> Value:
    """Self-attention in which a token sees itself and the tokens before it, in one kernel, no variables.

    The scores stay in the kernel (FlashAttention), and only the pairs of tokens
    that see each other are computed. Several heads of the queries may share a
    head of the keys and values, which are then narrower.
    """
    length, width = query.shape
    pairs = length * (length + 1) // 2
    moved = 2 * query.size + keys.size + values.size
    return query.net.layer(name, "fused", [query, keys, values], query.shape, flops=4 * pairs * width, moved=moved)


def lstm(x: Value, name: str, hidden: int, *, initial: Value | None = None) -> Value:
    """One LSTM layer over the whole sequence; each pass is one op, as in cuDNN.

    It has four variables, as in MXNet: input-to-hidden and hidden-to-hidden
    weights and biases. `initial` is the value of its first state.
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
    moved = x.size + length * 10 * hidden  # four gates written and read, the cell and the output written
    inputs = [x] if initial is None else [x, initial]
    return net.layer(name, "split", inputs, (length, hidden), variables=variables, flops=flops, moved=moved)
