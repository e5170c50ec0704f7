"""`legato demo`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from legato.cli.options import Json
from legato.cli.output import note, print_json, print_rows, stages
from legato.core.errors import RankError, unknown_name
from legato.core.units import format_bytes, format_seconds, parse_bandwidth


def demo(
    model: Annotated[
        list[str] | None, typer.Option(help="resnet-50 or gpt2-small; may be repeated. (default: both)")
    ] = None,
    workers: Annotated[int, typer.Option(help="Worker processes on this machine.", min=2)] = 2,
    steps: Annotated[int, typer.Option(help="Timed training steps, of DDP and of legato each.", min=4)] = 40,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Run every worker in a host of its own, with links like 1Gbit. (default: one host, loopback)"
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder for everything it writes.")] = Path(
        "legato-demo"
    ),
    json: Json = False,
) -> None:
    """The main job on this machine: capture real models, calibrate, plan, train under DDP and under legato, compare.

    Example: [bold]legato demo --model gpt2-small --workers 2[/]
    """
    from legato import demo as job
    from legato.demo.result import STAGES

    names = model or list(job.MODEL_NAMES)
    for name in names:
        if name not in job.MODEL_NAMES:
            raise unknown_name("model", name, job.MODEL_NAMES)
    bandwidth_bps = parse_bandwidth(bandwidth) if bandwidth else None
    results = []
    for name in names:
        note(f"{name} on {workers} workers" + (f", each with a link of {bandwidth}" if bandwidth else ""))
        with stages(STAGES) as advance:
            result = job.run(name, workers, steps, output / name, advance, bandwidth_bps)
        results.append(result)
        if not json:
            _show(result)
    report, trace = job.write_pictures(results, output)
    if json:
        print_json([job.summary(result, report, trace) for result in results])
    note(f"report: {report}\ntrace:  {trace} (open it at ui.perfetto.dev)")
    different = [result.model for result in results if not job.weights_equal(result)]
    if different:
        raise RankError(f"the trained weights differ from DDP's: {', '.join(different)}")


def _show(result: object) -> None:
    from legato import demo as job
    from legato.demo.result import ModelResult

    assert isinstance(result, ModelResult)
    workload, cluster, cost = result.workload, result.cluster, result.cluster.cost()
    note(
        f"captured   {len(workload.ops)} ops, {len(workload.tensors)} tensors of {format_bytes(workload.nbytes)}, "
        f"{format_seconds(workload.compute_s)} an iteration (op times scaled by {workload.time_scale:.3f})"
    )
    note(
        f"calibrated {cluster.default_collective}: {format_seconds(cost.alpha_s)} + "
        f"{format_seconds(cost.beta_s_per_byte * 2**20)} a MiB, off by {result.fit_error:.0%} (median), "
        f"{result.worst_fit_error:.0%} (worst)"
    )
    bound = format_seconds(result.best["lower_bound_s"])
    print_rows(f"{workload.name}: no plan can be faster than {bound}", job.rows(result))
    equal = (
        "equal, bit for bit"
        if result.max_relative_difference == 0
        else (f"different by {result.max_relative_difference:.1e} (relative)")
    )
    note(f"weights after {result.steps} steps: {equal}")
    note(job.advice(result) + "\n")
