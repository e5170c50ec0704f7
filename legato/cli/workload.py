"""`legato workload`"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import typer

from legato.cli.options import Json, quantity, setting
from legato.cli.output import describe_size, note, print_json, say
from legato.cli.whole_jobs import Layout, write_job
from legato.core import files
from legato.core.errors import InputError, unknown_name
from legato.core.job import LanguageModel, Machine
from legato.core.quantities import parse_flops, parse_seconds
from legato.core.text import count
from legato.core.units import format_bytes, format_seconds
from legato.core.workload import Phase, Workload

if TYPE_CHECKING:
    from legato import zoo

#: The name of a language model that has no other name.
LLM = "llm"
#: Bytes of a parameter and of Adam's states for it: weights and two moments in 32 bits, and in 16-bit training weights
#: in 16 bits as well (Rajbhandari et al. 2020, section 3.1). A gradient comes on top.
_STATES = {"fp32": 12, "bf16": 14, "fp16": 14}


@dataclass(frozen=True)
class Estimate:
    """What computes, and how long it takes."""

    batch_size: int | None = setting(
        None, "Samples per worker and step.", "--batch-size", "--batch", show_default="the paper's"
    )
    device: str | None = setting(
        None,
        "Device that computes, such as k80, p100, v100, a100, h100 or b200; for language models also a machine's file.",
        show_default="v100; h100 for language models",
    )
    device_flops: str | None = setting(None, "Peak FLOP/s of the device, such as 10T.", show_default="its data sheet's")
    efficiency: float | None = setting(
        None, "Share of the peak that matrix products reach.", show_default="0.5; of language models the machine's"
    )
    precision: str | None = setting(
        None, "Precision of computation: fp32, bf16 or fp16.", show_default="fp32; bf16 for language models"
    )
    gradients: str | None = setting(None, "Precision of the gradients that are sent.", show_default="the computation's")
    forward: str | None = setting(None, "Duration of the forward pass, such as 176ms.", show_default="estimated")
    backward: str | None = setting(None, "Duration of the backward pass, such as 296ms.", show_default="estimated")
    add_modules: str | None = setting(
        None, "Add N copies of a module, such as mixed_17x17x768e=25.", metavar="MODULE=N"
    )
    compute_speedup: float | None = setting(None, "Factor by which computation is faster.")


@dataclass(frozen=True)
class Shape:
    """The shape of a language model."""

    PANEL: ClassVar = "Language models: shape"

    layers: int | None = setting(None, "Number of layers.")
    hidden: int | None = setting(None, "Width of the model.")
    heads: int | None = setting(None, "Attention heads.")
    kv_heads: int | None = setting(None, "Heads of the keys and values.", show_default="the attention heads")
    intermediate: int | None = setting(None, "Width of the MLP.", show_default="3.5 x hidden")
    experts: int | None = setting(None, "MLPs of a mixture of experts.", show_default="1")
    active_experts: int | None = setting(None, "Experts that a token uses.", show_default="1")
    vocabulary: int | None = setting(None, "Tokens in the vocabulary.", "--vocab")
    tied: bool | None = setting(
        None,
        "Whether the embeddings are also the output layer.",
        "--tied/--untied",
        show_default="untied; tied in gpt3",
    )
    sequence: int | None = setting(None, "Tokens in a sequence.", show_default="8192, or the paper's")

    def given(self) -> dict[str, Any]:
        """What the options change."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Training:
    """How a large model is trained."""

    PANEL: ClassVar = "Large models: training"

    recompute: bool = setting(False, "Recompute all activations in the backward pass.", "--recompute")
    accumulate: int = setting(1, "Micro-batches per step; the last one sends the gradients.")
    replica_devices: int = setting(
        1, "Devices that share the model and its batch; the workload is that of one of them."
    )


def workload(  # noqa: PLR0913 (its options)
    typed: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Name of a model, or llm for one of a shape that the options give; --list shows them."
        ),
    ] = None,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="W.json", help="Write the workload to this file.")
    ] = None,
    estimate: Estimate,
    shape: Shape,
    training: Training,
    layout: Layout,
    show: Annotated[bool, typer.Option("--list", help="List the models and exit.")] = False,
    json: Json = False,
) -> None:
    """Write the workload of a model from the papers, or of a language model, without downloading or training anything.

    With options of whole jobs, the file holds a job: the model, and how many GPUs share it.

    Example: [bold]legato workload resnet-v1-50 --device p100 -o resnet.json[/]
    """
    if show:
        _list(json)
        return
    if name is None:
        raise InputError("NAME: missing (expected a model; legato workload --list shows them)")
    if layout.given:
        write_job(typed, name, layout, shape_of(name, shape.given()), output)
        return
    model = _model(name, shape.given())
    job = _changed(_estimated(model, estimate, training), estimate)
    if output is not None:
        files.write(output, job)
    result = _summary(job, output)
    if model.language is not None:
        each = _STATES[estimate.precision or model.precision] + job.itemsize
        result["states_nbytes"] = each * model.parameters / training.replica_devices
    if json:
        print_json(result)
        return
    note(
        f"{job.name}, {count(job.batch_size, 'sample')} on {job.device}: {describe_size(job)}, "
        f"forward {format_seconds(result['forward_s'])}, "
        f"backward {format_seconds(result['backward_s'])}" + (f" -> {output}" if output else "")
    )
    if (nbytes := result.get("states_nbytes")) is not None:
        gradients = estimate.gradients or estimate.precision or model.precision
        states = f"weights, {gradients} gradients and Adam's states, if nothing is sharded"
        note(f"{states}: {format_bytes(nbytes)} on a device")


