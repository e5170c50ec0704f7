"""`legato demo`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from legato.cli.axes import option
from legato.cli.options import Json, check_installed, quantity
from legato.cli.output import describe_size, note, print_json, print_rows, stages
from legato.core.errors import RankError, unknown_name
from legato.core.quantities import parse_bandwidth
from legato.core.text import count, percent
from legato.core.units import format_bandwidth, format_seconds

#: At this bandwidth, communication takes about as long as the computation of the models.
_BANDWIDTH = "1Gbit"


def demo(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model to train: resnet-50 or gpt2-small; may be repeated.", show_default="both"),
    ] = None,
    workers: Annotated[int, option("workers", min=2, max=64)] = 2,
    bandwidth: Annotated[
        str | None,
        option("bandwidth", show_default=f"{_BANDWIDTH}, or loopback if there are no network namespaces here"),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Number of timed training steps with DDP and with legato.", min=4, max=2**20)
    ] = 16,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Write the report and everything else to this folder.")
    ] = Path("legato-demo"),
    json: Json = False,
) -> None:
    """Try everything on this machine: capture real models, calibrate, plan, and compare training with DDP and legato.

    Each worker runs in its own network namespace, whose link has the bandwidth --bandwidth. Creating these namespaces
    needs no root. With --bandwidth loopback, all workers communicate over loopback.

    Example: [bold]legato demo --model gpt2-small --workers 2[/]
    """
    check_installed("torch", "demo", "legato demo")
    check_installed("transformers", "demo", "legato demo")
    for library in ("plotly", "jinja2"):
        check_installed(library, "report", "legato demo")

    from legato.lab import demo as job
    from legato.lab.demo.result import STAGES

    names = model or list(job.MODEL_NAMES)
    for name in names:
        if name not in job.MODEL_NAMES:
            raise unknown_name("model", name, job.MODEL_NAMES)
    bandwidth_bps = _bandwidth_bps(bandwidth)
    results = []
    for name in names:
        note(f"{name} on {count(workers, 'worker')}, {_link(bandwidth_bps)}")
        with stages(STAGES) as advance:
            result = job.run(name, workers, steps, output / name, advance, bandwidth_bps)
        results.append(result)
        if not json:
            _show(result)
    report, trace = job.write_pictures(results, output, _link(bandwidth_bps))
    if json:
        print_json([job.summary(result, report, trace) for result in results])
    for line in (line for result in results for line in job.verdict(result)):
        note(line)
    note(f"{job.NEXT}\n")
    note(f"report: {report}\ntrace:  {trace} (open it at ui.perfetto.dev)")
    different = [result.model for result in results if not job.weights_equal(result)]
    if different:
        raise RankError(f"the trained weights differ from DDP's: {', '.join(different)}")


def _bandwidth_bps(bandwidth: str | None) -> float | None:
    """Return the bandwidth of the links between hosts in bits per second, or None for loopback."""
    from legato.lab.testbed.hosts import why_unavailable

    if bandwidth == "loopback":
        return None
    if bandwidth is None and (reason := why_unavailable()):
        note(f"using loopback, where sending mostly costs processor time that computation needs: {reason}")
        return None
    return quantity("bandwidth", bandwidth or _BANDWIDTH, parse_bandwidth)


def _link(bandwidth_bps: float | None) -> str:
    return "loopback" if bandwidth_bps is None else format_bandwidth(bandwidth_bps)


def _with_speedups(row: dict[str, Any], ddp: dict[str, Any]) -> dict[str, Any]:
    """Return the row with two speedups over DDP: one from the predicted times, and one from the measured times."""
    over = {"predicted_over_ddp": ddp["iteration_s"] / row["iteration_s"]}
    if row["measured_s"] is not None:
        over["speedup_over_ddp"] = ddp["measured_s"] / row["measured_s"]
    return row | over


def _show(result: object) -> None:
    from legato.lab import demo as job
    from legato.lab.demo.result import ModelResult
    from legato.reports.schedulers import best_of, entries

    assert isinstance(result, ModelResult)
    best = best_of(entries(job.report_of(result, "")))
    workload, cluster, cost = result.workload, result.cluster, result.cluster.cost()
    note(
        f"captured   {describe_size(workload)}, "
        f"{format_seconds(workload.compute_s)} of computation per iteration "
        f"(op times scaled by {workload.time_scale:.3f})"
    )
    note(
        f"calibrated {cluster.default_collective}: {cost}; the fit is off by "
        f"{percent(result.fit_error, 0)} (median), {percent(result.worst_fit_error, 0)} (worst)"
    )
    bound = format_seconds(result.best["lower_bound_s"])
    rows = job.rows(result)
    ddp = next(row for row in rows if row["scheduler"] == "ddp")
    print_rows(
        f"{workload.name} on {count(cluster.workers, 'worker')}, calibrated {cluster.default_collective}; "
        f"no plan is predicted to be faster than {bound}",
        [_with_speedups(row, ddp) for row in rows],
        best=best.scheduler if best is not None else None,
    )
    equal = (
        "equal, bit for bit"
        if result.max_relative_difference == 0
        else (f"different by {result.max_relative_difference:.1e} (relative)")
    )
    note(f"trained weights: {equal}")
    doubts = [f"Beware: {doubt}." for doubt in job.result_doubts(result)]
    note("\n".join([job.advice(result), *doubts]) + "\n")
