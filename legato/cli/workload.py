"""`legato workload`"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from legato.cli.options import Json
from legato.cli.output import note, print_json
from legato.core import files
from legato.core.errors import InputError
from legato.core.units import format_bytes, format_seconds, parse_flops, parse_seconds
from legato.core.workload import Phase, Workload


def workload(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of a model; --list shows them.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="W.json", help="Write the workload to this file.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per worker and step.", show_default="the paper's")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device that computes, such as k80, p100, v100 or a100.", show_default="v100")
    ] = None,
    device_flops: Annotated[
        str | None, typer.Option(help="Peak FLOP/s of the device, such as 10T.", show_default="its data sheet's")
    ] = None,
    forward: Annotated[
        str | None, typer.Option(help="Duration of the forward pass, such as 176ms.", show_default="estimated")
    ] = None,
    backward: Annotated[
        str | None, typer.Option(help="Duration of the backward pass, such as 296ms.", show_default="estimated")
    ] = None,
    add_modules: Annotated[
        str | None, typer.Option(metavar="MODULE=N", help="Add N copies of a module, such as mixed_17x17x768e=25.")
    ] = None,
    compute_speedup: Annotated[float | None, typer.Option(help="Factor by which computation is faster.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the models and exit.")] = False,
    json: Json = False,
) -> None:
    """Write the workload of a model from the papers, without downloading or training anything.

    Example: [bold]legato workload resnet-v1-50 --device p100 -o resnet.json[/]
    """
    from legato import zoo

    if show:
        _list(json)
        return
    if name is None:
        raise InputError("NAME: missing (expected a model; legato workload --list shows them)")
    machine = zoo.device_named(device or zoo.DEFAULT_DEVICE)
    if device_flops is not None:
        machine = replace(machine, name=f"{machine.name} at {device_flops}", flops_per_s=parse_flops(device_flops))
    job = zoo.workload(
        name, batch_size=batch_size, device=machine, forward_s=_seconds(forward), backward_s=_seconds(backward)
    )
    if add_modules is not None:
        module, _, count = add_modules.partition("=")
        if not count.isdecimal():
            raise InputError(f"--add-modules {add_modules!r} (expected MODULE=N, like mixed_17x17x768e=25)")
        job = zoo.add_modules(job, module, int(count))
    if compute_speedup is not None:
        job = zoo.scale_compute(job, compute_speedup)
    if output is not None:
        files.write(output, job)
    result = _summary(job, output)
    if json:
        print_json(result)
        return
    note(
        f"{job.name}, {job.batch_size} samples on {job.device}: {len(job.ops)} ops, {len(job.tensors)} tensors of "
        f"{format_bytes(job.nbytes)}, forward {format_seconds(result['forward_s'])}, "
        f"backward {format_seconds(result['backward_s'])}" + (f" -> {output}" if output else "")
    )


def _seconds(text: str | None) -> float | None:
    return None if text is None else parse_seconds(text)


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
    print(f"{'name':<20} {'tensors':>7} {'parameters':>13} {'size':>9} {'GFLOP/sample':>12} {'batch':>5}")
    for row in rows:
        print(
            f"{row['name']:<20} {row['num_tensors']:>7} {row['parameters']:>13,} {format_bytes(row['nbytes']):>9} "
            f"{row['forward_flops'] / 1e9:>12.2f} {row['batch_size']:>5}"
        )