def _estimated(model: zoo.Model, estimate: Estimate, training: Training) -> Workload:
    from legato import zoo

    machine = zoo.device_for(model, estimate.device)
    if estimate.device_flops is not None:
        peak = quantity("device-flops", estimate.device_flops, parse_flops)
        peaks = [field for field in machine.__struct_fields__ if field.endswith("flops_per_s")]
        label = f"{machine.name} at {estimate.device_flops}"
        if isinstance(machine, Machine) and estimate.precision == "fp32":
            peak *= 2  # a machine's is that in 16 bits
        machine = msgspec.structs.replace(machine, name=label, **dict.fromkeys(peaks, peak))
    if estimate.efficiency is not None:
        efficiency = estimate.efficiency
        label = f"{machine.name} at {100 * efficiency:g}%"
        machine = msgspec.structs.replace(machine, name=label, efficiency=efficiency)
    return zoo.workload(
        model,
        batch_size=estimate.batch_size,
        device=machine,
        forward_s=_seconds("forward", estimate.forward),
        backward_s=_seconds("backward", estimate.backward),
        precision=estimate.precision,
        gradients=estimate.gradients,
        **asdict(training),
    )


def _changed(job: Workload, estimate: Estimate) -> Workload:
    from legato import zoo

    if estimate.add_modules is not None:
        module, _, copies = estimate.add_modules.partition("=")
        if not copies.isdecimal():
            raise InputError(f"--add-modules {estimate.add_modules!r} (expected MODULE=N, like mixed_17x17x768e=25)")
        job = zoo.add_modules(job, module, int(copies))
    return job if estimate.compute_speedup is None else zoo.scale_compute(job, estimate.compute_speedup)


def _model(name: str, given: dict[str, Any]) -> zoo.Model:
    """The model of a name, with what the options change in its shape."""
    from legato import zoo
    from legato.zoo.language.models import MODELS

    if name in zoo.MODELS and not given:
        return zoo.model(name)
    if name not in (LLM, *zoo.MODELS, *MODELS):
        raise unknown_name("model", name, [*zoo.MODELS, LLM])
    return zoo.language_model(shape_of(name, given), name if name != LLM and given.keys() <= {"sequence"} else None)


def shape_of(name: str, given: dict[str, Any]) -> LanguageModel:
    """The shape of a language model, with what the options change in it."""
    from legato import zoo
    from legato.zoo.language.models import MODELS, model_named

    if name == LLM:
        needed = ("layers", "hidden", "heads", "vocabulary")
        missing = [_option(field) for field in needed if field not in given]
        if missing:
            raise InputError(f"{', '.join(missing)}: missing (llm is the shape that the options give)")
        return zoo.shaped(**given)
    if name not in MODELS:
        known = f"expected one of {', '.join((LLM, *MODELS))}"
        if given:
            raise InputError(f"{_option(next(iter(given)))}: {name} has no such option ({known})")
        raise InputError(f"{name}: no language model ({known})")
    return model_named(name, **given)


def _option(field: str) -> str:
    return "--vocab" if field == "vocabulary" else f"--{field.replace('_', '-')}"


def _seconds(option: str, text: str | None) -> float | None:
    return None if text is None else quantity(option, text, parse_seconds)


def _summary(job: Workload, output: Path | None) -> dict[str, Any]:
    def total_s(phase: Phase) -> float:
        return math.fsum(op.duration_s for op in job.ops if op.phase == phase)

    return {
        "workload": None if output is None else str(output),
        "name": job.name,
        "batch_size": job.batch_size,
        "device": job.device,
        "num_ops": len(job.ops),
        "num_tensors": len(job.tensors),
        "nbytes": job.nbytes,
        "forward_s": total_s("forward"),
        "backward_s": total_s("backward"),
    }


def _list(json: bool) -> None:
    from legato import zoo

    rows: list[dict[str, Any]] = []
    for name in zoo.MODELS:
        model = zoo.model(name)
        rows.append(
            {
                "name": name,
                "num_tensors": len(model.trainable),
                "parameters": model.parameters,
                "nbytes": model.nbytes,
                "forward_flops": model.flops,
                "batch_size": model.batch_size,
            }
        )
    if json:
        print_json(rows)
        return
    say(f"{'name':<20} {'tensors':>7} {'parameters':>15} {'size':>9} {'GFLOP/sample':>13} {'batch':>5}")
    for row in rows:
        say(
            f"{row['name']:<20} {row['num_tensors']:>7} {row['parameters']:>15,} {format_bytes(row['nbytes']):>9} "
            f"{row['forward_flops'] / 1e9:>13,.2f} {row['batch_size']:>5}"
        )
