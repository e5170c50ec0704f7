"""Find the fastest layouts of a model that fit in the memory of a number of GPUs, and list better machines."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from msgspec.structs import replace

from legato.core.errors import InputError
from legato.core.job import Framework, Job, LanguageModel, Machine, Mesh, Schedule, Shard
from legato.core.pictures import draw_bars
from legato.core.table import Column, Table
from legato.core.text import percent
from legato.core.units import format_bytes, format_seconds
from legato.whole_jobs.memory import static
from legato.whole_jobs.step import Step, floor_s, predict, waits
from legato.whole_jobs.sure import APART, ORDER_APART, ORDER_NEAR
from legato.zoo.jobs import model_name
from legato.zoo.language.models import model_named
from legato.zoo.presets import framework_named, machine_named

__all__ = ["Layouts", "jobs", "layouts", "machines", "schedule_of", "title_of"]

#: The most passes of micro-batches through stages that a search predicts, in about half a minute on one core.
_MOST_PASSES = 2**21
_MICROBATCHES, _CHUNKS = (1, 2, 4, 8), (2, 4, 8)
#: The fewest tokens of a micro-batch that context parallelism leaves on each GPU. No measured step has fewer
#: (docs/whole_jobs.md). With one efficiency for all matrix products, few tokens would look as good as many.
_LEAST_TOKENS = 2048
#: The words that the table adds after the memory of a layout.
_MARKS = {"fits": "", "near the limit": ", near the limit", "does not fit": ""}


@dataclass(frozen=True, slots=True)
class Layouts:
    """The `best` layouts, the fastest first; `number` is the number of all layouts that divide the job evenly.

    `best` includes layouts near the memory limit, and always the fastest layout that fits, however slow it is.
    `complete` is false if the search reached its limit before it could rule out faster layouts.
    """

    best: list[Step]
    number: int
    complete: bool

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the layouts and their steps as `legato layouts --json` prints them."""
        return [_layout(step.job) | step.columns for step in self.best]

    def table(self) -> Table:
        """Return the layouts as a table."""
        equal = self.equal
        columns = [
            Column("layout", lambda step: str(step.job.mesh)),
            Column("schedule", lambda step: schedule_of(step.job)),
            Column("micro-batches", lambda step: f"{step.job.microbatches} of {step.job.microbatch}"),
            Column("recomputed", lambda step: step.job.recompute),
            Column("sharded", lambda step: _sharded(step.job)),
            Column("step", lambda step: (step.seconds, len(equal) > 1 and step in equal), _marked),
            Column("utilization", "utilization"),
            Column("memory", lambda step: (step.memory.total, step.room), _memory),
            Column("waits for", lambda step: waits(step.parts)),
        ]
        return Table(f"{title_of(self.best[0].job)}: predicted", self.best, columns)

    @property
    def first(self) -> Step:
        """Return the layout to try first: the fastest that fits, or else the fastest near the memory limit."""
        return next((step for step in self.best if step.room == "fits"), self.best[0])

    @property
    def equal(self) -> list[Step]:
        """Return the layouts whose steps are so close to the fastest step that predictions cannot rank them."""
        return [step for step in self.best if step.seconds < (1 + APART) * self.best[0].seconds]

    @property
    def verdict(self) -> tuple[str, str]:
        """Return two sentences: whether other layouts may be faster, and which layouts predictions cannot rank."""
        more = "" if self.complete else "; others may be faster, because the search stopped at its limit"
        others = f"the fastest of {self.number:,} layouts, as predicted{more}"
        equal = self.equal
        if len(equal) == 1:
            return others, (
                f"the others are at least {percent(APART, 0)} slower; of measured pairs so far apart, "
                f"{percent(ORDER_APART, 0)} were in the predicted order"
            )
        other = next((step for step in equal[1:] if step.job.mesh != equal[0].job.mesh), equal[1])
        return others, (
            f"{len(equal)} are equal (=): of measured pairs within {percent(APART, 0)}, {percent(ORDER_NEAR, 0)} were "
            f"in the predicted order. To decide, measure {_both(equal[0].job, other.job)}, and fit the machine to both"
        )

    def __str__(self) -> str:
        """Return the table and the verdict as lines of text."""
        return "\n".join([str(self.table()), *self.verdict])

    def _repr_html_(self) -> str:
        """Return a picture for notebooks that shows what each layout waits for."""
        shown = self.table()
        bars = [(str(step.job.mesh), step.parts, format_seconds(step.seconds)) for step in self.best]
        said = "".join(f"<p>{line}</p>" for line in self.verdict)
        return f"{draw_bars(bars, shown.title)}{shown._repr_html_()}{said}"


