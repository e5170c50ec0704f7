"""Whole jobs: `legato workload` writes one, `legato simulate --fidelity formulas` predicts its step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import typer
from msgspec.structs import replace
from rich.table import Table

from legato.cli.options import quantity, setting, split
from legato.cli.output import fidelity_of, note, print_json, print_table
from legato.core import files
from legato.core.axes import BY_NAME
from legato.core.errors import InputError
from legato.core.job import DIMENSIONS, Job, LanguageModel, Machine, Mesh, Schedule, Shard
from legato.core.quantities import parse_flops
from legato.core.text import count, percent
from legato.core.units import format_bandwidth, format_bytes, format_seconds

if TYPE_CHECKING:
    from legato.report.model import Breakdown
    from legato.simulator.flow import Network
    from legato.whole_jobs.step import Step

__all__ = [
    "DRAWN",
    "OF_MACHINE",
    "OF_NETWORK",
    "Layout",
    "breakdown",
    "caveats",
    "described",
    "is_given",
    "job_of",
    "jobs_of",
    "links",
    "links_of",
    "machine_with",
    "network_given",
    "refuse_network",
    "refuse_others",
    "simulate_job",
    "values",
    "waits",
    "write_job",
]

#: Other options of `legato workload` that a job has a use for, and of `legato simulate`.
_OF_WORKLOAD = {"device", "device_flops", "efficiency", "recompute"}
OF_MACHINE = ("bandwidth", "local_bandwidth", "gpus_per_host")
_OF_SIMULATE = {"workloads", "fidelity", *OF_MACHINE}
#: By flows: the network, and the timeline.
OF_NETWORK = (
    "topology", "racks", "spines", "ports", "oversubscription", "core_oversubscription", "balance", "seed", "disturb"
)  # fmt: skip
#: What a chart of breakdowns shows.
DRAWN = (
    "Seconds of the busiest GPU: computing, idle in the pipeline's bubble, or waiting for communication that no "
    "computing hides. Hover over a part for its time; click a name in the legend to hide or show that part."
)
#: A layer's forward and backward pass in less time may be bound by the host.
_SMALL_S = 5e-3
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

    @property
    def given(self) -> bool:
        return any(value is not None for value in asdict(self).values())

    def mesh(self) -> Mesh:
        """The dimensions, which multiply to the number of GPUs. Raises `InputError` if they do not."""
        sizes: dict[str, Any] = {name: getattr(self, name) or 1 for name in DIMENSIONS}
        for name in ("gpus", "expert", *DIMENSIONS):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"--{name}: {getattr(self, name)} (expected at least 1)")
        if self.gpus is not None and self.data is None:
            sizes["data"] = self.gpus // (math.prod(sizes.values())) or 1
        if self.gpus is not None and math.prod(sizes.values()) != self.gpus:
            product = " x ".join(f"{name} {size}" for name, size in sizes.items())
            raise InputError(f"--gpus: {self.gpus:,} (expected {math.prod(sizes.values()):,}: {product})")
        if self.order is not None:
            sizes["order"] = tuple(split(self.order))
        return Mesh(**sizes, expert=self.expert or 1)

    def job(self, name: str, model: LanguageModel, machine: dict[str, Any], *, recompute: bool) -> Job:
        from legato.zoo.presets import framework_named, machine_named

        framework = framework_named(self.preset or "megatron-core")
        if self.overlap is not None:
            hidden = () if self.overlap == "none" else tuple(split(self.overlap))
            if unknown := set(hidden) - {"expert", *DIMENSIONS}:
                raise InputError(f"--overlap: {min(unknown)!r} (expected {', '.join(DIMENSIONS)}, expert or none)")
            framework = replace(framework, hidden=hidden)
        if recompute and self.recompute_only:
            raise InputError("--recompute and --recompute-only: give one or the other")
        schedule = self.pipeline_schedule or "1f1b"
        device = machine_named(machine.pop("device") or "h100")
        return Job(
            name,
            model,
            self.mesh(),
            framework,
            replace(device, **{field: value for field, value in machine.items() if value is not None}),
            microbatches=_or_one(self.microbatches),
            microbatch=_or_one(self.microbatch_size),
            schedule=schedule,
            chunks=(2 if schedule == "interleaved" else 1) if self.chunks is None else self.chunks,
            layers=() if self.split is None else _layers(self.split),
            recompute="full" if recompute else self.recompute_only or "none",
            shard=self.shard or "none",
            sequence_parallel=bool(self.sequence_parallel),
        )


def _or_one(value: int | None) -> int:
    return 1 if value is None else value


def _layers(text: str) -> tuple[int, ...]:
    if not all(one.isascii() and one.isdecimal() and len(one) <= 9 for one in split(text)):
        raise InputError(f"--split {text!r} (expected whole numbers, like 7,8,8,7)")
    return tuple(map(int, split(text)))


def refuse_others(typed: typer.Context, used: set[str]) -> None:
    """Raise `InputError` if an option was given that means nothing for a whole job."""
    for name in typed.params:
        source = typed.get_parameter_source(name)
        if name not in used and source is not None and source.name == "COMMANDLINE":
            raise InputError(f"--{name.replace('_', '-')}: means nothing for a whole job")


def write_job(typed: typer.Context, name: str, layout: Layout, model: LanguageModel, output: Path | None) -> None:
    """The verb `legato workload` for a whole job, with the other options as they were typed."""
    from legato.whole_jobs.step import predict

    refuse_others(typed, _OF_WORKLOAD | {"name", "output", "json", *asdict(layout), *model.__struct_fields__})
    given = typed.params
    machine = {
        "device": given["device"],
        "flops_per_s": None
        if given["device_flops"] is None
        else quantity("device-flops", given["device_flops"], parse_flops),
        "efficiency": given["efficiency"],
    }
    job = layout.job(name, model, machine, recompute=given["recompute"])
    step = predict(job)
    if output is not None:
        files.write(output, job)
    if given["json"]:
        print_json({"job": None if output is None else str(output), **values(step)})
        return
    note(described(job) + (f" -> {output}" if output else ""))
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


def job_of(data: list[bytes], paths: list[Path]) -> Job | None:
    """The job in the only file, or None if it holds something else. Raises `InputError` if it is one of several."""
    jobs = [path for one, path in zip(data, paths, strict=True) if files.holds(one, Job)]
    if jobs and len(paths) > 1:
        raise InputError(f"{jobs[0]}: a whole job beside other files (expected it alone, or --share)")
    return files.decode(data[0], Job, str(paths[0])) if jobs else None


def jobs_of(data: list[bytes], paths: list[Path]) -> list[Job]:
    """The jobs in these files, or none if they hold something else. Raises `InputError` if only some hold a job."""
    others = [path for one, path in zip(data, paths, strict=True) if not files.holds(one, Job)]
    if 0 < len(others) < len(paths):
        raise InputError(f"{others[0]}: beside whole jobs (expected one of them)")
    return [] if others else [files.decode(one, Job, str(path)) for one, path in zip(data, paths, strict=True)]


def simulate_job(typed: typer.Context, job: Job) -> None:
    """The verb `legato simulate` for a whole job, with the other options as they were typed."""
    from legato.whole_jobs.step import predict

    given, fidelity = typed.params, fidelity_of(typed.params["fidelity"], "flows")
    refuse_others(typed, _OF_SIMULATE | {"json", *OF_NETWORK, "output"})
    job = replace(job, machine=links(typed, job.machine))
    quiet = None
    if fidelity == "flows":
        step, quiet, where = _simulate_links(typed, job)
    else:
        refuse_network(typed, "output")
        step, where = predict(job), f", by {fidelity}"
    if given["json"]:
        print_json(values(step) | ({} if quiet is None else {"undisturbed_s": quiet.seconds}))
        return
    for caveat in caveats(step):
        note(caveat)
    table = Table("of the step", title=f"{described(job)}{where}", header_style="dim")
    for head in ("undisturbed", "predicted", "share") if quiet else ("predicted", "share"):
        table.add_column(head, justify="right")
    for kind, seconds in step.parts.items():
        before = [format_seconds(quiet.parts[kind])] if quiet else []
        if seconds or (quiet and quiet.parts[kind]):
            table.add_row(kind, *before, format_seconds(seconds), percent(seconds / step.seconds))
    before = [format_seconds(quiet.seconds)] if quiet else []
    table.add_row("step", *before, format_seconds(step.seconds), percent(1.0), style="bold green")
    print_table(table)
    if quiet and abs(step.seconds - quiet.seconds) <= _ROUNDING * step.seconds:
        note(f"{typed.params['disturb']}: costs nothing; the step takes as long undisturbed")
    note(f"{step.tokens_per_s:,.0f} tokens/s, model FLOPs utilization {percent(step.utilization)}")
    if given["output"] is not None:
        note(f"timeline of the lanes that differ -> {given['output']}")


def _simulate_links(typed: typer.Context, job: Job) -> tuple[Step, Step | None, str]:
    """The step on the network of the options, the same undisturbed if it is disturbed, and all that in words.

    Writes the timeline.
    """
    from legato.whole_jobs.flow.step import simulate

    network, words = network_given(typed, job.machine, job.mesh.workers)
    found, quiet = simulate(job, network), None
    if network.disturbances:
        quiet = simulate(job, dataclasses.replace(network, disturbances=()), lane=found.lane).step
    if (output := typed.params["output"]) is not None:
        files.write(output, found.timeline(words.removeprefix(", ")))
    return found.step, quiet, f"{words}, by flows: the busiest, GPU {found.worker:,}"


def network_given(typed: typer.Context, machine: Machine, workers: int) -> tuple[Network, str]:
    """The machine's network for so many workers, with what the options say of it; and that in words."""
    from legato.whole_jobs.flow.step import network_of

    given = {name: typed.params[name] for name in OF_NETWORK if is_given(typed, name)}
    words = [BY_NAME[name].say(BY_NAME[name].write(value)) for name, value in given.items() if BY_NAME[name].words]
    fields = {BY_NAME[name].field: value for name, value in given.items()}
    return network_of(machine, workers, **fields), "".join(f", {one}" for one in words)


