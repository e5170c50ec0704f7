"""The step of a job: its pipeline, data parallelism and the optimizer, with what each kind of communication costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, NamedTuple

from legato.core.job import Job
from legato.core.pictures import draw_bars
from legato.core.program import Compute, clock
from legato.core.text import percent
from legato.core.units import format_bytes, format_seconds
from legato.whole_jobs.cost import COMPUTING, KINDS, Cost, cost_of, cost_of_work, send
from legato.whole_jobs.memory import Memory, Room, memory
from legato.whole_jobs.pipeline import STEPS, coarse
from legato.whole_jobs.schedules import schedule
from legato.whole_jobs.stages import is_away, passes, sent_nbytes, tail
from legato.whole_jobs.sure import Interval, Kind, interval, kind_of
from legato.zoo.language import layer
from legato.zoo.language.parameters import model_flops

__all__ = ["Step", "beyond_rounding", "floor_s", "predict", "waits"]


@dataclass(frozen=True, slots=True)
class Step:
    """A predicted step of a job.

    In a step of `seconds`, the busiest worker computes for `computing_s` and is idle for `bubble_s`. `exposed_s` has
    the seconds in which this worker waits for each kind of communication; its entry `optimizer` is the optimizer's
    step. `sent` has the bytes that each GPU sends (mean over stages), by kind and tier (`host`: links inside the host;
    `network`: cards). `memory` is the memory of the fullest worker.
    """

    job: Job
    seconds: float
    computing_s: float
    bubble_s: float
    exposed_s: dict[str, float]
    sent: dict[tuple[str, str], float]
    memory: Memory

    @property
    def parts(self) -> dict[str, float]:
        """Return the parts of the step in seconds, by what the busiest worker does."""
        return {"computing": self.computing_s, "bubble": self.bubble_s, **self.exposed_s}

    def __str__(self) -> str:
        """Return one line with the job, the time of the step, and what the step waits for."""
        return f"{self.job}: {self._said}"

    def _repr_html_(self) -> str:
        """Return a picture of the step's parts for notebooks."""
        return draw_bars([(self._said, self.parts, "")], str(self.job))

    @property
    def _said(self) -> str:
        return (
            f"a step takes {format_seconds(self.seconds)} (predicted), waits for {waits(self.parts)}, "
            f"model FLOPs utilization {percent(self.utilization)}, {format_bytes(self.memory.total)} of the fullest GPU"
        )

    @property
    def columns(self) -> dict[str, Any]:
        """Return the fields of a step that `--json` prints."""
        likely = self.interval
        sent: dict[str, dict[str, float]] = {}
        for (kind, tier), nbytes in self.sent.items():
            sent.setdefault(kind, {})[tier] = nbytes
        return {
            "name": self.job.name,
            "gpus": self.job.mesh.workers,
            "step_s": self.seconds,
            "interval_s": None if likely is None else [likely.low_s, likely.high_s],
            "measured_steps": 0 if likely is None else likely.like.steps,
            "computing_s": self.computing_s,
            "bubble_s": self.bubble_s,
            "exposed_s": self.exposed_s,
            "tokens_per_s": self.tokens_per_s,
            "utilization": self.utilization,
            "sent_nbytes": sent,
            "memory_nbytes": asdict(self.memory),
            "room": self.room,
        }

    @property
    def kind(self) -> Kind:
        """Return the kind of steps to which this step belongs."""
        return kind_of(self.job, self.layer_s)

    @property
    def interval(self) -> Interval | None:
        """Return an interval in which four of five such steps lie, or None if no measured step is of this kind."""
        return interval(self.kind, self.job.machine, self.seconds)

    @property
    def room(self) -> Room:
        """Return whether this step's memory fits in the memory of a GPU."""
        return self.memory.room_in(self.job.machine.memory_nbytes)

    @property
    def tokens_per_s(self) -> float:
        return self.job.tokens / self.seconds

    @property
    def utilization(self) -> float:
        """Return the model FLOPs utilization: FLOPs without recomputation, divided by the peak of all GPUs."""
        peak = self.job.mesh.workers * self.job.machine.flops_per_s
        return self.tokens_per_s * model_flops(self.job.model) / peak

    @property
    def layer_s(self) -> float:
        """Return the seconds for which the smallest layer computes on a micro-batch, in both passes."""
        kinds = {index in self.job.model.mixtures for index in range(self.job.model.layers)}
        return min(sum(work.computing_s for work in layer.layer(self.job, mixture)) for mixture in kinds)


def waits(parts: dict[str, float]) -> str:
    """Return in words what a step with these parts waits for, the longest wait first; waits below 1% are left out."""
    seconds = sum(parts.values())
    found = [part for part in parts if part not in ("computing", "optimizer") and parts[part] >= 0.01 * seconds]
    shown = sorted(found, key=lambda part: -parts[part])
    return ", ".join(f"{part} {percent(parts[part] / seconds)}" for part in shown) or "nothing"


