"""`legato layouts`"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from legato.cli.axes import Given, axes
from legato.cli.nouns.job import DRAWN, breakdown, caveats, values, waits
from legato.cli.nouns.model import Shape, shape_of
from legato.cli.options import Json, Options, check_file, keep_apart, quantity, setting, taken_by
from legato.cli.output import note, print_json, print_text
from legato.core import files
from legato.core.errors import InputError
from legato.core.job import Job
from legato.core.quantities import parse_bytes
from legato.core.text import percent
from legato.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from legato.report.model import ModelReport, TextTable
    from legato.whole_jobs.layouts import Layouts
    from legato.whole_jobs.step import Step

#: What allocators and libraries take is not predicted.
_UNCOUNTED = "memory that allocators and libraries take is not counted"
#: Behind the memory of a layout.
_MARKS = {"fits": "", "near the limit": ", near the limit", "does not fit": ""}
#: The columns of tables that are text.
_NAMES = ("with", "layout", "schedule", "micro-batches", "recomputed", "sharded", "waits for")


@dataclass(frozen=True)
class Searched:
    """What the layouts are of."""

    gpus: int | None = setting(None, "GPUs of the job.")
    batch: int | None = setting(None, "Sequences of a step, of all replicas.")
    preset: str = setting("megatron-core", "Framework: megatron-core, nemo, torchtitan or megatron-2021.")
    memory: str | None = setting(None, "Memory of a GPU, such as 72GiB.", show_default="the device's")
    number: int = setting(10, "Number of layouts to show.")

    def find(self, name: str, shape: Shape, links: Given) -> Layouts:
        """The fastest layouts. Raises `InputError` on what is missing, and if none fits in memory."""
        from legato.whole_jobs.layouts import fastest
        from legato.zoo.presets import framework_named, machine_named

        for option in ("gpus", "batch", "number"):
            value = getattr(self, option)
            if value is None or value < 1:
                raise InputError(f"--{option}: {'missing' if value is None else value} (expected at least 1)")
        machine = links.on(machine_named("h100"))
        if self.memory is not None:
            machine = replace(machine, memory_nbytes=round(quantity("memory", self.memory, parse_bytes)))
        model, framework = shape_of(name, shape.given()), framework_named(self.preset)
        assert self.gpus is not None and self.batch is not None
        found = fastest(name, model, framework, machine, self.gpus, self.batch, self.number)
        if found.nearest is not None:
            raise InputError(
                f"--memory: none of {found.number:,} layouts fits in {format_bytes(machine.memory_nbytes)} (the "
                f"nearest, {_words(found.nearest.job)}, takes {format_bytes(found.nearest.memory.total)}, of which "
                f"{found.nearest.memory.largest} the most)"
            )
        return found


@dataclass(frozen=True)
class Shown:
    """Where the answer goes."""

    report: Path | None = setting(None, "Draw what the layouts, and better machines, wait for.", metavar="L.html")
    json: Json = False


def _search(
    name: str,
    /,
    what: Searched,
    links: Annotated[Given, axes("links", cluster=False)],
    shape: Shape,
    how: Shown,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="J.json", help="Write the job with the fastest layout.")
    ] = None,
) -> None:
    """The fastest layouts of a model."""
    keep_apart(links.files, output=output, report=how.report)
    check_file("report", how.report, ".html")
    found = what.find(name, shape, links)
    if output is not None:
        files.write(output, found.first.job)
    _show(found.first, found, how)


def _of_job(name: str, /, how: Shown) -> None:
    """What better machines would save a job whose layout stays."""
    from legato.whole_jobs.step import predict

    keep_apart([Path(name)], report=how.report)
    check_file("report", how.report, ".html")
    _show(predict(files.read(name, Job)), None, how)


def layouts(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|J.json",
            help="A language model, or its configuration, or a whole job, whose layout stays.",
        ),
    ],
    options: Annotated[Options, taken_by(_search, _of_job)],
) -> None:
    """Find the fastest layouts of a model on a number of GPUs, and what a faster machine would win.

    All layouts that divide evenly and fit in memory are compared by their predicted step, and the table says what they
    wait for: bubbles, or communication that is exposed. Of a job in a file, only the second answer is given.

    Example: [bold]legato layouts llama-3-70b --gpus 1024 --batch 1024[/]
    """
    face = _of_job if name.endswith(".json") and files.holds(files.load(name), Job) else _search
    options.run(face, name, wrong="means nothing for a whole job")


def _show(best: Step, found: Layouts | None, how: Shown) -> None:
    faster, report = _faster(best), how.report
    if report is not None:
        from legato.report.html import write_report
        from legato.report.model import Report

        write_report(report, Report((_report(best, found, faster),)))
    if how.json:
        print_json(
            {
                "layouts": [] if found is None else [_layout(step) | values(step) for step in found.best],
                "compared": None if found is None else found.number,
                "complete": None if found is None else found.complete,
                "faster": {label: step.seconds for label, step in faster.items() if step is not best},
            }
        )
        return
    if found is not None:
        print_text(_table(found), *_NAMES)
        for line in _verdict(found):
            note(line)
    print_text(_machines_table(best, faster), *_NAMES)
    for caveat in caveats(best):
        note(caveat)
    if report is not None:
        note(f"report -> {report}")


def _faster(best: Step) -> dict[str, Step]:
    from legato.whole_jobs.layouts import machines
    from legato.whole_jobs.step import predict

    steps = {"the machine as it is": best}
    found = {name: predict(replace(best.job, machine=machine)) for name, machine in machines(best.job.machine).items()}
    return steps | dict(sorted(found.items(), key=lambda one: one[1].seconds))


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
        "uneven": job.uneven,
        "shard": job.shard,
        "replicas": job.replicas,
    }


def _words(job: Job) -> str:
    mesh = job.mesh
    sizes = [f"{name} {getattr(mesh, name)}" for name in ("tensor", "context", "pipeline", "data", "expert")]
    return ", ".join(one for one in sizes if not one.endswith(" 1")) or "one GPU"


def _schedule(job: Job) -> str:
    chunks, uneven = f" x {job.chunks}" if job.chunks > 1 else "", ", uneven" if job.uneven else ""
    return f"{job.schedule}{chunks}{uneven}" if job.mesh.pipeline > 1 else ""


def _title(job: Job) -> str:
    return (
        f"{job.name} on {job.mesh.workers:,} x {job.machine.name}, {job.framework.name}, {job.tokens:,} tokens a step"
    )


def _table(found: Layouts) -> TextTable:
    from legato.report.model import TextTable

    heads = ("layout", "schedule", "micro-batches", "recomputed", "sharded", "step", "utilization", "memory")
    rows = (
        (
            _words(step.job),
            _schedule(step.job),
            f"{step.job.microbatches} of {step.job.microbatch}",
            step.job.recompute,
            step.job.shard + (f", {step.job.replicas} replicas" if step.job.replicas > 1 else ""),
            format_seconds(step.seconds) + (" =" if len(found.equal) > 1 and step in found.equal else ""),
            percent(step.utilization),
            format_bytes(step.memory.total) + _MARKS[step.room],
            waits(step.parts),
        )
        for step in found.best
    )
    return TextTable(f"{_title(found.best[0].job)}: predicted", (*heads, "waits for"), tuple(rows))


def _verdict(found: Layouts) -> Iterator[str]:
    """Whether others are faster, which of these predictions do not tell apart, and what decides between them."""
    from legato.whole_jobs.sure import APART, ORDER_APART, ORDER_NEAR

    fastest = "none is predicted to be faster" if found.complete else "others may be faster, as the search has a limit"
    yield f"of {found.number:,} layouts: {fastest}"
    equal = found.equal
    if len(equal) == 1:
        yield (
            f"the others are at least {percent(APART, 0)} slower; of measured pairs so far apart, "
            f"{percent(ORDER_APART, 0)} were in the predicted order"
        )
        return
    other = next((step for step in equal[1:] if step.job.mesh != equal[0].job.mesh), equal[1])
    yield (
        f"{len(equal)} are equal (=): of measured pairs within {percent(APART, 0)}, {percent(ORDER_NEAR, 0)} were in "
        f"the predicted order. To decide, measure {_both(equal[0].job, other.job)}, and fit the machine to both"
    )


def _both(one: Job, other: Job) -> str:
    if one.mesh != other.mesh:
        return f"{_words(one)} and {_words(other)}"
    own, others = (
        f"{_schedule(job)} {job.microbatches} of {job.microbatch}, recompute {job.recompute}, shard {job.shard}".strip()
        for job in (one, other)
    )
    return f"{_words(one)} with {own} and with {others}"


def _machines_table(best: Step, faster: dict[str, Step]) -> TextTable:
    from legato.report.model import TextTable

    rows = (
        (name, format_seconds(step.seconds), f"{best.seconds / step.seconds:.2f}x", waits(step.parts))
        for name, step in faster.items()
    )
    title = f"the same layout ({_words(best.job)}) on another machine: predicted"
    return TextTable(title, ("with", "step", "speedup", "waits for"), tuple(rows))


def _report(best: Step, found: Layouts | None, faster: dict[str, Step]) -> ModelReport:
    """A page: what the layouts and the machines wait for, drawn, and the tables."""
    from legato.report.model import BreakdownChart, ModelReport

    charts, told, known = [], [_machines_table(best, faster)], [*caveats(best), _UNCOUNTED]
    if found is not None:
        bars = [breakdown(_words(step.job), step.parts, facts=_facts(step.job, found)) for step in found.best]
        charts.append(BreakdownChart("The fastest layouts", DRAWN, tuple(bars)))
        told.insert(0, _table(found))
        known = [*_verdict(found), f"with the first layout, {known[0]}", *known[1:]]
    bars = [breakdown(name, step.parts, note=f"{best.seconds / step.seconds:.2f}x") for name, step in faster.items()]
    title = f"The same layout ({_words(best.job)}) on another machine"
    hint = "One thing of the machine is better. The time of each step is followed by the speedup."
    charts.append(BreakdownChart(title, hint if charts else f"{DRAWN} {hint}", tuple(bars)))
    advice = f"{known[0][0].upper()}{known[0][1:]}."
    return ModelReport(
        _title(best.job), advice=advice, told=tuple(told), asides=tuple(known[1:]), breakdowns=tuple(charts)
    )


def _facts(job: Job, found: Layouts) -> str:
    """What a layout is beside its mesh; of recomputation and sharding, that in which the best layouts differ."""
    plural = "es" if job.microbatches > 1 else ""
    parts = [_schedule(job), f"{job.microbatches:,} micro-batch{plural} of {job.microbatch}"]
    for field, word in (("recompute", "recomputed"), ("shard", "sharded")):
        if len({getattr(step.job, field) for step in found.best}) > 1:
            parts.append(f"{word}: {getattr(job, field)}")
    return " · ".join(part for part in parts if part)
