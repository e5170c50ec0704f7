"""The fastest layouts of a model on a number of GPUs, of all that fit in memory, and machines that are better."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from legato.core.errors import InputError
from legato.core.job import Framework, Job, LanguageModel, Machine, Mesh, Schedule
from legato.core.pictures import draw_bars
from legato.core.text import html_table, percent, table
from legato.core.units import format_bytes, format_seconds
from legato.reports.model import TextTable
from legato.whole_jobs.memory import static
from legato.whole_jobs.step import Step, floor_s, predict, waits
from legato.zoo.jobs import model_name
from legato.zoo.language.models import model_named
from legato.zoo.presets import framework_named, machine_named

__all__ = ["Layouts", "jobs", "layouts", "machines", "schedule_of", "title_of"]

#: Passes of micro-batches through stages that a search predicts: about half a minute on one core.
_MOST_PASSES = 2**21
_MICROBATCHES, _CHUNKS = (1, 2, 4, 8), (2, 4, 8)
#: Tokens of a micro-batch that context parallelism leaves each GPU. No measured step has fewer (docs/whole_jobs.md),
#: and one efficiency of all matrix products makes few tokens look as good as many.
_LEAST_TOKENS = 2048
#: What allocators and libraries take is not predicted.
_MEMORY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Layouts:
    """The `best` layouts, the fastest first, of `number` that divide evenly.

    `complete` is false if the search reached its limit on work before it had shown that no other layout is faster.
    """

    best: list[Step]
    number: int
    complete: bool

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The layouts and their steps as `legato layouts --json` prints them."""
        return [_layout(step.job) | step.columns for step in self.best]

    def table(self) -> TextTable:
        """The layouts in words."""
        heads = ("layout", "schedule", "micro-batches", "recomputed", "sharded", "step", "utilization", "memory")
        rows = (
            (
                str(step.job.mesh),
                schedule_of(step.job),
                f"{step.job.microbatches} of {step.job.microbatch}",
                step.job.recompute,
                step.job.shard,
                format_seconds(step.seconds),
                percent(step.utilization),
                format_bytes(step.memory.total),
                waits(step.parts),
            )
            for step in self.best
        )
        return TextTable(f"{title_of(self.best[0].job)}: predicted", (*heads, "waits for"), tuple(rows))

    @property
    def verdict(self) -> str:
        """How many layouts were compared, and whether these are the fastest."""
        fastest = "no other is faster" if self.complete else "the search stopped at its limit, so others may be faster"
        return f"of {self.number:,} layouts: {fastest}, by predictions, whose ratios are within 8% in nine cases of ten"

    def __str__(self) -> str:
        """The table and the verdict in lines of text."""
        shown = self.table()
        return "\n".join([shown.title, *table(shown.heads, shown.rows, right=0), self.verdict])

    def _repr_html_(self) -> str:
        """A picture for notebooks: what each layout waits for."""
        shown = self.table()
        bars = [(str(step.job.mesh), step.parts, format_seconds(step.seconds)) for step in self.best]
        return f"{draw_bars(bars, shown.title)}{html_table(shown.heads, shown.rows, right=0)}<p>{self.verdict}</p>"


def _layout(job: Job) -> dict[str, Any]:
    return {
        "tensor": job.mesh.tensor,
        "context": job.mesh.context,
        "pipeline": job.mesh.pipeline,
        "data": job.mesh.data,
        "expert": job.mesh.expert,
        "schedule": job.schedule if job.mesh.pipeline > 1 else None,
        "chunks": job.chunks,
        "microbatch": job.microbatch,
        "microbatches": job.microbatches,
        "recompute": job.recompute,
        "shard": job.shard,
    }


def schedule_of(job: Job) -> str:
    """The schedule of a pipeline in words; "" without one."""
    return f"{job.schedule}{f' x {job.chunks}' if job.chunks > 1 else ''}" if job.mesh.pipeline > 1 else ""


def title_of(job: Job) -> str:
    """What is trained on what, in words."""
    return (
        f"{job.name} on {job.mesh.workers:,} x {job.machine.name}, {job.framework.name}, {job.tokens:,} tokens a step"
    )


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
        for chunks in (_CHUNKS if schedule == "interleaved" else (1,))
    ]
    shards = framework.shards if mesh.data * mesh.context > 1 else ("none",)
    kept = [one for one in framework.recomputes if one != "core" or not framework.flash]
    least = _LEAST_TOKENS * mesh.context if mesh.context > 1 else 0
    for microbatch in (one for one in _MICROBATCHES if sequences % one == 0 and one * model.sequence >= least):
        for schedule, chunks in schedules:
            for shard in shards:
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
                        )
                    except InputError:  # does not divide evenly
                        continue


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
    """Find the `number` fastest layouts of a model on `gpus` GPUs, for a `batch` of sequences a step of all replicas.

    A model, a machine or a framework is given by its name or as it is; a machine's name may be that of a file. A GPU
    may use `memory_nbytes`, by default 90% of what the machine has. Layouts are tried in the order of `floor_s`, which
    no prediction is below, and the search ends where that is above the slowest of the best. Raises `InputError`, with
    the nearest names, on unknown ones, and if no layout divides evenly or none fits in memory.
    """
    for option, value in (("gpus", gpus), ("batch", batch), ("number", number)):
        if value < 1:
            raise InputError(f"{option}: {value} (expected at least 1)")
    name, model = name or model_name(model), model_named(model) if isinstance(model, str) else model
    framework, machine = framework_named(framework), machine_named(machine)
    memory_nbytes = _MEMORY_SHARE * machine.memory_nbytes if memory_nbytes is None else memory_nbytes
    candidates = list(jobs(name, model, framework, machine, gpus, batch))
    if not candidates:
        raise InputError(f"gpus: {gpus:,} for a batch of {batch:,} sequences (expected numbers that divide evenly)")
    fitting = [job for job in candidates if static(job) <= memory_nbytes]
    queue = [(floor_s(job), index) for index, job in enumerate(fitting)]
    heapq.heapify(queue)
    best: list[Step] = []
    nearest: Step | None = None
    passes, complete = 0, True
    while queue:
        floor, index = heapq.heappop(queue)
        if len(best) == number and floor >= best[-1].seconds:
            break
        job = fitting[index]
        passes += job.mesh.pipeline * job.chunks * job.microbatches
        if passes > _MOST_PASSES and best:
            complete = False
            break
        step = predict(job)
        if step.memory.total <= memory_nbytes:
            best = sorted([*best, step], key=lambda one: one.seconds)[:number]
        elif nearest is None or step.memory.total < nearest.memory.total:
            nearest = step
    if not best:
        nearest = nearest or predict(min(candidates, key=static))
        raise InputError(
            f"memory: none of {len(candidates):,} layouts fits in {format_bytes(memory_nbytes)} (the nearest, "
            f"{nearest.job.mesh}, takes {format_bytes(nearest.memory.total)})"
        )
    return Layouts(best, len(candidates), complete)


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
