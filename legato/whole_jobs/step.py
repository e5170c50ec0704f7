"""The step of a job: its pipeline, data parallelism and the optimizer, with what each kind of communication costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import reduce

from legato.core.job import Job
from legato.whole_jobs import layer
from legato.whole_jobs.cost import COMPUTING, KINDS, Cost, collective, send
from legato.whole_jobs.layer import Passes
from legato.whole_jobs.memory import Memory, memory, owned
from legato.whole_jobs.parameters import Parameters, embeddings, held, model_flops, output, vocabulary_part
from legato.whole_jobs.parameters import layer as layer_parameters
from legato.whole_jobs.pipeline import run
from legato.whole_jobs.schedules import schedule

__all__ = ["Step", "floor_s", "predict"]

#: Bytes that the optimizer's step moves: of each owned parameter the norm (4), clipping (8), Adam (28) and the copy to
#: 16 bits (6); and of each gradient clearing, checking, and reading and writing for its scale.
_OWNED, _GRADIENT_TIMES = 46, 4


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a job, predicted.

    Of the `seconds`, the busiest worker computes `computing_s`, is idle for `bubble_s`, and waits for each
    kind of communication `exposed_s`, whose last one, `optimizer`, is the optimizer's step. `sent` are bytes of a GPU,
    in the mean over the stages, by kind and tier (`host`: links inside it; `network`: cards). `memory` is that of the
    fullest worker.
    """

    job: Job
    seconds: float
    computing_s: float
    bubble_s: float
    exposed_s: dict[str, float]
    sent: dict[tuple[str, str], float]
    memory: Memory

    @property
    def tokens_per_s(self) -> float:
        return self.job.tokens / self.seconds

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization: FLOPs of the model alone, nothing recomputed, over the peak of all GPUs."""
        peak = self.job.mesh.workers * self.job.machine.flops_per_s
        return self.tokens_per_s * model_flops(self.job.model) / peak

    @property
    def layer_s(self) -> float:
        """Seconds for which the smallest layer computes on a micro-batch, in both passes."""
        kinds = {index in self.job.model.mixtures for index in range(self.job.model.layers)}
        return min(sum(cost.of(COMPUTING) for cost in layer.layer(self.job, mixture)) for mixture in kinds)


def predict(job: Job) -> Step:
    """Predict a step. Only workers of different stages differ, so one pipeline stands for all."""
    plan = schedule(job.schedule, job.mesh.pipeline, job.microbatches, job.chunks)
    stages = _stages(job)
    split = any(action.kind == "weights" for action in plan[0])
    passes_s = [
        {
            "forward": one.forward.total_s,
            "backward": one.backward.total_s + (0 if split else one.weights.total_s),
            "weights": one.weights.total_s,
        }
        for one in stages
    ]
    tails = [_tail(job, worker, stages) for worker in range(job.mesh.pipeline)]
    sends = _sends(job, len(stages))
    sends_s = [one.total_s for one in sends]
    overlapped = "pipeline" in job.framework.hidden
    ends = [a + b.total_s for a, b in zip(run(plan, passes_s, sends_s, overlapped), tails, strict=True)]
    free = [a + b.total_s for a, b in zip(run(plan, passes_s, [0.0] * len(sends), True), tails, strict=True)]
    works = [tail + _work(job, stages[worker :: job.mesh.pipeline]) for worker, tail in enumerate(tails)]
    own = max(works, key=lambda one: one.total_s)
    exposed_s = {kind: own.of(kind) for kind in KINDS}
    exposed_s["pipeline"] += max(ends) - max(free)
    bubble_s = max(free) - own.total_s
    return Step(
        job,
        max(ends),
        own.of(COMPUTING),
        bubble_s,
        exposed_s,
        _sent(job, stages, sends, tails),
        max((memory(job, plan, worker) for worker in range(len(plan))), key=lambda one: one.total),
    )


def floor_s(job: Job) -> float:
    """Seconds that no step takes less than.

    A worker's own work stands behind a forward pass through the stages before its first one, and, but for gradients
    of weights that wait, before a backward pass through the same stages. Of all schedules here but GPipe this is nearly
    the step: their bubbles are no longer.
    """
    stages, workers = _stages(job), job.mesh.pipeline
    tails = [_tail(job, worker, stages).total_s for worker in range(workers)]
    waits = job.schedule == "zero-bubble"
    floor = before = behind = 0.0
    for worker in range(workers):
        own = stages[worker::workers]
        work = before + _work(job, own).total_s
        later = job.microbatches * sum(one.weights.total_s for one in own) if waits else 0.0
        floor = max(floor, work + tails[worker], work - later + behind + tails[0])
        before += stages[worker].forward.total_s
        behind += stages[worker].backward.total_s + (0.0 if waits else stages[worker].weights.total_s)
    return floor


def _work(job: Job, stages: list[Passes]) -> Cost:
    """All passes of a step through these stages."""
    return reduce(Cost.__add__, (cost for one in stages for cost in one), Cost()) * job.microbatches


def _stages(job: Job) -> list[Passes]:
    """The passes of one micro-batch through each stage."""
    counts, mesh, mixtures = job.split, job.mesh, job.model.mixtures
    kinds = {
        mixture: _sharded(
            job, layer.layer(job, mixture), layer_parameters(job.model, mixture, mesh.tensor, mesh.expert)
        )
        for mixture in {index in mixtures for index in range(job.model.layers)}
    }
    result, first = [], 0
    for stage, number in enumerate(counts):
        passes = _received(job, stage)
        for mixture, times in Counter(index in mixtures for index in range(first, first + number)).items():
            passes = passes.plus(kinds[mixture], times)
        if stage == 0:
            passes = passes.plus(_sharded(job, layer.embeddings(job), embeddings(job)))
        if stage == len(counts) - 1:
            passes = passes.plus(_sharded(job, layer.output(job), output(job)))
        result.append(passes)
        first += number
    return result


def _received(job: Job, stage: int) -> Passes:
    """What a stage gathers of activations that its neighbours sent in parts (arXiv 2104.04473, section 4.1)."""
    if not job.framework.divides_sends or job.sequence_parallel:
        return Passes()
    nbytes = 2 * layer.tokens(job) * job.model.hidden
    gather = collective("tensor", job.machine, job.group("tensor"), nbytes)
    last = len(job.split) - 1
    inside = [_is_away(job, stage - 1), _is_away(job, stage)]
    return Passes(gather if stage > 0 and inside[0] else Cost(), gather if stage < last and inside[1] else Cost())


def _is_away(job: Job, stage: int) -> bool:
    """Whether the worker of the stage behind this one is on another host."""
    hosts = job.mesh.hosts(["pipeline"], job.machine.gpus_per_host)
    return hosts[stage % len(hosts)] != hosts[(stage + 1) % len(hosts)]


def _sends(job: Job, stages: int) -> list[Cost]:
    """A transfer of an activation between each stage and the next one."""
    if job.mesh.pipeline == 1:
        return [Cost()] * (stages - 1)
    nbytes = 2 * layer.width(job)
    result = []
    for stage in range(stages - 1):
        away = _is_away(job, stage)
        divided = away and job.framework.divides_sends and not job.sequence_parallel
        result.append(send("pipeline", job.machine, nbytes / (job.mesh.tensor if divided else 1), away))
    return result


def _sharded(job: Job, passes: Passes, own: Parameters) -> Passes:
    """The passes of a part of the model, with the collectives of its sharded gradients or parameters.

    Without a pipeline, gradients are reduced in each micro-batch, and sharded parameters gathered for each pass
    (arXiv 1910.02054, section 7: three times the parameters); the stages of a pipeline do so once a step. These run
    beside the part's own passes, and are exposed where they are longer, as those of the embeddings are.
    """
    if job.mesh.pipeline > 1 or job.shard not in ("gradients", "parameters"):
        return passes
    reduce_scatter = _over_data(job, own, job.framework.gradient_nbytes)
    gather = _over_data(job, own, 2) if job.shard == "parameters" else Cost()
    behind_s = passes.backward.of(COMPUTING) + passes.weights.of(COMPUTING)
    return Passes(
        passes.forward + gather.behind(passes.forward.of(COMPUTING)),
        passes.backward + (gather + reduce_scatter).behind(behind_s),
        passes.weights,
    )


def _over_data(job: Job, own: Parameters, nbytes: int, halves: int = 1) -> Cost:
    """A collective of these bytes a parameter over data-parallel workers; that of experts over their replicas."""
    shared = collective("data", job.machine, job.group("data", "context"), nbytes * own.shared, halves)
    if not own.experts:
        return shared
    replicas = job.group("replica", "context")
    return shared + collective("data", job.machine, replicas, nbytes * own.experts, halves)


def _tail(job: Job, worker: int, stages: list[Passes]) -> Cost:
    """What a worker of the pipeline does behind its last pass."""
    own = Parameters(0)
    for stage in range(worker, len(stages), job.mesh.pipeline):
        own = own.plus(held(job, stage))
    return _data(job, own, stages[worker :: job.mesh.pipeline]) + _tied(job, worker) + _optimizer(job, own)


def _data(job: Job, own: Parameters, stages: list[Passes]) -> Cost:
    """Gradients are summed, and sharded parameters gathered: behind the last micro-batch's backward pass and the first
    one's forward pass if these collectives are hidden."""
    gradient, hidden = job.framework.gradient_nbytes, "data" in job.framework.hidden
    backward_s = sum(one.backward.of(COMPUTING) + one.weights.of(COMPUTING) for one in stages)
    forward_s = sum(one.forward.of(COMPUTING) for one in stages)
    if job.shard == "none":
        return _over_data(job, own, gradient, halves=2).behind(backward_s, hidden)
    gather, reduce_scatter = _over_data(job, own, 2), _over_data(job, own, gradient)
    if job.mesh.pipeline == 1 and job.shard != "optimizer":
        gather, reduce_scatter = Cost() if job.shard == "parameters" else gather, Cost()
    return reduce_scatter.behind(backward_s, hidden) + gather.behind(forward_s, hidden)


