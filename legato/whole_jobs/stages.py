"""The work of a pipeline's stages in a step: passes, transfers, and the work after the last pass."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from legato.core.job import Job
from legato.core.program import Operation
from legato.zoo.language import layer
from legato.zoo.language.layer import Passes
from legato.zoo.language.parameters import Parameters, embeddings, held, output, owned, vocabulary_part
from legato.zoo.language.parameters import layer as layer_parameters
from legato.zoo.language.work import Beside, Exchange, Work

__all__ = ["Tail", "is_away", "over_data", "passes", "sent_nbytes", "tail"]

#: The bytes that the optimizer's step moves for each owned parameter: norm (4), clipping (8), Adam (28) and the copy to
#: 16 bits (6). And how often the step moves each gradient: to clear it, to check it, and to read and write it when it
#: is scaled. FSDP2 moves no gradients here: it frees them, and a step in bfloat16 needs no scale. On an H100, a step of
#: 1.1 billion parameters took 12 to 18 ms; 20 ms are predicted, and 27 ms would be if gradients were moved.
_OWNED, _GRADIENT_TIMES = 46, 4
_NOTHING = Passes()


def passes(job: Job) -> list[list[tuple[Passes, int]]]:
    """Return, for each stage, the parts of its passes over one micro-batch, each with how often it is repeated.

    Backward passes include the gradients of weights, unless the schedule delays these (`zero-bubble`).
    """
    counts, mesh, mixtures = job.split, job.mesh, job.model.mixtures
    kinds = {
        mixture: _sharded(
            job, layer.layer(job, mixture), layer_parameters(job.model, mixture, mesh.tensor, mesh.expert_parts)
        )
        for mixture in {index in mixtures for index in range(job.model.layers)}
    }
    result, first = [], 0
    for stage, number in enumerate(counts):
        parts = [(_received(job, stage), 1)]
        if stage == 0:
            parts.append((_sharded(job, layer.embeddings(job), embeddings(job)), 1))
        for mixture, times in Counter(index in mixtures for index in range(first, first + number)).items():
            parts.append((kinds[mixture], times))
        if stage == len(counts) - 1:
            parts.append((_sharded(job, layer.output(job), output(job)), 1))
        result.append(parts)
        first += number
    return result


def _received(job: Job, stage: int) -> Passes:
    """Return a stage's gathers of received activations: each worker received only a part (arXiv 2104.04473, 4.1)."""
    if not job.framework.divides_sends or job.sequence_parallel:
        return _NOTHING
    gather = Work(behind=(Exchange("tensor", "all_gather", ("tensor",), 2 * layer.tokens(job) * job.model.hidden),))
    last = len(job.split) - 1
    away = [is_away(job, stage - 1), is_away(job, stage)]
    return Passes(gather if stage > 0 and away[0] else Work(), gather if stage < last and away[1] else Work())


def is_away(job: Job, stage: int) -> bool:
    """Return whether any pipeline has this stage and the next one on two hosts; the first stage follows the last."""
    one, other = stage % job.mesh.pipeline, (stage + 1) % job.mesh.pipeline
    placements = job.mesh.placements(["pipeline"], job.machine.gpus_per_host)
    return any(hosts[one] != hosts[other] for hosts in placements)


def sent_nbytes(job: Job, stage: int) -> float:
    """Return the bytes of the activation, or part of one, that a worker sends to the next stage (or its gradient)."""
    divided = job.framework.divides_sends and not job.sequence_parallel and is_away(job, stage)
    return 2 * layer.width(job) / (job.mesh.tensor if divided else 1)


def _sharded(job: Job, own: Passes, parameters: Parameters) -> Passes:
    """Return the passes of a part of the model, with the collectives for its sharded gradients or parameters.

    Without a pipeline, gradients are reduced in each micro-batch, and sharded parameters are gathered for each pass
    (arXiv 1910.02054, section 7: three times the parameters). With a pipeline, gradients are reduced and parameters
    gathered only once per step (`tail`). The collectives of a part run during its own passes, and are exposed where
    they take longer than these passes.
    """
    joined = own if job.schedule == "zero-bubble" else Passes(own.forward, own.backward.and_then(own.weights))
    if job.mesh.pipeline > 1 or job.shard not in ("gradients", "parameters"):
        return joined
    reduce_scatter = over_data(job, parameters, "reduce_scatter", job.framework.reduced_nbytes)
    gather = over_data(job, parameters, "all_gather", 2) if job.shard == "parameters" else ()
    behind_s = own.backward.computing_s + own.weights.computing_s
    return Passes(
        joined.forward.and_then(Work(beside=(Beside(own.forward.computing_s, gather),))),
        joined.backward.and_then(Work(beside=(Beside(behind_s, gather + reduce_scatter),))),
        joined.weights,
    )


def over_data(job: Job, own: Parameters, operation: Operation, nbytes: int) -> tuple[Exchange, ...]:
    """Return the collectives of `nbytes` bytes per parameter among the workers that hold the same parameters.

    If the job has replicas, each worker also sums the gradients that it owns with its peers in the other replicas.
    """
    if job.replicas > 1:
        inside = Exchange("data", operation, ("expert", "context"), nbytes * own.shared)
        sums = inside._replace(operation="all_reduce", dimensions=("replica",), nbytes=nbytes * owned(job, own))
        return (inside, sums) if operation == "reduce_scatter" else (inside,)
    shared = Exchange("data", operation, ("data", "context"), nbytes * own.shared)
    copies = ("replica",) if job.mesh.expert_fold else ("replica", "context")
    replicas = shared._replace(dimensions=copies, nbytes=nbytes * own.experts)
    return (shared, replicas) if own.experts else (shared,)


class Tail(NamedTuple):
    """A worker's work once per step, after its last pass; passes may hide its collectives.

    `tied_nbytes` is the size of a tied table's gradients, which are summed between the first and the last stage (arXiv
    1909.08053, section 4).
    """

    gradients: tuple[Exchange, ...]
    parameters: tuple[Exchange, ...]
    tied_nbytes: float
    optimizer_s: float


def tail(job: Job, worker: int) -> Tail:
    """Return a pipeline worker's work after its last pass: sums of gradients, and gathers of sharded parameters."""
    own = Parameters(0)
    for stage in range(worker, len(job.split), job.mesh.pipeline):
        own = own.plus(held(job, stage))
    gradient = job.framework.reduced_nbytes
    gathers = over_data(job, own, "all_gather", 2)
    if job.shard == "none":
        reduces, gathers = over_data(job, own, "all_reduce", gradient), ()
    elif job.mesh.pipeline == 1 and job.shard != "optimizer":
        reduces, gathers = (), gathers if job.shard == "gradients" else ()
    else:
        reduces = over_data(job, own, "reduce_scatter", gradient)
    last = job.mesh.pipeline - 1
    tied = job.model.tied and last > 0 and worker in (0, last)
    nbytes = gradient * job.model.hidden * vocabulary_part(job) if tied else 0
    return Tail(reduces, gathers, nbytes, optimizer_s(job, own))


def optimizer_s(job: Job, own: Parameters) -> float:
    """Return the seconds of the optimizer's step, which memory bandwidth limits."""
    part = sum(own) if job.shard == "none" else owned(job, own)
    gradients = {"parameters": 0.0, "gradients": part}.get(job.shard, sum(own))
    nbytes = _GRADIENT_TIMES * job.framework.gradient_nbytes * gradients + _OWNED * part
    return nbytes / (job.machine.memory_bytes_per_s * job.machine.memory_share)