def _sharded(job: Job) -> str:
    return job.shard + (f", {job.replicas} replicas" if job.replicas > 1 else "")


def _marked(step: tuple[float, bool]) -> str:
    return format_seconds(step[0]) + (" =" if step[1] else "")


def _memory(memory: tuple[int, str]) -> str:
    return format_bytes(memory[0]) + _MARKS[memory[1]]


def _layout(job: Job) -> dict[str, Any]:
    return {
        "tensor": job.mesh.tensor,
        "context": job.mesh.context,
        "pipeline": job.mesh.pipeline,
        "data": job.mesh.data,
        "expert": job.mesh.expert,
        "expert_fold": job.mesh.expert_fold,
        "schedule": job.schedule if job.mesh.pipeline > 1 else None,
        "chunks": job.chunks,
        "microbatch": job.microbatch,
        "microbatches": job.microbatches,
        "recompute": job.recompute,
        "uneven": job.uneven,
        "shard": job.shard,
        "replicas": job.replicas,
    }


def schedule_of(job: Job) -> str:
    """Return the schedule of a job's pipeline in words, or "" if the job has no pipeline."""
    chunks, uneven = f" x {job.chunks}" if job.chunks > 1 else "", ", uneven" if job.uneven else ""
    return f"{job.schedule}{chunks}{uneven}" if job.mesh.pipeline > 1 else ""


def title_of(job: Job) -> str:
    """Return in words which model is trained on which GPUs."""
    return (
        f"{job.name} on {job.mesh.workers:,} x {job.machine.name}, {job.framework.name}, {job.tokens:,} tokens a step"
    )


