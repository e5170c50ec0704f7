"""`legato advise`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from legato.cli.options import (
    BANDWIDTH_HELP,
    LATENCY,
    LATENCY_HELP,
    WORKERS_HELP,
    ClusterFile,
    Json,
    check_installed,
    quantity,
    refuse_beside_cluster,
)
from legato.cli.output import note, print_json, print_table, progress, say
from legato.core import files
from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.units import parse_bandwidth, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.advice import Advice
    from legato.ingest.traced import Imported
    from legato.report.model import TextTable


def advise(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACES...",
            help="Traces of torch.profiler, one per rank of a job, possibly with their execution traces, possibly "
            "compressed (.gz). A second trace of a rank, or a trace with another number of ranks, is of the job after "
            "a change.",
        ),
    ],
    cluster: ClusterFile = None,
    workers: Annotated[
        int | None,
        typer.Option(help=WORKERS_HELP, show_default="the trace's", min=2, max=2**20, rich_help_panel="Network"),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help=BANDWIDTH_HELP, show_default="the trace's", rich_help_panel="Network")
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(help=LATENCY_HELP, show_default=f"{LATENCY} with --bandwidth", rich_help_panel="Network"),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Rank to plan for.", show_default="the lowest")] = None,
    step: Annotated[str | None, typer.Option(help="Step to plan for.", show_default="the one of median length")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="R.html", help="Write a report to this file.")
    ] = None,
    json: Json = False,
) -> None:
    """Tell from traces where the time of a job goes, and what a better plan would win.

    The cost of the network is fitted to the trace's own all-reduces; the options replace it.

    Example: [bold]legato advise rank0.pt.trace.json.gz rank1.pt.trace.json.gz[/]
    """
    from legato.advice import advise as judge
    from legato.advice import asides, changes, told
    from legato.ingest.jobs import import_jobs

    if output is not None and output.suffix != ".html":
        raise InputError(f"--output {output}: {output.suffix or 'no suffix'} (expected .html)")
    if output is not None:
        check_installed("plotly", "report", f"{output}")
    with progress("reading") as advance:
        jobs = import_jobs(traces, rank=rank, step=step, progress=advance)
    found = [judge(job, _network(job, cluster, workers, bandwidth, latency), workers) for job in jobs]
    changed = changes(*found) if len(found) == 2 else []
    if output is not None:
        _write(output, jobs, found, changed)
    if json:
        print_json({"jobs": [_summary(advice) for advice in found], "changes": changed})
        return
    for number, advice in enumerate(found, 1):
        for part in told(advice, changed if number == len(found) else ()):
            say(part) if isinstance(part, str) else _print_table(part)
        for line in asides(advice):
            note(line)
    if output is not None:
        note(f"-> {output}")


def _network(
    job: Imported, file: Path | None, workers: int | None, bandwidth: str | None, latency: str | None
) -> Cluster | None:
    """The network that the options describe, or None if it is the trace's."""
    if file is not None:
        refuse_beside_cluster(workers=workers, bandwidth=bandwidth, latency=latency)
        return files.read(file, Cluster)
    if bandwidth is not None:
        count = workers or job.workers
        if count is None or count < 2:
            raise InputError("the trace does not tell the number of workers (expected --workers)")
        return Cluster.derive(
            count,
            quantity("bandwidth", bandwidth, parse_bandwidth),
            quantity("latency", latency or LATENCY, parse_seconds),
        )
    if latency is not None:
        raise InputError("--latency without --bandwidth (expected both or neither)")
    return None


def _print_table(shown: TextTable) -> None:
    table = Table(title=shown.title, header_style="dim")
    for heading in shown.heads:
        table.add_column(heading, justify="left" if heading == shown.heads[0] else "right")
    for row in shown.rows:
        table.add_row(*row)
    print_table(table)


def _summary(advice: Advice) -> dict[str, Any]:
    return {name: getattr(advice, name) for name in advice.__struct_fields__ if name not in ("plans", "timelines")}


def _write(output: Path, jobs: Sequence[Imported], found: Sequence[Advice], changed: Sequence[str]) -> None:
    from legato.advice import COUNTED, asides, told
    from legato.report.html import write_report
    from legato.report.model import ModelReport, Report

    sections = [
        ModelReport(
            advice.name,
            job.workload,
            advice.cluster,
            timelines=advice.timelines or tuple(t for t in [job.timeline] if t is not None),
            plans=advice.plans,
            told=told(advice, changed if advice is found[-1] else ()),
            asides=asides(advice),
            computation=COUNTED,
        )
        for job, advice in zip(jobs, found, strict=True)
    ]
    write_report(output, Report(tuple(sections)))
