"""`legato capture`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from legato.cli.options import Json, check_installed
from legato.cli.output import describe_size, note, print_json, progress
from legato.core import files
from legato.core.units import format_seconds


def capture(
    training: Annotated[
        str, typer.Argument(metavar="FILE.py:FUNCTION", help="A function that returns (model, optimizer, loss).")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="W.json", help="Write the workload to this file.")],
    name: Annotated[str | None, typer.Option(help="Name of the workload.", show_default="the model's class")] = None,
    batch_size: Annotated[int, typer.Option(help="Batch size to record in the workload.")] = 1,
    runs: Annotated[
        int, typer.Option(help="Number of measured runs; for each op, the shortest time is used.", min=1, max=2**20)
    ] = 5,
    json: Json = False,
) -> None:
    """Run a training step in this process, record every op, and write the workload.

    FUNCTION takes no arguments and returns the model, its optimizer, and a function that runs the forward pass
    and returns the loss. Capturing does not change the model. Run it with as many CPU threads as in training
    (OMP_NUM_THREADS).

    Example: [bold]legato capture train.py:training -o resnet.json[/]
    """
    check_installed("torch", "torch", "legato capture")

    from legato.pytorch.recording.capture import capture as run
    from legato.pytorch.recording.load import load_training

    model, optimizer, loss = load_training(training)
    with progress(f"capturing {type(model).__name__}") as advance:
        workload = run(model, optimizer, loss, name=name, batch_size=batch_size, runs=runs, progress=advance)
    files.write(output, workload)
    result = {
        "workload": str(output),
        "name": workload.name,
        "num_ops": len(workload.ops),
        "num_tensors": len(workload.tensors),
        "nbytes": workload.nbytes,
        "compute_s": workload.compute_s,
        "untraced_s": workload.untraced_s,
        "time_scale": workload.time_scale,
    }
    if json:
        print_json(result)
        return
    note(
        f"{workload.name}: {describe_size(workload)}, {format_seconds(workload.compute_s)} of computation "
        f"per iteration (op times scaled by {workload.time_scale:.3f}) -> {output}"
    )