def _both(one: Job, other: Job) -> str:
    if one.mesh != other.mesh:
        return f"{one.mesh} and {other.mesh}"
    own, others = (
        f"{schedule_of(job)} {job.microbatches} of {job.microbatch}, recompute {job.recompute}, "
        f"shard {job.shard}".strip()
        for job in (one, other)
    )
    return f"{one.mesh} with {own} and with {others}"


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def jobs(
    name: str, model: LanguageModel, framework: Framework, machine: Machine, gpus: int, batch: int
) -> Iterator[Job]:
    """Yield all layouts that divide a model and a `batch` of sequences per step evenly among the GPUs.

    Tensor parallelism stays inside a host, and implies sequence parallelism. Context parallelism leaves each GPU at
    least 2,048 tokens of a micro-batch, because no measured step has fewer. The dimensions are ordered as in `Mesh`.
    All schedules, recomputation and sharding that the framework offers are tried.
    """
    for tensor in _divisors(machine.gpus_per_host):
        for context in (one for one in _divisors(gpus) if one & (one - 1) == 0):
            for pipeline in _divisors(gpus // (tensor * context)) if gpus % (tensor * context) == 0 else ():
                data = gpus // (tensor * context * pipeline)
                if pipeline > model.layers or batch % data:
                    continue
                folds = (False, True) if model.experts > 1 and tensor * context > 1 else (False,)
                for part, fold in product(_divisors(data) if model.experts > 1 else (1,), folds):
                    expert = part * tensor * context if fold else part
                    if model.experts % expert:
                        continue
                    mesh = Mesh(tensor, context, pipeline, data, expert, expert_fold=fold)
                    yield from _of_mesh(name, model, mesh, framework, machine, batch // data)


def _of_mesh(
    name: str, model: LanguageModel, mesh: Mesh, framework: Framework, machine: Machine, sequences: int
) -> Iterator[Job]:
    """Yield all ways to run a replica's `sequences` on this mesh."""
    schedules: list[tuple[Schedule, int]] = [
        (schedule, chunks)
        for schedule in (framework.schedules if mesh.pipeline > 1 else ("1f1b",))
        for chunks in (_chunks(model.layers, mesh.pipeline) if schedule == "interleaved" else (1,))
    ]
    # Sharded parameters may have one replica, or one replica per host (if hosts have a common divisor with `data`).
    copies = mesh.data // math.gcd(mesh.data, machine.gpus_per_host) if mesh.expert == 1 else 1
    shards: list[tuple[Shard, int]] = [
        (shard, replicas)
        for shard in (framework.shards if mesh.data * mesh.context > 1 else ("none",))
        for replicas in sorted({1, copies if shard == "parameters" and copies < mesh.data else 1})
    ]
    kept = [one for one in framework.recomputes if one != "core" or not framework.flash]
    least = _LEAST_TOKENS * mesh.context if mesh.context > 1 else 0
    for microbatch in (one for one in _MICROBATCHES if sequences % one == 0 and one * model.sequence >= least):
        for schedule, chunks in schedules:
            for shard, replicas in shards:
                for recompute in kept:
                    try:
                        yield Job(
                            name,
                            model,
                            mesh,
                            framework,
                            machine,
                            sequences // microbatch,
                            microbatch,
                            schedule,
                            chunks,
                            recompute=recompute,
                            shard=shard,
                            sequence_parallel=mesh.tensor > 1,
                            replicas=replicas,
                        )
                    except InputError:  # does not divide evenly
                        continue


def _chunks(layers: int, pipeline: int) -> list[int]:
    """Return the numbers of chunks to try for a stage.

    The numbers are `_CHUNKS`, and all divisors above 1 of the number of layers in a stage (with and without counting
    embeddings and output as two layers).
    """
    found = {one for every in (layers, layers + 2) if every % pipeline == 0 for one in _divisors(every // pipeline)}
    return sorted((found | set(_CHUNKS)) - {1})


def layouts(
    model: str | LanguageModel,
    *,
    gpus: int,
    batch: int,
    machine: str | Machine = "h100",
    framework: str | Framework = "megatron-core",
    memory_nbytes: float | None = None,
    number: int = 10,
    name: str = "",
) -> Layouts:
    """Find the `number` fastest layouts of a model on `gpus` GPUs, for a `batch` of sequences per step in all.

    The model, machine and framework are names or objects; a machine's name may be the path of a file. A GPU has
    `memory_nbytes`, by default the machine's memory. Layouts are tried in the order of `floor_s`, a lower bound on the
    prediction. The search ends when this bound is above the step time of the slowest of the best layouts and of the
    fastest layout that fits. Raises `InputError` on an unknown name (the message suggests the nearest names), if no
    layout divides evenly, or if none fits in memory.
    """
    for option, value in (("gpus", gpus), ("batch", batch), ("number", number)):
        if value < 1:
            raise InputError(f"{option}: {value} (expected at least 1)")
    name, model = name or model_name(model), model_named(model) if isinstance(model, str) else model
    framework, machine = framework_named(framework), machine_named(machine)
    if memory_nbytes is not None:
        machine = replace(machine, memory_nbytes=round(memory_nbytes))
    candidates = list(jobs(name, model, framework, machine, gpus, batch))
    if not candidates:
        raise InputError(f"gpus: {gpus:,} for a batch of {batch:,} sequences (expected numbers that divide evenly)")
    fitting = [job for job in candidates if static(job) <= machine.memory_nbytes]
    queue = [(floor_s(job), index) for index, job in enumerate(fitting)]
    heapq.heapify(queue)
    best: list[Step] = []
    surest: Step | None = None
    nearest: Step | None = None
    passes, complete = 0, True
    while queue:
        floor, index = heapq.heappop(queue)
        if len(best) == number and floor >= max(best[-1].seconds, surest.seconds if surest else math.inf):
            break
        job = fitting[index]
        passes += job.mesh.pipeline * job.chunks * job.microbatches
        if passes > _MOST_PASSES and best:
            complete = False
            break
        step = predict(job)
        if step.room == "fits" and (surest is None or step.seconds < surest.seconds):
            surest = step
        if step.room != "does not fit":
            best = sorted([*best, step], key=lambda one: one.seconds)[:number]
        elif nearest is None or step.memory.total < nearest.memory.total:
            nearest = step
    if not best:
        nearest = nearest or predict(min(candidates, key=static))
        raise InputError(
            f"memory: none of {len(candidates):,} layouts fits in {format_bytes(machine.memory_nbytes)} (the "
            f"nearest, {nearest.job.mesh}, takes {format_bytes(nearest.memory.total)}, most of it "
            f"{nearest.memory.largest})"
        )
    if surest is not None and surest not in best:
        best.append(surest)
    return Layouts(best, len(candidates), complete)


def machines(machine: Machine) -> dict[str, Machine]:
    """Return copies of a machine, each with one improvement; the keys name the improvements."""
    latencies = ("latency_s", "network_latency_s", "hop_s")
    return {
        "links inside hosts twice as fast": replace(machine, link_bytes_per_s=2 * machine.link_bytes_per_s),
        "network cards twice as fast": replace(machine, card_bytes_per_s=2 * machine.card_bytes_per_s),
        "links and cards twice as fast": replace(
            machine, link_bytes_per_s=2 * machine.link_bytes_per_s, card_bytes_per_s=2 * machine.card_bytes_per_s
        ),
        "half the latency": replace(machine, **{field: getattr(machine, field) / 2 for field in latencies}),
        "hosts of twice as many GPUs": replace(machine, gpus_per_host=2 * machine.gpus_per_host),
        "GPU memory twice as fast": replace(machine, memory_bytes_per_s=2 * machine.memory_bytes_per_s),
        "GPUs that compute twice as fast": replace(machine, flops_per_s=2 * machine.flops_per_s),
    }
