"""The fastest layouts of a model on a number of GPUs, of all that fit in memory, and machines that are better."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from legato.core.errors import InputError
from legato.core.job import Framework, Job, LanguageModel, Machine, Mesh, Schedule, Shard
from legato.whole_jobs.memory import static
from legato.whole_jobs.step import Step, floor_s, predict
from legato.whole_jobs.sure import APART

__all__ = ["Layouts", "fastest", "jobs", "machines"]

#: Passes of micro-batches through stages that a search predicts: about half a minute on one core.
_MOST_PASSES = 2**21
_MICROBATCHES, _CHUNKS = (1, 2, 4, 8), (2, 4, 8)
#: Tokens of a micro-batch that context parallelism leaves each GPU. No measured step has fewer (docs/whole_jobs.md),
#: and one efficiency of all matrix products makes few tokens look as good as many.
_LEAST_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Layouts:
    """The `best` layouts, the fastest first, of `number` that divide evenly.

    Those near the limit of the memory are among them, and so is the fastest that fits, however slow. If no layout is
    near the limit or below it, `best` is empty and `nearest` misses by least. `complete` is false if the search reached
    its limit on work before it had shown that no other layout is faster.
    """

    best: list[Step]
    number: int
    nearest: Step | None
    complete: bool

    def __post_init__(self) -> None:
        assert self.best or self.nearest is not None

    @property
    def first(self) -> Step:
        """The layout to try first: the fastest that fits, or else the fastest near the limit."""
        return next((step for step in self.best if step.room == "fits"), self.best[0])

    @property
    def equal(self) -> list[Step]:
        """The first ones, which predictions do not tell apart."""
        return [step for step in self.best if step.seconds < (1 + APART) * self.best[0].seconds]


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def jobs(
    name: str, model: LanguageModel, framework: Framework, machine: Machine, gpus: int, batch: int
) -> Iterator[Job]:
    """All layouts of a `batch` of sequences a step on so many GPUs that divide evenly.

    Tensor parallelism stays inside a host, and implies sequence parallelism. Context parallelism leaves each GPU 2,048
    tokens of a micro-batch or more, as all steps have that predictions were compared with. The order of the dimensions
    is that of `Mesh`. Schedules, recomputation and sharding are those that the framework offers.
    """
    for tensor in _divisors(machine.gpus_per_host):
        for context in (one for one in _divisors(gpus) if one & (one - 1) == 0):
            for pipeline in _divisors(gpus // (tensor * context)) if gpus % (tensor * context) == 0 else ():
                data = gpus // (tensor * context * pipeline)
                if pipeline > model.layers or batch % data:
                    continue
                for expert in _divisors(data) if model.experts > 1 else (1,):
                    if model.experts % expert:
                        continue
                    mesh = Mesh(tensor, context, pipeline, data, expert)
                    yield from _of_mesh(name, model, mesh, framework, machine, batch // data)


def _of_mesh(
    name: str, model: LanguageModel, mesh: Mesh, framework: Framework, machine: Machine, sequences: int
) -> Iterator[Job]:
    """All ways to run a replica's `sequences` on this mesh."""
    schedules: list[tuple[Schedule, int]] = [
        (schedule, chunks)
        for schedule in (framework.schedules if mesh.pipeline > 1 else ("1f1b",))
        for chunks in (_chunks(model.layers, mesh.pipeline) if schedule == "interleaved" else (1,))
    ]
    # Sharded parameters may have a replica on each host, or so many GPUs.
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
    """Chunks of a stage: all that divide its layers, or with the embeddings and the output layer as one each."""
    found = {one for every in (layers, layers + 2) if every % pipeline == 0 for one in _divisors(every // pipeline)}
    return sorted((found | set(_CHUNKS)) - {1})


def fastest(
    name: str,
    model: LanguageModel,
    framework: Framework,
    machine: Machine,
    gpus: int,
    batch: int,
    number: int = 10,
) -> Layouts:
    """The `number` fastest layouts that take at most the memory of a GPU, and the fastest that fits.

    They are tried in the order of `floor_s`, which no prediction is below, and the search ends where that is above
    the slowest of the best and the fastest that fits. Raises `InputError` if no layout divides evenly.
    """
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
    if not best and nearest is None:
        nearest = predict(min(candidates, key=static))
    if surest is not None and surest not in best:
        best.append(surest)
    return Layouts(best, len(candidates), None if best else nearest, complete)


def machines(machine: Machine) -> dict[str, Machine]:
    """Machines with one thing better, by what an operator calls it."""
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
