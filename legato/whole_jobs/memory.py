"""Memory of a GPU: parameters, gradients, the optimizer's states, and activations kept for backward passes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from legato.core.job import Job
from legato.whole_jobs.schedules import Schedule
from legato.zoo.language.layer import logits, tokens, width
from legato.zoo.language.parameters import Parameters, held, layer, owned

__all__ = ["Memory", "Room", "activations", "memory", "static"]

#: Bytes of a parameter: in Adam, a 32-bit copy and two moments (arXiv 1910.02054, section 3.1), and 2 in the model.
_OPTIMIZER, _PARAMETER = 12, 2
#: Bytes of a logit in the loss's backward pass. A fused loss keeps 32 bits. torch's cross entropy keeps the logit in 16
#: bits, and in 32 bits the logarithm of its probability and the gradients of both.
_LOGITS, _LOGITS_WHOLE = 4, 14
#: With sharded parameters, the number of gathered layers: the layer that runs, and the layer gathered in advance.
_GATHERED_LAYERS = 2
#: Above this share of a GPU's memory, libraries and fragmentation may use the rest. Of 605 published jobs, 93% were
#: below this share and ran, or above it and ran out of memory (docs/whole_jobs.md).
_NEAR = 0.85

Room: TypeAlias = Literal["fits", "near the limit", "does not fit"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory that a worker needs, by use."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations

    @property
    def largest(self) -> str:
        """Return the name of the use that needs the most memory."""
        parts = asdict(self)
        return max(parts, key=lambda name: parts[name])

    def room_in(self, nbytes: float) -> Room:
        """Return whether this memory fits into `nbytes`, or is so near this limit that libraries may lack memory."""
        return "fits" if self.total <= _NEAR * nbytes else "near the limit" if self.total <= nbytes else "does not fit"


def memory(job: Job, plan: Schedule, worker: int) -> Memory:
    """Return the memory of a pipeline worker at the moment when the worker holds the most activations."""
    weights, gradients, optimizer = _states(job, {action.stage for action in plan[worker]})
    return Memory(weights, gradients, optimizer, _most_activations(job, plan, worker))


def static(job: Job) -> float:
    """Return a lower bound on the bytes of the fullest worker: its states, plus stage 0's activations for worker 0."""
    workers = job.mesh.pipeline
    in_flight = min(workers, job.microbatches) * _stage_activations(job, 0)
    return max(
        sum(_states(job, set(range(worker, len(job.split), workers)))) + (in_flight if worker == 0 else 0)
        for worker in range(workers)
    )


def _states(job: Job, stages: set[int]) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer states of a worker that has these stages."""
    own = Parameters(0)
    for stage in stages:
        own = own.plus(held(job, stage))
    whole, part = sum(own), owned(job, own)
    each_pass = job.mesh.pipeline == 1  # the stages of a pipeline gather and reduce only once per step
    weights = _PARAMETER * (part if job.shard == "parameters" and each_pass else whole)
    if job.shard == "parameters" and each_pass:
        tensor, expert = job.mesh.tensor, job.mesh.expert_parts
        largest = max(sum(layer(job.model, mixture, tensor, expert)) for mixture in _kinds(job))
        weights += _PARAMETER * _GATHERED_LAYERS * largest
    divided = job.shard in ("gradients", "parameters") and each_pass
    gradients = job.framework.gradient_nbytes * (part if divided else whole)
    optimizer = _OPTIMIZER * (whole if job.shard == "none" else part)
    return weights, gradients, optimizer


def _kinds(job: Job) -> list[bool]:
    """Return the kinds of the job's layers: False for dense layers, True for mixtures of experts."""
    mixtures = len(job.model.mixtures)
    return [False] * (mixtures < job.model.layers) + [True] * (mixtures > 0)


def _most_activations(job: Job, plan: Schedule, worker: int) -> float:
    """Return the most bytes of activations that a worker holds at once.

    A stage holds a micro-batch's activations from the forward pass to the last action of that micro-batch.
    """
    stages = {action.stage for action in plan[worker]}
    nbytes = {stage: _stage_activations(job, stage) for stage in stages}
    last = {(action.stage, action.microbatch): index for index, action in enumerate(plan[worker])}
    held_now = most = 0.0
    for index, action in enumerate(plan[worker]):
        if action.kind == "forward":
            held_now += nbytes[action.stage]
            most = max(most, held_now)
        if last[action.stage, action.microbatch] == index:
            held_now -= nbytes[action.stage]
    return most + (_again(job) if job.recompute == "full" else 0.0)


def _stage_activations(job: Job, stage: int) -> float:
    counts, model = job.split, job.model
    first = sum(counts[:stage])
    mixtures = sum(index in model.mixtures for index in range(first, first + counts[stage]))
    total = (counts[stage] - mixtures) * activations(job, False) + mixtures * (
        activations(job, True) if mixtures else 0
    )
    if stage == len(counts) - 1:  # the inputs of the norm and of the output layer, and logits
        total += 4 * width(job) + (_LOGITS if job.framework.fused_loss else _LOGITS_WHOLE) * logits(job)
    return total


def _again(job: Job) -> float:
    """Return the bytes of activations of the layer that is being recomputed."""
    return max(_kept(job, mixture, job.framework.flash) for mixture in _kinds(job))


def activations(job: Job, mixture: bool) -> float:
    """Return the bytes that a layer keeps of a micro-batch for its backward pass (arXiv 2205.05198, sections 4.1 to 5).

    A GPT layer without recomputation keeps s b h (34 + 5 a s / h) / tensor bytes under sequence parallelism. Without
    sequence parallelism, 10 s b h of these bytes are not divided by `tensor`. A fully recomputed layer keeps only its
    input.
    """
    if job.recompute == "full":
        return 2 * width(job)
    return _kept(job, mixture, job.framework.flash or job.recompute == "core")


def _kept(job: Job, mixture: bool, without_scores: bool) -> float:
    model, tensor, dropout = job.model, job.mesh.tensor, job.framework.dropout
    fused = job.framework.fused
    # The inputs of two norms, of attention and of the MLP, and two dropout masks. Norms that are not fused keep their
    # inputs in 32 bits, and their results before they are multiplied by the weights.
    between = width(job) * ((8 if fused else 16) + 2 * dropout)
    if model.latent is None:
        heads = (2 * model.heads + 2 * model.kv_heads) * model.head_size
    else:
        heads = model.heads * (4 * model.head_size + 2 * model.latent.rope)
    attention = 2 * tokens(job) * heads / tensor  # queries, keys, values and results
    each = 2 + 3 * dropout + (0 if job.framework.fused_softmax else 4)  # softmax's results, again in 32 bits
    scores = 0 if without_scores else tokens(job) * model.sequence * model.heads / tensor * each
    inner = tokens(job) * (model.shared_intermediate if mixture else model.intermediate)
    rows = tokens(job) * model.active_experts if mixture else 0
    inner += rows * model.expert_intermediate
    kept = (3 if fused else 4) if model.family == "llama" else 2  # if not fused, the activated gate as well
    mlp = 2 * kept * inner / tensor + 2 * rows * model.hidden / tensor
    selective = 0.5 if job.recompute == "selective" else 1.0  # half of the results, and attention's scores
    return between * selective + attention * selective + scores + mlp * selective
