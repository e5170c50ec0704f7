"""The time of a layer, of the embeddings and of the output layer, on one worker and for one micro-batch.

Each function computes one term: matrix products, attention, grouped products of experts, memory traffic, the fixed time
of a mixture, or collectives. In formulas, T is the number of tokens of a micro-batch on a worker, s the length of a
sequence, h the model's width, a and k the numbers of heads of queries and of keys on a worker, and d the size of a
head. Elements of activations have 2 bytes.

Sources: arXiv 2205.05198 (tensor and sequence parallelism, recomputation), 2104.04473 (products), 2205.14135 (attention
that keeps its scores in the kernel). The time of an elementwise operation follows from the bytes that each kernel reads
and writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from legato.core.job import Job
from legato.zoo.language.parameters import vocabulary_part
from legato.zoo.language.work import Beside, Exchange, Work

__all__ = ["Passes", "embeddings", "layer", "logits", "output", "tokens", "width"]

#: Bytes that the forward and the backward pass read and write for each element, with fused and with separate kernels.
_NORM, _NORM_UNFUSED = (4, 6), (30, 45)
_ROTARY, _ROTARY_UNFUSED = (4, 4), (20, 20)
_GATED, _GATED_UNFUSED, _GELU = (6, 10), (10, 18), (4, 6)
_LOSS, _LOSS_WHOLE = (6, 4), (14, 22)
_RESIDUAL, _RESIDUAL_DROPOUT = (6, 4), (7, 5)
_SCORES, _SCORES_DROPOUT = (5, 7), (10, 12)
#: More bytes for each score if the softmax is not fused: for a scale, a mask, a cast to 32 bits and a cast back.
_SCORES_UNFUSED = (23, 25)
#: Elements of a tile of a product.
_TILE = 256, 128
#: The fraction of a mixture's fixed time that belongs to the forward pass.
_FORWARD = 1 / 3


class Passes(NamedTuple):
    """The work of three passes: forward, gradients of activations (with recomputation), and gradients of weights."""

    forward: Work = Work()
    backward: Work = Work()
    weights: Work = Work()


def tokens(job: Job) -> int:
    """Return T, the number of tokens of a micro-batch on a worker before sequence parallelism."""
    return job.microbatch * job.model.sequence // job.mesh.context


def width(job: Job) -> float:
    """Return the number of elements of an activation between matrix products on a worker.

    The number is T h, divided by the number of tensor-parallel workers under sequence parallelism.
    """
    return tokens(job) * job.model.hidden / (job.mesh.tensor if job.sequence_parallel else 1)


def logits(job: Job) -> float:
    """Return the number of logits for which a worker computes the loss."""
    return tokens(job) * vocabulary_part(job) * (1 if job.framework.fused_loss else job.mesh.tensor)


def layer(job: Job, mixture: bool) -> Passes:
    """Return the passes of a layer, which consists of attention and either an MLP or a `mixture` of experts."""
    products = _products(job, mixture)
    attention_s = _attention_s(job)
    grouped = _grouped_s(job) if mixture else (0.0, 0.0, 0.0)
    stops = job.framework.stops_early and not mixture
    repeated_s = sum(products[:-1] if stops else products)
    elementwise_s = [_memory_s(job, nbytes) for nbytes in zip(*_elementwise(job, mixture), strict=True)]
    fixed_s = job.framework.mixture_s if mixture else 0.0
    again_s = {
        "none": 0.0,
        "core": attention_s[0],
        "selective": sum(products[1::2]) + elementwise_s[0],
        "full": repeated_s + attention_s[0] + grouped[0] + elementwise_s[0],
    }[job.recompute]
    forward_s = sum(products) + attention_s[0] + grouped[0] + elementwise_s[0] + _FORWARD * fixed_s
    backward_s = sum(products) + attention_s[1] + grouped[1] + elementwise_s[1] + (1 - _FORWARD) * fixed_s + again_s
    forward, backward = Work(forward_s), Work(backward_s + job.framework.host_s)
    full = job.recompute == "full"
    before_s = again_s if full else 0.0  # the start of the backward pass, which repeats the forward pass
    for kind, part in _communication(job, mixture).items():
        tensor, products_s = kind == "tensor", sum(products)
        hidden = kind in job.framework.hidden
        whole = "tensor:forward" in job.framework.hidden if tensor else hidden
        # Only products can hide collectives of tensor parallelism.
        forward = forward.and_then(_placed(part.forward, products_s if tensor else forward_s, whole))
        if full:
            again = _without_last(part.forward) if tensor and stops else part.forward
            backward = backward.and_then(_placed(again, repeated_s if tensor else before_s, whole))
        backward = backward.and_then(_placed(part.backward, 2 * products_s, whole, before_s))
        beside_s = 2 * products_s if tensor else backward_s - before_s
        backward = backward.and_then(_placed(part.beside, beside_s, hidden, before_s))
    return Passes(forward, backward, Work(sum(products) + grouped[2]))


def _without_last(exchanges: tuple[Exchange, ...]) -> tuple[Exchange, ...]:
    """Return the exchanges, with the last kind of exchange one time fewer."""
    return (*exchanges[:-1], exchanges[-1]._replace(times=exchanges[-1].times - 1))


def _placed(exchanges: tuple[Exchange, ...], seconds: float, hidden: bool, after_s: float = 0.0) -> Work:
    """Return work whose exchanges run during these seconds of computing if they are `hidden`, or else afterwards."""
    return Work(beside=(Beside(seconds, exchanges, after_s),)) if hidden else Work(behind=exchanges)


def _product_s(job: Job, m: float, k: float, n: float) -> float:
    """Return the seconds of the product of m x k and k x n matrices: 2 m k n x waves / (peak x efficiency).

    The products of all passes take the same time, because `waves` is a mean over three products: this product, and the
    two products that give the gradients of its matrices.
    """
    waves = 1.0
    if (units := job.machine.multiprocessors) and m * k * n:
        waves = sum(_waves(units, *result) for result in ((m, n), (m, k), (k, n))) / 3
    return 2 * m * k * n * waves / (job.machine.flops_per_s * job.machine.efficiency)


def _waves(units: int, rows: float, columns: float) -> float:
    """Return the factor by which a product takes longer because its time is rounded up to whole waves of whole tiles.

    Each multiprocessor computes one tile at a time. A tile has 256 x 128 or 128 x 256 elements, the largest and most
    efficient sizes in cuBLAS (NVIDIA, Matrix Multiplication Background User's Guide, sections 2.3, 3.1 and 3.2).
    """
    tiles = min(math.ceil(rows / a) * math.ceil(columns / b) for a, b in (_TILE, _TILE[::-1]))
    return math.ceil(tiles / units) * units * math.prod(_TILE) / (rows * columns)


def _memory_s(job: Job, nbytes: Iterable[float]) -> float:
    """Return the seconds of memory traffic: bytes / (bandwidth x share)."""
    return sum(nbytes) / (job.machine.memory_bytes_per_s * job.machine.memory_share)


def _products(job: Job, mixture: bool) -> list[float]:
    """Return the seconds of each dense matrix product of a forward pass, in order."""
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
    """Return the seconds of the core of attention in the forward and in the backward pass.

    In the forward pass, attention with all scores takes 2 T s a (d_qk + d_v) FLOPs. If scores stay in the kernel, only
    the causal half is computed, and the backward pass takes 2.5 times as long as the forward pass, since it computes
    scores again. If scores are stored, all scores are computed, and the backward pass takes twice as long as the
    forward pass. Both passes then also move T s a scores to and from memory, in softmax, dropout and the products.
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
    """Return the number of rows that the experts of a worker compute if all experts have equal loads."""
    return tokens(job) * job.model.active_experts / (job.mesh.tensor if job.mesh.expert_fold else 1)


def _inner(job: Job) -> float:
    """Return the width of a worker's part of an expert."""
    return job.model.expert_intermediate / (1 if job.mesh.expert_fold else job.mesh.tensor)


def _grouped_s(job: Job) -> tuple[float, float, float]:
    """Return the seconds of experts' grouped products: forward, gradients of activations, and gradients of weights.

    The time of a product is the sum, not the maximum, of flops / (peak x efficiency) and bytes / (bandwidth x share).
    The bytes are operands and results; products for gradients of weights also read and write 32-bit sums. The computed
    times differ from measured kernels on a B200 by 6% in the median.
    """
    model, machine = job.model, job.machine
    rows, inner = _rows(job), _inner(job)
    number = 3 if model.family == "llama" else 2
    weights = model.experts / job.mesh.expert * model.hidden * inner
    flops_s = 2 * rows * model.hidden * inner / (machine.flops_per_s * machine.grouped_efficiency)
    ends = 2 * rows * (model.hidden + inner)
    both = number * (flops_s + _memory_s(job, [ends, 2 * weights]))
    return both, both, number * (flops_s + _memory_s(job, [ends, 8 * weights]))


def _elementwise(job: Job, mixture: bool) -> list[tuple[float, float]]:
    """Return the bytes of each elementwise operation in the forward and in the backward pass."""
    model, framework, fused = job.model, job.framework, job.framework.fused
    llama, tensor = model.family == "llama", job.mesh.tensor
    if model.latent is None:
        rotated = (model.heads + model.kv_heads) / tensor * model.head_size
    else:
        rotated = (model.heads / tensor + 1) * model.latent.rope
    inner = tokens(job) * (model.shared_intermediate if mixture else model.intermediate) / tensor
    inner += _rows(job) * _inner(job) if mixture else 0
    gated = _GATED if fused else _GATED_UNFUSED
    counts = [
        (2 * width(job), _NORM if fused else _NORM_UNFUSED),
        (2 * width(job), _RESIDUAL_DROPOUT if framework.dropout else _RESIDUAL),
        (tokens(job) * rotated if llama else 0.0, _ROTARY if fused else _ROTARY_UNFUSED),
        (inner, gated if llama else _GELU),
    ]
    return [(elements * forward, elements * backward) for elements, (forward, backward) in counts]


class _Sends(NamedTuple):
    """Exchanges in the forward pass, after the backward pass, and during the backward pass, which may hide them."""

    forward: tuple[Exchange, ...] = ()
    backward: tuple[Exchange, ...] = ()
    beside: tuple[Exchange, ...] = ()


def _communication(job: Job, mixture: bool) -> dict[str, _Sends]:
    """Return the exchanges of a layer by kind.

    If each expert is divided among tensor-parallel workers, these workers send all rows of the experts. If experts are
    not divided, tensor-parallel workers only send the rows of the MLP to which all tokens go.
    """
    activation = 2 * tokens(job) * job.model.hidden
    if mixture:
        copies = job.model.active_experts
        if job.mesh.expert_fold:
            copies = 1 if job.model.shared_intermediate else 0
        both = _tensor(job, activation), _tensor(job, activation * copies) if copies else _Sends()
        tensor = _Sends(*(a + b for a, b in zip(*both, strict=True)))
    else:
        tensor = _Sends(*(tuple(one._replace(times=2 * one.times) for one in a) for a in _tensor(job, activation)))
    return {"tensor": tensor, "context": _context(job), "expert": _expert(job) if mixture else _Sends()}


def _tensor(job: Job, nbytes: float) -> _Sends:
    """Return the exchanges around attention or an MLP, for an activation of `nbytes` (arXiv 2205.05198, section 4.2.2).

    With sequence parallelism, there is a gather before the first matrices, which are divided by columns, and a
    reduce-scatter after the last matrix, which is divided by rows. The backward pass does the reverse, and gathers the
    inputs again. (DTensor keeps the inputs, and gathers again only with selective recomputation.) Without sequence
    parallelism, the forward and the backward pass have one all-reduce each.
    """
    if not job.sequence_parallel:
        both = (Exchange("tensor", "all_reduce", ("tensor",), nbytes),)
        return _Sends(both, (), both)
    gather = Exchange("tensor", "all_gather", ("tensor",), nbytes)
    reduce_scatter = Exchange("tensor", "reduce_scatter", ("tensor",), nbytes)
    again = job.framework.gathers_inputs or job.recompute == "selective"
    return _Sends((gather, reduce_scatter), (gather,), (reduce_scatter, gather) if again else (reduce_scatter,))


def _context(job: Job) -> _Sends:
    """Return a gather of all keys and values (arXiv 2407.21783, section 3.3.2), for both passes.

    The backward pass also has a reduce-scatter.
    """
    model = job.model
    if model.latent is None:
        each = 2 * model.kv_heads * model.head_size
    else:
        each = model.heads * (2 * model.head_size + model.latent.rope)
    nbytes = 2 * tokens(job) * job.mesh.context * each / job.mesh.tensor
    gather = Exchange("context", "all_gather", ("context",), nbytes)
    return _Sends((gather,), (), (gather, Exchange("context", "reduce_scatter", ("context",), nbytes)))


def _expert(job: Job) -> _Sends:
    """Return the exchanges of tokens to experts and back, in both passes, each with T h x (active experts) elements.

    A token goes to k of the experts, which are on n hosts. If the framework sends only one copy of a token to each
    host, there are n (1 - (1 - 1/n)^k) sends on average (DeepEP, arXiv 2412.19437, section 3.2.2).
    """
    dimensions, copies = job.mesh.expert_dimensions, job.model.active_experts
    nbytes = 2 * tokens(job) * copies * job.model.hidden / job.mesh.tensor
    if job.framework.deduplicates and (hosts := job.group(*dimensions).hosts) > 1:
        nbytes *= hosts * (1 - (1 - 1 / hosts) ** copies) / copies
    both = (Exchange("expert", "all_to_all", dimensions, nbytes, 2),)
    return _Sends(both, (), both)


def embeddings(job: Job) -> Passes:
    """Return the passes of the embeddings; the rows of the table of embeddings are divided among workers.

    The table's gradients are dense: every micro-batch sets all elements to zero, adds its gradients, and reads all
    elements.
    """
    nbytes = 2 * tokens(job) * job.model.hidden
    forward = Exchange("tensor", "reduce_scatter" if job.sequence_parallel else "all_reduce", ("tensor",), nbytes)
    backward = (Exchange("tensor", "all_gather", ("tensor",), nbytes),) if job.sequence_parallel else ()
    table = vocabulary_part(job) * job.model.hidden
    traffic_s = _memory_s(job, [(4 + 2 * job.framework.gradient_nbytes) * table])
    return Passes(Work(behind=(forward,)), Work(behind=backward), Work(traffic_s))


def output(job: Job) -> Passes:
    """Return the passes of the last norm, the output layer and the loss."""
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