def beyond_rounding(seconds: float, step_s: float) -> float:
    """Return these seconds of a step, or 0 if they are only a rounding error."""
    return seconds if abs(seconds) > 1e-12 * step_s else 0.0


class _Costs(NamedTuple):
    """The costs of the passes of one micro-batch through a stage."""

    forward: Cost = Cost()
    backward: Cost = Cost()
    weights: Cost = Cost()


def predict(job: Job) -> Step:
    """Predict a step. Workers of the same stage do the same, so it suffices to predict one pipeline."""
    plan = schedule(job.schedule, job.mesh.pipeline, job.microbatches, job.chunks)
    stages = _stages(job)
    tails = [_tail(job, worker, stages) for worker in range(job.mesh.pipeline)]
    between = [_send(job, stage, sent_nbytes(job, stage)) for stage in range(len(stages) - 1)]
    passes_s = [{kind: getattr(one, kind).total_s for kind in one._fields} for one in stages]
    lanes, sends = coarse(plan, passes_s, overlapped="pipeline" in job.framework.hidden)
    for lane, behind in zip(lanes, tails, strict=True):
        lane.append(Compute(behind.total_s))
    sends_s = [between[min(stage, stage + STEPS[kind])].total_s for stage, kind in sends]
    seconds, free_s = (max(clock(lanes, sends, own).lanes) for own in (sends_s, [0.0] * len(sends)))
    works = [tail + _work(job, stages[worker :: job.mesh.pipeline]) for worker, tail in enumerate(tails)]
    own = max(works, key=lambda one: one.total_s)
    exposed_s = {kind: own.of(kind) for kind in KINDS}
    exposed_s["pipeline"] += seconds - free_s
    every = reduce(Cost.__add__, between, Cost()) * (2 * job.microbatches) + reduce(Cost.__add__, works)
    return Step(
        job,
        seconds,
        own.of(COMPUTING),
        beyond_rounding(free_s - own.total_s, seconds),
        exposed_s,
        (every * (1 / len(plan))).sent,
        max((memory(job, plan, worker) for worker in range(len(plan))), key=lambda one: one.total),
    )


def floor_s(job: Job) -> float:
    """Return a lower bound on the seconds of a step.

    A worker cannot begin before a forward pass has run through all earlier stages. After the worker's own work (without
    delayed gradients of weights), a backward pass still has to run through the earlier stages. For every schedule
    except GPipe, bubbles are no longer than these two passes, so the bound is close to the step itself.
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


def _work(job: Job, stages: list[_Costs]) -> Cost:
    """Return the cost of all passes of a step through these stages."""
    return reduce(Cost.__add__, (cost for one in stages for cost in one), Cost()) * job.microbatches


def _stages(job: Job) -> list[_Costs]:
    """Return the costs of one micro-batch's passes through each stage."""
    every = passes(job)
    known: dict[object, _Costs] = {}  # layers of a kind are one object, and most stages are equal
    result = []
    for stage, parts in enumerate(every):
        worker = stage % job.mesh.pipeline
        offset = job.mesh.offset(worker, job.machine.gpus_per_host)
        key = offset, *((id(own), times) for own, times in parts)
        if key not in known:
            costs = [_Costs(*(cost_of_work(work, job, worker) * times for work in own)) for own, times in parts]
            known[key] = _Costs(*(reduce(Cost.__add__, column) for column in zip(*costs, strict=True)))
        result.append(known[key])
    return result


def _send(job: Job, stage: int, nbytes: float) -> Cost:
    """Return the cost of a transfer between a stage and the next stage, which is 0 if both are on one worker."""
    if job.mesh.pipeline == 1:
        return Cost()
    return send("pipeline", job.machine, nbytes, is_away(job, stage))


def _tail(job: Job, worker: int, stages: list[_Costs]) -> Cost:
    """Return the cost of a pipeline worker's work after its last pass.

    Hidden collectives of gradients run during the last micro-batch's backward pass. Hidden collectives of parameters
    run during the first micro-batch's forward pass.
    """
    own, framework = tail(job, worker), job.framework
    mine = stages[worker :: job.mesh.pipeline]
    backward_s = sum(one.backward.of(COMPUTING) + one.weights.of(COMPUTING) for one in mine)
    forward_s = sum(one.forward.of(COMPUTING) for one in mine)
    gradients = cost_of(job, worker, own.gradients).behind(backward_s, framework.hides_gradients)
    parameters = cost_of(job, worker, own.parameters).behind(forward_s, "data" in framework.hidden)
    # Both workers send the sums of a tied table at the same time, which takes as long as one transfer.
    tied = _send(job, job.mesh.pipeline - 1, own.tied_nbytes) if own.tied_nbytes else Cost()
    return gradients + parameters + tied + Cost({"optimizer": own.optimizer_s})
