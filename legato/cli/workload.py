"""`legato workload`"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import typer

from legato.cli.nouns import job as whole
from legato.cli.nouns.model import LLM, Computes, ModelOutput, Recompute, Shape, shape_of
from legato.cli.options import Json, Options, quantity, setting, taken_by
from legato.cli.output import describe_size, note, print_json, say
from legato.core import files
from legato.core.errors import InputError, unknown_name
from legato.core.job import Machine
from legato.core.quantities import parse_seconds
from legato.core.text import count
from legato.core.units import format_bytes, format_seconds
from legato.core.workload import Phase, Workload

if TYPE_CHECKING:
    from legato import zoo

#: Bytes per parameter of weights and Adam's states: the weight and two moments in 32 bits, and for 16-bit training also
#: the weight in 16 bits (Rajbhandari et al. 2020, section 3.1). Gradients are not counted here.
_STATES = {"fp32": 12, "bf16": 14, "fp16": 14}


@dataclass(frozen=True)
class Estimate(Computes):
    """The options that describe the device, and how long the device computes."""

    batch_size: int | None = setting(
        None, "Samples per worker and step.", "--batch-size", "--batch", show_default="the paper's"
    )
    precision: str | None = setting(
        None, "Precision of computation: fp32, bf16 or fp16.", show_default="fp32; bf16 for language models"
    )
    gradients: str | None = setting(None, "Precision of the gradients that are sent.", show_default="as in computation")
    forward: str | None = setting(None, "Duration of the forward pass, such as 176ms.", show_default="estimated")
    backward: str | None = setting(None, "Duration of the backward pass, such as 296ms.", show_default="estimated")


@dataclass(frozen=True)
class Training:
    """The options about how a large model is trained."""

    PANEL: ClassVar = "Large models: training"

    accumulate: int = setting(1, "Number of micro-batches per step; gradients are sent during the last one.")
    replica_devices: int = setting(
        1, "Number of devices that share the model and its batch; the workload describes one device."
    )


def _write(
    name: str,
    /,
    estimate: Estimate,
    shape: Shape,
    training: Training,
    recompute: Recompute = False,
    output: ModelOutput = None,
    json: Json = False,
) -> None:
    """Write the workload of a model."""
    model = _model(name, shape.given())
    job = _estimated(model, estimate, asdict(training) | {"recompute": recompute})
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


def _estimated(model: zoo.Model, estimate: Estimate, training: dict[str, Any]) -> Workload:
    from legato import zoo

    machine = zoo.device_for(model, estimate.device)
    if (peak := estimate.flops_per_s) is not None:
        peaks = [field for field in machine.__struct_fields__ if field.endswith("flops_per_s")]
        label = f"{machine.name} at {estimate.device_flops}"
        if isinstance(machine, Machine) and estimate.precision == "fp32":
            peak *= 2  # a machine's peak is for 16 bits
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
        **training,
    )


def _model(name: str, given: dict[str, Any]) -> zoo.Model:
    """Return the named model, with its shape changed by the options in `given`."""
    from legato import zoo
    from legato.zoo.language.models import MODELS

    if name in zoo.MODELS and not given:
        return zoo.model(name)
    if name not in (LLM, *zoo.MODELS, *MODELS) and not name.endswith(".json"):
        raise unknown_name("model", name, [*zoo.MODELS, LLM])
    return zoo.language_model(shape_of(name, given), name if name in MODELS and given.keys() <= {"sequence"} else None)


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


def _list(json: Json = False) -> None:
    """List the models."""
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


def workload(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Name of a model (see --list), llm for a language model whose shape the options give, or a "
            "Hugging Face or Megatron configuration (.json).",
        ),
    ] = None,
    *,
    options: Annotated[Options, taken_by(_write, whole.write)],
    show: Annotated[bool, typer.Option("--list", help="List the models and exit.")] = False,
) -> None:
    """Write the workload of a model from the papers, or of a language model, without downloading or training anything.

    With any option for whole jobs, the file holds a job: the model, and how GPUs share it.

    Example: [bold]legato workload resnet-v1-50 --device p100 -o resnet.json[/]
    """
    if show:
        options.run(_list, wrong="does not apply with --list")
    elif name is None:
        raise InputError("NAME: missing (expected a model; legato workload --list shows them)")
    elif options.has(whole.Layout):
        options.run(whole.write, name, wrong="does not apply to a whole job")
    else:
        options.run(_write, name, wrong="does not apply to a workload")
