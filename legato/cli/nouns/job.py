"""Whole jobs: `legato workload` writes a job, and `legato simulate` and `legato sweep` predict its step on networks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec.structs import replace

from legato.cli.axes import Given, axes
from legato.cli.nouns.model import Computes, ModelOutput, Recompute, Shape, shape_of
from legato.cli.nouns.running import MOST_SHOWN, Running, Written
from legato.cli.options import Fidelity, Json, TimelineOutput, keep_apart, quantity, setting, split
from legato.cli.output import fidelity_of, note, print_json, print_parts, print_table
from legato.core import files
from legato.core.errors import InputError
from legato.core.job import DIMENSIONS, HIDDEN, Job, LanguageModel, Machine, Schedule, Shard
from legato.core.quantities import parse_seconds
from legato.core.table import Table
from legato.core.text import count, percent
from legato.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from legato.sweeps import JobResults

__all__ = [
    "Layout",
    "OfMachine",
    "refuse_switches",
    "said",
    "simulate",
    "sweep",
    "write",
]

#: The options about the links of a machine and the switches between machines.
OfMachine = Annotated[Given, axes("links", "switches", cluster=False)]
SweptMachine = Annotated[Given, axes("links", "switches", cluster=False, values="several")]
#: Bytes per element of a gradient, by precision.
_NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Steps whose times differ by a smaller share count as equal.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Layout:
    """The options about how a whole job is divided among GPUs. With any of them, the file holds a whole job."""

    PANEL: ClassVar = "Whole jobs (language models): with any of these, the file holds a job"

    tensor: int | None = setting(None, "Number of tensor-parallel GPUs.", show_default="1")
    context: int | None = setting(None, "Number of context-parallel GPUs, which divide sequences.", show_default="1")
    pipeline: int | None = setting(None, "Number of pipeline stages.", show_default="1")
    data: int | None = setting(None, "Number of data-parallel replicas.", show_default="1, or from --gpus")
    expert: int | None = setting(
        None, "Number of neighbouring data-parallel GPUs that divide the experts.", show_default="1"
    )
    expert_fold: bool | None = setting(
        None,
        "Distribute whole experts over tensor- and context-parallel GPUs, too; --expert counts all these GPUs.",
        "--expert-fold",
        show_default="tensor-parallel GPUs divide each expert",
    )
    gpus: int | None = setting(None, "Number of GPUs of the job.", show_default="as the dimensions need")
    order: str | None = setting(
        None, "Order of the dimensions, outermost first.", show_default="pipeline,data,context,tensor"
    )
    microbatches: int | None = setting(None, "Number of micro-batches per replica and step.", show_default="1")
    microbatch_size: int | None = setting(None, "Number of sequences in a micro-batch.", show_default="1")
    pipeline_schedule: Schedule | None = setting(None, "Pipeline schedule.", show_default="1f1b")
    chunks: int | None = setting(None, "Number of chunks of layers on each stage.", show_default="1; 2 if interleaved")
    split: str | None = setting(None, "Number of layers in each chunk, such as 7,8,8,7.", show_default="even")
    shard: Shard | None = setting(None, "What to shard across data-parallel GPUs.", show_default="none")
    replicas: int | None = setting(
        None, "Number of data-parallel groups that each shard all parameters (HSDP).", show_default="1"
    )
    sequence_parallel: bool | None = setting(
        None,
        "Divide sequences among tensor-parallel GPUs outside matrix products.",
        "--sequence-parallel",
        show_default="no",
    )
    recompute_only: Literal["core", "selective"] | None = setting(
        None,
        "Recompute only attention (core), or every second matrix product and all elementwise operations (selective).",
        show_default="nothing; --recompute: all",
    )
    preset: str | None = setting(
        None, "Framework to model: megatron-core, nemo, torchtitan or megatron-2021.", show_default="megatron-core"
    )
    overlap: str | None = setting(
        None,
        f"Kinds of communication that overlap with computation: {', '.join(HIDDEN)}; or none.",
        show_default="the preset's",
    )
    gradient_dtype: str | None = setting(
        None,
        "Precision in which gradients are accumulated, fp32 or bf16; bf16:fp32 accumulates in bf16 and sends in fp32.",
        show_default="the preset's",
    )
    fused_loss: bool | None = setting(
        None,
        "Whether each GPU computes the loss from its part of the logits in 16 bits, or from all logits in 32 bits.",
        "--fused-loss/--whole-logits",
        show_default="the preset's",
    )
    deduplicate_experts: bool | None = setting(
        None,
        "Send only one copy of a token to each host, even if several experts there use it.",
        "--deduplicate-experts",
        show_default="a copy to each expert",
    )
    mixture_time: str | None = setting(
        None,
        "Time of host work and small kernels of a mixture of experts, per layer and micro-batch, such as 4ms.",
        show_default="none",
    )
    host_time: str | None = setting(
        None, "Host time that GPU work does not hide, per layer and micro-batch, such as 5ms.", show_default="none"
    )
    attention_efficiency: float | None = setting(
        None, "Share of peak FLOP/s that attention reaches.", show_default="the device's"
    )
    fused: bool | None = setting(
        None,
        "Whether a chain of elementwise operations runs as one kernel.",
        "--fused/--eager",
        show_default="the preset's",
    )

    @property
    def facts(self) -> dict[str, Any]:
        """Return the fields of `Framework` that the options set."""
        facts: dict[str, Any] = {
            "fused": self.fused, "fused_loss": self.fused_loss, "deduplicates": self.deduplicate_experts
        }  # fmt: skip
        for field, option, text in (
            ("mixture_s", "mixture-time", self.mixture_time), ("host_s", "host-time", self.host_time)
        ):  # fmt: skip
            facts[field] = None if text is None else quantity(option, text, parse_seconds)
        if self.gradient_dtype is not None:
            added, _, sent = self.gradient_dtype.partition(":")
            if not {added, sent or added} <= _NBYTES.keys():
                raise InputError(f"--gradient-dtype: {self.gradient_dtype!r} (expected fp32, bf16, or bf16:fp32)")
            facts |= {"gradient_nbytes": _NBYTES[added], "sent_nbytes": _NBYTES.get(sent)}
        return {field: value for field, value in facts.items() if value is not None}

    def job(self, name: str, model: LanguageModel, machine: Machine, *, recompute: bool) -> Job:
        from legato.zoo.jobs import job
        from legato.zoo.presets import framework_named

        if recompute and self.recompute_only:
            raise InputError("--recompute and --recompute-only: give one or the other")
        fields = {name: getattr(self, option) for option, name in _FIELDS.items() if getattr(self, option) is not None}
        for field, parse in (("order", split), ("overlap", _kinds), ("layers", _layers)):
            if field in fields:
                fields[field] = parse(fields[field])
        if recompute:
            fields["recompute"] = "full"
        if self.attention_efficiency is not None:
            machine = replace(machine, attention_efficiency=self.attention_efficiency)
        framework = replace(framework_named(self.preset or "megatron-core"), **self.facts)
        return job(model, **fields, framework=framework, machine=machine, name=name)


#: The parameter of `legato.job` for each option that sets one.
_FIELDS = {
    **{name: name for name in (*DIMENSIONS, "expert", "gpus", "order", "microbatches", "chunks", "shard", "replicas")},
    **{name: name for name in ("expert_fold", "sequence_parallel", "overlap")},
    "microbatch_size": "microbatch",
    "pipeline_schedule": "schedule",
    "split": "layers",
    "recompute_only": "recompute",
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
    """Write the job of a language model, and print how many bytes its GPUs send."""
    from legato.whole_jobs.step import predict
    from legato.whole_jobs.told import caveats

    label = Path(name).stem if name.endswith(".json") else name
    job = layout.job(label, shape_of(name, shape.given()), computes.machine(), recompute=recompute)
    step = predict(job)
    if output is not None:
        files.write(output, job)
    if json:
        print_json({"job": None if output is None else str(output), **step.columns})
        return
    note(str(job) + (f" -> {output}" if output else ""))
    for caveat in caveats(step):
        note(caveat)
    sent = {kind: [step.sent.get((kind, tier), 0) for tier in ("host", "network")] for kind, _ in step.sent}
    write = {"kind": None, "inside hosts": format_bytes, "between hosts": format_bytes}
    title = "bytes that a GPU sends in a step, mean over the stages"
    print_table(Table.of(title, write, ((kind, *nbytes) for kind, nbytes in sent.items())))
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
    """Print the parts of a step of the job, and if the network is disturbed, also the parts of an undisturbed step."""
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
        note(f"{machine.axes['disturb']}: costs nothing; the step takes as long without it")
    note(f"{step.tokens_per_s:,.0f} tokens/s, model FLOPs utilization {percent(step.utilization)}")
    if output is not None:
        note(f"timeline of one lane of each kind -> {output}")


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
    """Predict the step of every job on every network, print the rows, and write them to the files of the options."""
    from legato.sweeps import sweep_jobs

    by = fidelity_of(fidelity, "flows")
    written.check(paths, ".csv", ".html")
    refuse_switches(machine, by)
    on_machine = [replace(job, machine=machine.named() or job.machine) for job in jobs]
    named = dict(zip(map(str, paths), on_machine, strict=True))
    axes = {axis.field: values for axis, values in machine.several_of("links", "switches").items()}
    with running.cells(written.first) as how:
        rows = sweep_jobs(named, axes, by, **how)
    written.rows(rows, partial(_show, rows), json)


def _show(found: JobResults) -> None:
    for line in dict.fromkeys(job.machine.links_in_words for job in found.jobs.values()):
        note(line)
    table = found.table(f"{count(len(found), 'cell')}{found.same}: predicted")
    print_table(dataclasses.replace(table, rows=table.rows[:MOST_SHOWN]))
    if len(found) > MOST_SHOWN:
        note(f"the first {MOST_SHOWN} of {len(found):,} are shown (--json and -o have all)")
    for line in found.failures:
        note(line)


def refuse_switches(machine: Given, fidelity: str, **others: Any) -> None:
    """Raise `InputError` if the fidelity is formulas and a given option needs a simulation of links."""
    typed = [axis.name for axis in machine.typed("switches")] + [name for name, value in others.items() if value]
    if typed and fidelity == "formulas":
        option = typed[0].replace("_", "-")
        raise InputError(f"--{option}: does not apply to --fidelity formulas (expected --fidelity flows)")


def said(machine: Given) -> str:
    """Return words that describe the given options about switches."""
    return "".join(f", {axis.say(axis.write(value))}" for axis, value in machine.of("switches").items() if axis.words)
