"""`legato demo`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from legato.cli.options import Json
from legato.cli.output import describe_cost, note, print_json, print_rows, stages
from legato.core.errors import RankError, unknown_name
from legato.core.units import format_bytes, format_seconds, parse_bandwidth


def demo(
    model: Annotated[
        list[str] | None, typer.Option(help="resnet-50 or gpt2-small; may be repeated. (default: both)")
    ] = None,
    workers: Annotated[int, typer.Option(help="Worker processes on this machine.", min=2, max=64)] = 2,
    steps: Annotated[int, typer.Option(help="Timed training steps, of DDP and of legato each.", min=4)] = 40,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Run every worker in a host of its own, with links like 1Gbit. (default: one host, loopback)"
        ),
    ] = None,
    parameter_server: Annotated[
        bool, typer.Option("--parameter-server", help="On parameter servers (TicTac), every order of pulls in turn.")
    ] = False,
    servers: Annotated[int, typer.Option(help="Parameter servers, with --parameter-server.", min=1)] = 1,
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
    if parameter_server:
        _on_servers(names, workers, servers, steps, output, bandwidth_bps, json)
        return
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


def _on_servers(
    names: list[str], workers: int, servers: int, steps: int, output: Path, bandwidth_bps: float | None, json: bool
) -> None:
    from legato import demo as job
    from legato.demo.result import SERVER_STAGES

    tolerance = 0.0 if workers == 2 else job.TOLERANCE
    shown = []
    for name in names:
        note(f"{name} on {workers} workers and {servers} parameter servers")
        with stages(SERVER_STAGES) as advance:
            result = job.run_servers(name, workers, servers, steps, output / name, advance, bandwidth_bps)
        for row in result.rows:
            equal = row.max_relative_difference <= tolerance
            shown.append({"model": name, **msgspec.structs.asdict(row), "weights_equal": equal})
            note(
                f"{row.order:14}{format_seconds(row.iteration_s):>10} an iteration, "
                f"{format_seconds(row.waited_s):>9} of it waited for parameters, {row.out_of_order:.1%} out of order; "
                + ("weights those of DDP" if equal else f"weights off by {row.max_relative_difference:.1e}")
            )
    if json:
        print_json(shown)
    if not all(row["weights_equal"] for row in shown):
        raise RankError("the trained weights differ from DDP's")


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
        f"calibrated {cluster.default_collective}: {describe_cost(cost)}, off by "
        f"{result.fit_error:.0%} (median), {result.worst_fit_error:.0%} (worst)"
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
