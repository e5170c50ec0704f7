"""Whole jobs: `legato workload` writes one, `legato simulate` predicts its step, `legato sweep` those on networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec.structs import replace
from rich.table import Table

from legato.cli.axes import Given, axes
from legato.cli.nouns.model import Computes, ModelOutput, Recompute, Shape, shape_of
from legato.cli.nouns.running import MOST_SHOWN, Running, Written
from legato.cli.options import Fidelity, Json, TimelineOutput, keep_apart, setting, split
from legato.cli.output import fidelity_of, note, print_json, print_parts, print_table, print_text
from legato.core import files
from legato.core.axes import NETWORK, Axis
from legato.core.errors import InputError
from legato.core.job import Job, LanguageModel, Machine, Schedule, Shard
from legato.core.text import count, percent
from legato.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from legato.reports.model import ModelReport, Report, TextTable
    from legato.sweeps import JobRow

__all__ = [
    "Layout",
    "OfMachine",
    "refuse_switches",
    "said",
    "simulate",
    "sweep",
    "write",
]

#: The options about a machine's links, and about the network above them.
OfMachine = Annotated[Given, axes("links", "switches", cluster=False)]
SweptMachine = Annotated[Given, axes("links", "switches", cluster=False, values="several")]
#: The columns of tables that are text.
_NAMES = ("job", "waits for")

#: Steps that differ by a smaller share take as long.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Layout:
    """How a whole job is divided among GPUs. Any of these options makes one."""

    PANEL: ClassVar = "Whole jobs (language models): any of these makes the file one of a job"

    tensor: int | None = setting(None, "Tensor-parallel GPUs.", show_default="1")
    context: int | None = setting(None, "Context-parallel GPUs, which divide sequences.", show_default="1")
    pipeline: int | None = setting(None, "Stages of the pipeline.", show_default="1")
    data: int | None = setting(None, "Data-parallel replicas.", show_default="1, or what --gpus leaves")
    expert: int | None = setting(None, "Data-parallel neighbours that divide the experts.", show_default="1")
    gpus: int | None = setting(None, "Number of GPUs of the job.", show_default="the product")
    order: str | None = setting(
        None, "Order of the dimensions, outermost first.", show_default="pipeline,data,context,tensor"
    )
    microbatches: int | None = setting(None, "Micro-batches of a replica and step.", show_default="1")
    microbatch_size: int | None = setting(None, "Sequences of a micro-batch.", show_default="1")
    pipeline_schedule: Schedule | None = setting(None, "Schedule of the pipeline.", show_default="1f1b")
    chunks: int | None = setting(None, "Chunks of layers of a stage.", show_default="1; 2 if interleaved")
    split: str | None = setting(None, "Layers of each chunk, such as 7,8,8,7.", show_default="even")
    shard: Shard | None = setting(None, "What data-parallel GPUs keep only their own part of.", show_default="none")
    sequence_parallel: bool | None = setting(
        None, "Divide sequences between tensor-parallel products.", "--sequence-parallel", show_default="no"
    )
    recompute_only: Literal["core", "selective"] | None = setting(
        None, "Recompute only attention's core, or every second product.", show_default="nothing; --recompute: all"
    )
    preset: str | None = setting(
        None, "Framework: megatron-core, torchtitan or megatron-2021.", show_default="megatron-core"
    )
    overlap: str | None = setting(
        None,
        "Kinds of communication that run beside computation, of tensor, context, expert, pipeline and data; or none.",
        show_default="the preset's",
    )

    def job(self, name: str, model: LanguageModel, machine: Machine, *, recompute: bool) -> Job:
        from legato.zoo.jobs import job

        if recompute and self.recompute_only:
            raise InputError("--recompute and --recompute-only: give one or the other")
        fields = {_FIELDS.get(option, option): value for option, value in asdict(self).items() if value is not None}
        for field, parse in (("order", split), ("overlap", _kinds), ("layers", _layers)):
            if field in fields:
                fields[field] = parse(fields[field])
        if recompute:
            fields["recompute"] = "full"
        return job(model, **fields, machine=machine, name=name)


#: The fields of a job, and the parameters of `legato.job`, whose options have other names.
_FIELDS = {
    "microbatch_size": "microbatch",
    "pipeline_schedule": "schedule",
    "split": "layers",
    "recompute_only": "recompute",
    "preset": "framework",
}


def _kinds(text: str) -> list[str]:
    return [] if text == "none" else split(text)


def _layers(text: str) -> tuple[int, ...]:
    if not all(one.isascii() and one.isdecimal() and len(one) <= 9 for one in split(text)):
        raise InputError(f"--split {text!r} (expected whole numbers, like 7,8,8,7)")
    return tuple(map(int, split(text)))


def write(
    name: str,
    /,
    shape: Shape,
    layout: Layout,
    computes: Computes,
    recompute: Recompute = False,
    output: ModelOutput = None,
    json: Json = False,
) -> None:
    """Write the job of a language model, and what its GPUs send."""
    from legato.whole_jobs.step import predict
    from legato.whole_jobs.told import caveats

    job = layout.job(name, shape_of(name, shape.given()), computes.machine(), recompute=recompute)
    step = predict(job)
    if output is not None:
        files.write(output, job)
    if json:
        print_json({"job": None if output is None else str(output), **step.columns})
        return
    note(str(job) + (f" -> {output}" if output else ""))
    for caveat in caveats(step):
        note(caveat)
    table = Table("kind", title="bytes that a GPU sends in a step, in the mean over the stages", header_style="dim")
    tiers = {"host": "inside hosts", "network": "between hosts"}
    for head in tiers.values():
        table.add_column(head, justify="right")
    for kind in dict.fromkeys(kind for kind, _ in step.sent):
        table.add_row(kind, *(format_bytes(step.sent.get((kind, tier), 0)) for tier in tiers))
    print_table(table)
    note(f"bubble: {percent(step.bubble_s / step.seconds)} of a predicted step of {format_seconds(step.seconds)}")


def simulate(
    paths: list[Path],
    jobs: list[Job],
    /,
    machine: OfMachine,
    fidelity: Fidelity = None,
    output: TimelineOutput = None,
    json: Json = False,
) -> None:
    """Print what a step of the job consists of, and the same undisturbed if the network is disturbed."""
    from legato.sweeps.jobs import on_network, step_on
    from legato.whole_jobs.told import caveats

    keep_apart(paths, output=output)
    by = fidelity_of(fidelity, "flows")
    refuse_switches(machine, by, output=output)
    job = replace(jobs[0], machine=machine.on(jobs[0].machine))
    job, network = on_network(job, machine.fields(), by)
    step, flows = step_on(job, network)
    quiet, where = None, f", by {by}"
    if network is not None and flows is not None:
        words = said(machine)
        where = f"{words}, by flows: the busiest, GPU {flows.worker:,}"
        if network.disturbances:
            quiet, _ = step_on(job, dataclasses.replace(network, disturbances=()), lane=flows.lane)
        if output is not None:
            files.write(output, flows.timeline(words.removeprefix(", ")))
    if json:
        print_json(step.columns | ({} if quiet is None else {"undisturbed_s": quiet.seconds}))
        return
    for caveat in caveats(step):
        note(caveat)
    print_parts(f"{job}{where}", step.parts, None if quiet is None else ("undisturbed", quiet.parts))
    if quiet and abs(step.seconds - quiet.seconds) <= _ROUNDING * step.seconds:
        note(f"{machine.axes['disturb']}: costs nothing; the step takes as long undisturbed")
    note(f"{step.tokens_per_s:,.0f} tokens/s, model FLOPs utilization {percent(step.utilization)}")
    if output is not None:
        note(f"timeline of the lanes that differ -> {output}")


def sweep(
    paths: list[Path],
    jobs: list[Job],
    /,
    machine: SweptMachine,
    written: Written,
    running: Running,
    fidelity: Fidelity = None,
    json: Json = False,
) -> None:
    """Predict the step of every job on every network, and write the rows where the options say, or print them."""
    from legato.sweeps import sweep_jobs

    by = fidelity_of(fidelity, "flows")
    written.check(paths, ".csv", ".html")
    refuse_switches(machine, by)
    on_machine = [replace(job, machine=machine.named() or job.machine) for job in jobs]
    named = dict(zip(map(str, paths), on_machine, strict=True))
    axes = {axis.field: values for axis, values in machine.several_of("links", "switches").items()}
    with running.cells(written.first) as how:
        rows = sweep_jobs(named, axes, by, **how)
    same = f"{_same(rows)}, by {by}"
    written.rows(rows, partial(_report, named, rows, same), partial(_show, named, rows, same), json)


def _show(jobs: Mapping[str, Job], rows: Sequence[JobRow], same: str) -> None:
    for line in dict.fromkeys(job.machine.links_in_words for job in jobs.values()):
        note(line)
    shown = rows[:MOST_SHOWN]
    print_text(_table(shown, _differing(rows), f"{count(len(rows), 'cell')}{same}: predicted", named=True), *_NAMES)
    if len(rows) > len(shown):
        note(f"the first {len(shown)} of {len(rows):,} are shown (--json and -o have all)")
    for line in _failed(rows):
        note(line)


def _report(jobs: Mapping[str, Job], rows: Sequence[JobRow], same: str) -> Report:
    from legato.reports.model import Report

    mine = {name: [row for row in rows if row.job == name] for name in jobs}
    return Report(tuple(_page(job, mine[name], same) for name, job in jobs.items()))


def refuse_switches(machine: Given, fidelity: str, **others: Any) -> None:
    """Raise `InputError` if an option was typed that needs links, by formulas."""
    typed = [axis.name for axis in machine.typed("switches")] + [name for name, value in others.items() if value]
    if typed and fidelity == "formulas":
        option = typed[0].replace("_", "-")
        raise InputError(f"--{option}: means nothing by formulas (expected --fidelity flows)")


def said(machine: Given) -> str:
    """What the options say of the network above a machine's links."""
    return "".join(f", {axis.say(axis.write(value))}" for axis, value in machine.of("switches").items() if axis.words)


