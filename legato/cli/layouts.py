"""`legato layouts`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace
from rich.table import Table

from legato.cli.options import Json, quantity
from legato.cli.output import note, print_json, print_table
from legato.cli.whole_jobs import refuse_others, values, waits
from legato.cli.workload import Shape, model_of_job
from legato.core import files
from legato.core.errors import InputError
from legato.core.job import Job
from legato.core.quantities import parse_bandwidth, parse_bytes
from legato.core.text import percent
from legato.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from legato.whole_jobs.layouts import Layouts
    from legato.whole_jobs.step import Step

#: What allocators and libraries take is not predicted.
_MEMORY_SHARE = 0.9


def layouts(  # noqa: PLR0913 (its options)
    typed: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME|J.json", help="A language model, or a whole job, whose layout stays.")
    ],
    *,
    gpus: Annotated[int | None, typer.Option(help="GPUs of the job.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of a step, of all replicas.")] = None,
    device: Annotated[
        str, typer.Option(help="GPU: a100, h100, h100-500w or b200; or a file that fit-machine wrote.")
    ] = "h100",
    preset: Annotated[
        str, typer.Option(help="Framework: megatron-core, torchtitan or megatron-2021.")
    ] = "megatron-core",
    gpus_per_host: Annotated[int | None, typer.Option(help="GPUs of a host.", show_default="the device's")] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bandwidth of each worker's link, such as 10Gbit.", show_default="the device's")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory that a GPU may use, such as 72GiB.", show_default="90% of the device's")
    ] = None,
    number: Annotated[int, typer.Option(help="Number of layouts to show.")] = 10,
    shape: Shape,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="J.json", help="Write the job with the fastest layout.")
    ] = None,
    json: Json = False,
) -> None:
    """Find the fastest layouts of a model on a number of GPUs, and what a faster machine would win.

    All layouts that divide evenly and fit in memory are compared by their predicted step, and the table says what they
    wait for: bubbles, or communication that is exposed. Of a job in a file, only the second answer is given.

    Example: [bold]legato layouts llama-3-70b --gpus 1024 --batch 1024[/]
    """
    from legato.whole_jobs.step import predict

    if (path := Path(name)).suffix == ".json":
        refuse_others(typed, {"name", "report", "json"})
        best, found = predict(files.read(path, Job)), None
    else:
        found = _search(name, shape, gpus, batch, device, preset, gpus_per_host, bandwidth, memory, number)
        best = found.best[0]
        if output is not None:
            files.write(output, best.job)
    faster = _faster(best)
    if json:
        print_json(
            {
                "layouts": [] if found is None else [_layout(step) | values(step) for step in found.best],
                "compared": None if found is None else found.number,
                "complete": None if found is None else found.complete,
                "faster": {label: step.seconds for label, step in faster.items()},
            }
        )
        return
    if found is not None:
        _show(found)
    _show_faster(best, faster)


def _search(  # noqa: PLR0913 (what was asked)
    name: str,
    shape: Shape,
    gpus: int | None,
    batch: int | None,
    device: str,
    preset: str,
    gpus_per_host: int | None,
    bandwidth: str | None,
    memory: str | None,
    number: int,
) -> Layouts:
    from legato.whole_jobs.layouts import fastest
    from legato.whole_jobs.presets import framework_named, machine_named

    for option, value in (("gpus", gpus), ("batch", batch), ("number", number)):
        if value is None or value < 1:
            raise InputError(f"--{option}: {'missing' if value is None else value} (expected at least 1)")
    machine = machine_named(device)
    if gpus_per_host is not None:
        machine = replace(machine, gpus_per_host=gpus_per_host)
    if bandwidth is not None:
        machine = replace(machine, card_bytes_per_s=quantity("bandwidth", bandwidth, parse_bandwidth) / 8)
    allowed: float = _MEMORY_SHARE * machine.memory_nbytes
    if memory is not None:
        allowed = quantity("memory", memory, parse_bytes)
    model = model_of_job(name, shape.given())
    assert gpus is not None and batch is not None
    found = fastest(name, model, framework_named(preset), machine, gpus, batch, allowed, number)
    if found.nearest is not None:
        raise InputError(
            f"--memory: none of {found.number:,} layouts fits in {format_bytes(allowed)} (the nearest, "
            f"{_words(found.nearest.job)}, takes {format_bytes(found.nearest.memory.total)})"
        )
    return found


def _faster(best: Step) -> dict[str, Step]:
    from legato.whole_jobs.layouts import machines
    from legato.whole_jobs.step import predict

    return {label: predict(replace(best.job, machine=machine)) for label, machine in machines(best.job.machine).items()}


def _layout(step: Step) -> dict[str, Any]:
    job = step.job
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


def _words(job: Job) -> str:
    mesh = job.mesh
    sizes = [f"{name} {getattr(mesh, name)}" for name in ("tensor", "context", "pipeline", "data", "expert")]
    return ", ".join(one for one in sizes if not one.endswith(" 1")) or "one GPU"


def _show(found: Layouts) -> None:
    job = found.best[0].job
    tokens = f"{job.tokens:,} tokens a step"
    title = f"{job.name} on {job.mesh.workers:,} x {job.machine.name}, {job.framework.name}, {tokens}: predicted"
    table = Table("layout", title=title, header_style="dim")
    for head in ("schedule", "micro-batches", "recomputed", "sharded"):
        table.add_column(head)
    for head in ("step", "utilization", "memory"):
        table.add_column(head, justify="right")
    table.add_column("waits for")
    for step in found.best:
        one = step.job
        chunks = f" x {one.chunks}" if one.chunks > 1 else ""
        table.add_row(
            _words(one),
            f"{one.schedule}{chunks}" if one.mesh.pipeline > 1 else "",
            f"{one.microbatches} of {one.microbatch}",
            one.recompute,
            one.shard,
            format_seconds(step.seconds),
            percent(step.utilization),
            format_bytes(step.memory.total),
            waits(step),
        )
    print_table(table)
    fastest = "no other is faster" if found.complete else "the search stopped at its limit, so others may be faster"
    note(f"of {found.number:,} layouts: {fastest}, by predictions, whose ratios are within 8% in nine cases of ten")


def _show_faster(best: Step, faster: dict[str, Step]) -> None:
    table = Table(
        "with", title=f"the same layout ({_words(best.job)}) on another machine: predicted", header_style="dim"
    )
    table.add_column("step", justify="right")
    table.add_column("speedup", justify="right")
    table.add_column("waits for")
    table.add_row("the machine as it is", format_seconds(best.seconds), "1.00x", waits(best))
    for label, step in sorted(faster.items(), key=lambda one: one[1].seconds):
        table.add_row(label, format_seconds(step.seconds), f"{best.seconds / step.seconds:.2f}x", waits(step))
    print_table(table)
