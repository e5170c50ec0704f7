"""The time of a layer, and of what comes before and after the layers, on one worker and for one micro-batch.

Each function is a term: matrix products, attention, grouped products of experts, memory traffic, the fixed time of a
mixture, and collectives. In formulas, T is the tokens of a micro-batch on a worker, s the sequence, h the model's
width, a and k the heads of queries and of keys on a worker, d their size. Activations have 2 bytes.

Sources: arXiv 2205.05198 (tensor and sequence parallelism, recomputation), 2104.04473 (products), 2205.14135 (attention
that keeps its scores). Bytes of elementwise operations count what each kernel reads and writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from legato.core.job import Job
from legato.zoo.language.parameters import vocabulary_part
from legato.zoo.language.work import Beside, Exchange, Work

__all__ = ["Passes", "embeddings", "layer", "logits", "output", "tokens", "width"]

#: Bytes that the forward and the backward pass read and write for each element: as fused kernels, and one by one.
_NORM, _NORM_UNFUSED = (4, 6), (30, 45)
_ROTARY, _ROTARY_UNFUSED = (4, 4), (20, 20)
_GATED, _GATED_UNFUSED, _GELU = (6, 10), (10, 18), (4, 6)
_LOSS, _LOSS_WHOLE = (6, 4), (14, 22)
_RESIDUAL, _RESIDUAL_DROPOUT = (6, 4), (7, 5)
_SCORES, _SCORES_DROPOUT = (5, 7), (10, 12)
#: Of scores whose softmax is not fused, besides: a scale, a mask, a cast to 32 bits and one back.
_SCORES_UNFUSED = (23, 25)
#: Elements of a tile of a product.
_TILE = 256, 128
#: The forward pass's part of the fixed time of a mixture.
_FORWARD = 1 / 3


class Passes(NamedTuple):
    """The forward pass, gradients of activations (with what is recomputed), and gradients of weights."""

    forward: Work = Work()
    backward: Work = Work()
    weights: Work = Work()


def tokens(job: Job) -> int:
    """T: tokens of a micro-batch on a worker, before sequence parallelism."""
    return job.microbatch * job.model.sequence // job.mesh.context


def width(job: Job) -> float:
    """Elements of an activation between matrix products on a worker: T h, divided under sequence parallelism."""
    return tokens(job) * job.model.hidden / (job.mesh.tensor if job.sequence_parallel else 1)


def logits(job: Job) -> float:
    """Logits of which a worker computes the loss."""
    return tokens(job) * vocabulary_part(job) * (1 if job.framework.fused_loss else job.mesh.tensor)


def layer(job: Job, mixture: bool) -> Passes:
    """A layer of attention and an MLP, or a `mixture` of experts."""
    products = _products(job, mixture)
    attention_s = _attention_s(job)
    grouped = _grouped_s(job) if mixture else (0.0, 0.0, 0.0)
    elementwise_s = [_memory_s(job, nbytes) for nbytes in zip(*_elementwise(job, mixture), strict=True)]
    fixed_s = job.framework.mixture_s if mixture else 0.0
    again_s = {
        "none": 0.0,
        "core": attention_s[0],
        "selective": sum(products[1::2]) + elementwise_s[0],
        "full": sum(products) + attention_s[0] + grouped[0] + elementwise_s[0],
    }[job.recompute]
    forward_s = sum(products) + attention_s[0] + grouped[0] + elementwise_s[0] + _FORWARD * fixed_s
    backward_s = sum(products) + attention_s[1] + grouped[1] + elementwise_s[1] + (1 - _FORWARD) * fixed_s + again_s
    forward, backward = Work(forward_s), Work(backward_s + job.framework.host_s)
    full = job.recompute == "full"
    before_s = again_s if full else 0.0  # of the backward pass, in which the forward pass runs again
    for kind, part in _communication(job, mixture).items():
        tensor, products_s = kind == "tensor", sum(products)
        hidden = kind in job.framework.hidden
        whole = "tensor:forward" in job.framework.hidden if tensor else hidden
        # Collectives of tensor parallelism can be hidden by products only.
        forward = forward.and_then(_placed(part.forward, products_s if tensor else forward_s, whole))
        if full:
            backward = backward.and_then(_placed(part.forward, products_s if tensor else before_s, whole))
        backward = backward.and_then(_placed(part.backward, 2 * products_s, whole, before_s))
        beside_s = 2 * products_s if tensor else backward_s - before_s
        backward = backward.and_then(_placed(part.beside, beside_s, hidden, before_s))
    return Passes(forward, backward, Work(sum(products) + grouped[2]))


def _placed(exchanges: tuple[Exchange, ...], seconds: float, hidden: bool, after_s: float = 0.0) -> Work:
    """Return work whose exchanges run during these seconds of computing if they are hidden, and after it otherwise."""
    return Work(beside=(Beside(seconds, exchanges, after_s),)) if hidden else Work(behind=exchanges)


def _product_s(job: Job, m: float, k: float, n: float) -> float:
    """Return the seconds of an m x k matrix times a k x n matrix, 2 m k n x waves / (peak x efficiency).

    The same in all passes: of the result and of the gradients of both matrices, `waves` is the mean.
    """
    waves = 1.0
    if (units := job.machine.multiprocessors) and m * k * n:
        waves = sum(_waves(units, *result) for result in ((m, n), (m, k), (k, n))) / 3
    return 2 * m * k * n * waves / (job.machine.flops_per_s * job.machine.efficiency)


def _waves(units: int, rows: float, columns: float) -> float:
    """Return how much longer a product takes because whole waves of whole tiles cover its result.

    Each multiprocessor computes one tile at a time. A tile has 256 x 128 or 128 x 256 elements, the largest and most
    efficient sizes in cuBLAS (NVIDIA, Matrix Multiplication Background User's Guide, sections 2.3, 3.1 and 3.2).
    """
    tiles = min(math.ceil(rows / a) * math.ceil(columns / b) for a, b in (_TILE, _TILE[::-1]))
    return math.ceil(tiles / units) * units * math.prod(_TILE) / (rows * columns)


def _memory_s(job: Job, nbytes: Iterable[float]) -> float:
    """Bytes / (bandwidth x share)."""
    return sum(nbytes) / (job.machine.memory_bytes_per_s * job.machine.memory_share)


def _products(job: Job, mixture: bool) -> list[float]:
    """Seconds of the dense matrix products of a forward pass, in their order."""
    model, tensor = job.model, job.mesh.tensor
    hidden, size, heads, kv_heads = model.hidden, model.head_size, model.heads // tensor, model.kv_heads // tensor
    divided = tokens(job) / (tensor if job.sequence_parallel else 1)
    matrices: list[tuple[float, ...]]
    if (latent := model.latent) is None:
        matrices = [(hidden, heads * size), (hidden, kv_heads * size), (hidden, kv_heads * size)]
        down = []
    else:
        down = [(divided, hidden, latent.query), (divided, hidden, latent.key_value + latent.rope)]
        matrices = [(latent.query, heads * (size + latent.rope)), (latent.key_value, heads * 2 * size)]
    matrices.append((heads * size, hidden))
    inner = (model.shared_intermediate if mixture else model.intermediate) // tensor
    matrices += [(hidden, inner)] * (2 if model.family == "llama" else 1) + [(inner, hidden)]
    router = [(divided, hidden, model.experts)] if mixture else []
    return [_product_s(job, *one) for one in (*down, *((tokens(job), *matrix) for matrix in matrices), *router)]


def _attention_s(job: Job) -> tuple[float, float]:
    """The core of attention, forward and backward.

    Forward 2 T s a (d_qk + d_v) FLOPs. With scores in the kernel: the causal half of them, and backward 2.5 times that,
    since scores are computed again. With stored scores: all, backward twice that, and the memory traffic of T s a
    scores in softmax, dropout and the products.
    """
    model, framework = job.model, job.framework
    pairs = tokens(job) * model.sequence * model.heads / job.mesh.tensor
    flops = 2 * pairs * (2 * model.head_size + (model.latent.rope if model.latent else 0))
    seconds = flops / (job.machine.flops_per_s * job.machine.attention_efficiency)
    if framework.flash:
        return seconds / 2, 2.5 * seconds / 2
    scores = _SCORES_DROPOUT if framework.dropout else _SCORES
    more = (0, 0) if framework.fused_softmax else _SCORES_UNFUSED
    forward_s, backward_s = (_memory_s(job, [(scores[k] + more[k]) * pairs]) for k in range(2))
    return seconds + forward_s, 2 * seconds + backward_s


def _rows(job: Job) -> float:
    """Rows that the experts of a worker compute: experts are loaded evenly."""
    return tokens(job) * job.model.active_experts


def _grouped_s(job: Job) -> tuple[float, float, float]:
    """The grouped products of experts: forward, gradients of activations, and of weights.

    The sum, not the larger, of flops / (peak x efficiency) and of bytes / (bandwidth x share): operands, results, and,
    for gradients of weights, 32-bit sums read and written. Measured kernels of B200 agree within a median of 6%.
    """
    model, machine = job.model, job.machine
    rows, inner = _rows(job), model.expert_intermediate / job.mesh.tensor
    number = 3 if model.family == "llama" else 2
    weights = model.experts / job.mesh.expert * model.hidden * inner
    flops_s = 2 * rows * model.hidden * inner / (machine.flops_per_s * machine.grouped_efficiency)
    ends = 2 * rows * (model.hidden + inner)
    both = number * (flops_s + _memory_s(job, [ends, 2 * weights]))
    return both, both, number * (flops_s + _memory_s(job, [ends, 8 * weights]))


def _elementwise(job: Job, mixture: bool) -> list[tuple[float, float]]:
    """Bytes of the forward and the backward pass, for each of the elementwise operations."""
    model, framework, fused = job.model, job.framework, job.framework.fused
    llama, tensor = model.family == "llama", job.mesh.tensor
    if model.latent is None:
        rotated = (model.heads + model.kv_heads) / tensor * model.head_size
    else:
        rotated = (model.heads / tensor + 1) * model.latent.rope
    inner = tokens(job) * (model.shared_intermediate if mixture else model.intermediate) / tensor
    inner += _rows(job) * model.expert_intermediate / tensor if mixture else 0
    gated = _GATED if fused else _GATED_UNFUSED
    counts = [
        (2 * width(job), _NORM if fused else _NORM_UNFUSED),
        (2 * width(job), _RESIDUAL_DROPOUT if framework.dropout else _RESIDUAL),
        (tokens(job) * rotated if llama else 0.0, _ROTARY if fused else _ROTARY_UNFUSED),
        (inner, gated if llama else _GELU),
    ]
    return [(elements * forward, elements * backward) for elements, (forward, backward) in counts]


class _Sends(NamedTuple):
    """Exchanges of the forward pass, of the backward pass, and of those which the framework may hide in it."""

    forward: tuple[Exchange, ...] = ()
    backward: tuple[Exchange, ...] = ()
    beside: tuple[Exchange, ...] = ()


def _communication(job: Job, mixture: bool) -> dict[str, _Sends]:
    """Return what a layer sends, by kind; if tensor parallelism divides experts, for all rows of a mixture."""
    activation = 2 * tokens(job) * job.model.hidden
    if mixture:
        both = _tensor(job, activation), _tensor(job, activation * job.model.active_experts)
        tensor = _Sends(*(a + b for a, b in zip(*both, strict=True)))
    else:
        tensor = _Sends(*(tuple(one._replace(times=2 * one.times) for one in a) for a in _tensor(job, activation)))
    return {"tensor": tensor, "context": _context(job), "expert": _expert(job) if mixture else _Sends()}


def _tensor(job: Job, nbytes: float) -> _Sends:
    """Return the sends around attention or an MLP, for an activation of `nbytes` (arXiv 2205.05198, section 4.2.2).

    With sequence parallelism: a gather before the first matrices, divided by columns, and a reduce-scatter after the
    last one, divided by rows. Backward the reverse, and a gather of the inputs again (not in DTensor, which keeps them,
    but where products are selected to be recomputed). Without: an all-reduce each.
    """
    if not job.sequence_parallel:
        both = (Exchange("tensor", "all_reduce", ("tensor",), nbytes),)
        return _Sends(both, (), both)
    gather = Exchange("tensor", "all_gather", ("tensor",), nbytes)
    reduce_scatter = Exchange("tensor", "reduce_scatter", ("tensor",), nbytes)
    again = job.framework.gathers_inputs or job.recompute == "selective"
    return _Sends((gather, reduce_scatter), (gather,), (reduce_scatter, gather) if again else (reduce_scatter,))


def _context(job: Job) -> _Sends:
    """A gather of all keys and values (arXiv 2407.21783, section 3.3.2); backward again, and a reduce-scatter."""
    model = job.model
    if model.latent is None:
        each = 2 * model.kv_heads * model.head_size
    else:
        each = model.heads * (2 * model.head_size + model.latent.rope)
    nbytes = 2 * tokens(job) * job.mesh.context * each / job.mesh.tensor
    gather = Exchange("context", "all_gather", ("context",), nbytes)
    return _Sends((gather,), (), (gather, Exchange("context", "reduce_scatter", ("context",), nbytes)))


def _expert(job: Job) -> _Sends:
    """Tokens to their experts and back, T h x active experts each, in both passes.

    If the framework sends one copy of a token to each host, its k copies cause n (1 - (1 - 1/n)^k) sends on average for
    n hosts (DeepEP, arXiv 2412.19437, section 3.2.2).
    """
    nbytes, copies = 2 * _rows(job) * job.model.hidden / job.mesh.tensor, job.model.active_experts
    if job.framework.deduplicates and (hosts := job.group("expert").hosts) > 1:
        nbytes *= hosts * (1 - (1 - 1 / hosts) ** copies) / copies
    both = (Exchange("expert", "all_to_all", ("expert",), nbytes, 2),)
    return _Sends(both, (), both)


def embeddings(job: Job) -> Passes:
    """The table, divided by its rows: its gradients are dense, cleared, added up and read for each micro-batch."""
    nbytes = 2 * tokens(job) * job.model.hidden
    forward = Exchange("tensor", "reduce_scatter" if job.sequence_parallel else "all_reduce", ("tensor",), nbytes)
    backward = (Exchange("tensor", "all_gather", ("tensor",), nbytes),) if job.sequence_parallel else ()
    table = vocabulary_part(job) * job.model.hidden
    traffic_s = _memory_s(job, [(4 + 2 * job.framework.gradient_nbytes) * table])
    return Passes(Work(behind=(forward,)), Work(behind=backward), Work(traffic_s))


def output(job: Job) -> Passes:
    """The last norm, the output layer and the loss."""
    part, whole = vocabulary_part(job), not job.framework.fused_loss
    product_s = _product_s(job, tokens(job), job.model.hidden, part)
    norm, loss = _NORM if job.framework.fused else _NORM_UNFUSED, _LOSS_WHOLE if whole else _LOSS
    forward_s, backward_s = (
        _memory_s(job, [width(job) * norm[k], logits(job) * loss[k]]) + product_s for k in range(2)
    )
    gather = Exchange("tensor", "all_gather", ("tensor",), 2 * width(job) * job.mesh.tensor)
    forward = (gather,) if job.sequence_parallel else ()
    forward += (gather._replace(nbytes=2 * logits(job)),) if whole else ()
    sends = _tensor(job, 2 * tokens(job) * job.model.hidden)
    backward = Work(backward_s).and_then(_placed(sends.beside, 2 * product_s, "tensor" in job.framework.hidden))
    return Passes(Work(forward_s, behind=forward), backward, Work(product_s))