def _tied(job: Job, worker: int) -> Cost:
    """A tied table's gradients are summed between the first and the last stage (arXiv 1909.08053, section 4)."""
    last = job.mesh.pipeline - 1
    if not job.model.tied or last == 0 or worker not in (0, last):
        return Cost()
    nbytes = job.framework.gradient_nbytes * job.model.hidden * vocabulary_part(job)
    hosts = job.mesh.hosts(["pipeline"], job.machine.gpus_per_host)
    return send("pipeline", job.machine, nbytes, hosts[0] != hosts[-1])


def _optimizer(job: Job, own: Parameters) -> Cost:
    """The optimizer's step is bound by memory."""
    part = sum(own) if job.shard == "none" else owned(job, own)
    gradients = part if job.shard in ("gradients", "parameters") else sum(own)
    nbytes = _GRADIENT_TIMES * job.framework.gradient_nbytes * gradients + _OWNED * part
    return Cost({"optimizer": nbytes / (job.machine.memory_bytes_per_s * job.machine.memory_share)})


def _sent(job: Job, stages: list[Passes], sends: list[Cost], tails: list[Cost]) -> dict[tuple[str, str], float]:
    """Bytes of a step by kind and tier, of one GPU in the mean over the stages; both directions of a pipeline."""
    work = _work(job, stages) + reduce(Cost.__add__, sends, Cost()) * (2 * job.microbatches)
    total = work + reduce(Cost.__add__, tails, Cost())
    return (total * (1 / job.mesh.pipeline)).sent