def refuse_network(typed: typer.Context, *more: str) -> None:
    """Raise `InputError` if an option was given that needs links, by formulas."""
    if unused := [name for name in (*OF_NETWORK, *more) if is_given(typed, name)]:
        option = unused[0].replace("_", "-")
        raise InputError(f"--{option}: means nothing by formulas (expected --fidelity flows)")


def links(typed: typer.Context, machine: Machine) -> Machine:
    """The machine with the links that the options of `legato simulate` describe."""
    return machine_with(machine, {name: typed.params[name] for name in OF_MACHINE if is_given(typed, name)})


def machine_with(machine: Machine, given: dict[str, Any]) -> Machine:
    """The machine with the links that these options of `OF_MACHINE` describe, as they were typed."""
    from legato.zoo.presets import with_links

    found = {}
    for axis in [BY_NAME[name] for name in OF_MACHINE if name in given]:
        value = given[axis.name]
        parsed = value if axis.parse is None else quantity(axis.name.replace("_", "-"), value, axis.parse)
        found[axis.field] = parsed
    return with_links(machine, found)


def links_of(machine: Machine) -> str:
    """The links of a machine in words: nominal rates, and the shares of these that are reached."""
    card, link = (format_bandwidth(8 * rate) for rate in (machine.card_bytes_per_s, machine.link_bytes_per_s))
    return (
        f"hosts of {machine.gpus_per_host} x {machine.name}: {card} a GPU ({percent(machine.card_share, 0)} reached), "
        f"{link} inside hosts ({percent(machine.link_share, 0)} reached)"
    )