def _differing(rows: Sequence[JobRow]) -> list[Axis]:
    """The axes on which the rows have several values: the columns of the table."""
    return [axis for axis in _axes(rows) if len({row.axes[axis.field] for row in rows}) > 1]


def _axes(rows: Sequence[JobRow]) -> list[Axis]:
    return [axis for axis in NETWORK if axis.field in rows[0].axes]


def _same(rows: Sequence[JobRow]) -> str:
    """What no column says, in words."""
    same = [axis for axis in _axes(rows) if axis not in _differing(rows) and axis.words]
    return "".join(f", {axis.say(axis.write(rows[0].axes[axis.field]))}" for axis in same)


def _table(rows: Sequence[JobRow], axes: Sequence[Axis], title: str, *, named: bool = False) -> TextTable:
    from legato.reports.model import TextTable

    heads = (
        *(["job"] if named else []),
        *(axis.column for axis in axes),
        "step",
        "speedup over the first",
        "utilization",
    )
    return TextTable(
        title, (*heads, "waits for"), tuple((*([row.job] if named else []), *_cells(row, axes)) for row in rows)
    )


def _cells(row: JobRow, axes: Sequence[Axis]) -> list[str]:
    from legato.whole_jobs.step import waits

    texts = [axis.write(row.axes[axis.field]) for axis in axes]
    if row.step_s is None or row.speedup is None or row.utilization is None:
        return [*texts, "failed", "", "", ""]
    return [*texts, format_seconds(row.step_s), f"{row.speedup:.2f}x", percent(row.utilization), waits(row.parts)]


def _failed(rows: Sequence[JobRow]) -> list[str]:
    errors = [row.error for row in rows if row.error is not None]
    return [f"{errors.count(error):,} failed: {error}" for error in dict.fromkeys(errors)]


def _page(job: Job, rows: Sequence[JobRow], same: str) -> ModelReport:
    """Of one job: what its step consists of on each network, drawn, and the table."""
    from legato.reports.model import BreakdownChart, ModelReport
    from legato.whole_jobs.step import predict
    from legato.whole_jobs.told import DRAWN, breakdown, caveats

    axes = _differing(rows)
    bars = [
        breakdown(
            ", ".join(axis.say(axis.write(row.axes[axis.field])) for axis in axes) or "the network",
            row.parts,
            note=f"{row.speedup:.2f}x",
        )
        for row in rows
        if row.step_s is not None
    ]
    hint = f"{DRAWN} The time of each step is followed by the speedup over the first one."
    charts = [BreakdownChart(f"The step on each network{same}", hint, tuple(bars))] if bars else []
    return ModelReport(
        str(job),
        told=(_table(rows, axes, "networks: predicted"), *_failed(rows)),
        asides=tuple(caveats(predict(job))),
        breakdowns=tuple(charts),
    )