def is_given(typed: typer.Context, option: str) -> bool:
    source = typed.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def values(step: Step) -> dict[str, Any]:
    """What `--json` prints of a step."""
    sent: dict[str, dict[str, float]] = {}
    for (kind, tier), nbytes in step.sent.items():
        sent.setdefault(kind, {})[tier] = nbytes
    return {
        "name": step.job.name,
        "gpus": step.job.mesh.workers,
        "step_s": step.seconds,
        "computing_s": step.computing_s,
        "bubble_s": step.bubble_s,
        "exposed_s": step.exposed_s,
        "tokens_per_s": step.tokens_per_s,
        "utilization": step.utilization,
        "sent_nbytes": sent,
        "memory_nbytes": asdict(step.memory),
    }


def waits(parts: dict[str, float]) -> str:
    """What a step of these parts waits for, the longest first, where it is at least 1% of the step."""
    seconds = sum(parts.values())
    found = [part for part in parts if part not in ("computing", "optimizer") and parts[part] >= 0.01 * seconds]
    shown = sorted(found, key=lambda part: -parts[part])
    return ", ".join(f"{part} {percent(parts[part] / seconds)}" for part in shown) or "nothing"


def breakdown(name: str, parts: dict[str, float], facts: str = "", note: str = "") -> Breakdown:
    """A step as a bar, without parts that only rounding leaves."""
    from legato.report.model import Breakdown

    seconds = sum(parts.values())
    return Breakdown(name, seconds, {part: s for part, s in parts.items() if abs(s) > 1e-9 * seconds}, facts, note)


def described(job: Job) -> str:
    sizes = ", ".join(f"{name} {getattr(job.mesh, name)}" for name in job.mesh.order if getattr(job.mesh, name) > 1)
    sizes += f", expert {job.mesh.expert}" if job.mesh.expert > 1 else ""
    sizes = f" ({sizes})" if sizes else ""
    chunks = f" with {job.chunks} chunks" if job.chunks > 1 else ""
    return (
        f"{job.name} on {job.mesh.workers:,} x {job.machine.name}{sizes}, {job.framework.name}, "
        f"{job.microbatches:,} micro-batch{'es' if job.microbatches > 1 else ''} of "
        f"{count(job.microbatch, 'sequence')}, {job.schedule}{chunks}"
    )


def caveats(step: Step) -> Iterator[str]:
    """The memory, and what a prediction does not know."""
    from legato.zoo.presets import MACHINES

    machine, memory = step.job.machine, step.memory
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in asdict(memory).items())
    fits = "" if memory.total <= machine.memory_nbytes else f": does not fit in {format_bytes(machine.memory_nbytes)}"
    yield f"memory of the fullest GPU: {format_bytes(memory.total)} ({parts}){fits}"
    if machine.efficiency == getattr(MACHINES.get(machine.name), "efficiency", None):
        yield (
            f"efficiency {machine.efficiency:g} of {machine.name} (a default: another framework's steps may take "
            "20 to 25% more or less; legato fit-machine fits it)"
        )
    else:
        yield f"efficiency {machine.efficiency:g} of {machine.name} (given or fitted)"
    if step.layer_s < _SMALL_S:
        yield f"a layer computes for {format_seconds(step.layer_s)}: the host may take longer, which is not modelled"
