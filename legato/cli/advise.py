"""`legato advise`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from legato.cli.import_ import show_notes
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
from legato.cli.output import describe_cost, note, print_json, print_table, progress
from legato.core import files
from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.text import percent
from legato.core.units import format_seconds, parse_bandwidth, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.advice import Advice, RankTimes
    from legato.ingest.traced import Imported

#: Of a job with more ranks, the table has those that wait least and most for late ranks.
_MOST_ROWS = 8


def advise(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACES...",
            help="Traces of torch.profiler, one per rank of a job, possibly with their execution traces, possibly "
            "compressed (.gz). A second trace of the same rank is of the job after a change.",
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
    from legato.advice import changes
    from legato.ingest.jobs import import_jobs

    if output is not None and output.suffix != ".html":
        raise InputError(f"--output {output}: {output.suffix or 'no suffix'} (expected .html)")
    if output is not None:
        check_installed("plotly", "report", f"{output}")
    with progress("reading") as advance:
        jobs = import_jobs(traces, rank=rank, step=step, progress=advance)
    found = [judge(job, _network(job, cluster, workers, bandwidth, latency), workers) for job in jobs]
    told = changes(*found) if len(found) == 2 else []
    if output is not None:
        _write(output, jobs, found)
    if json:
        print_json({"jobs": [_summary(job, advice) for job, advice in zip(jobs, found, strict=True)], "changes": told})
        return
    for job, advice in zip(jobs, found, strict=True):
        _show(advice)
        show_notes(job.notes)
    for line in told:
        print(line)
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


def _show(advice: Advice) -> None:
    _table(advice)
    if advice.predictions and advice.cluster is not None:
        _network_line(advice)
        for prediction in advice.predictions:
            win = f", wins {prediction.win:.1%}" if abs(prediction.win) >= 5e-4 else ""
            print(f"  {prediction.plan:<18} {format_seconds(prediction.iteration_s):>9} predicted{win}")
        assert advice.lower_bound_s is not None and advice.gap is not None
        bound = f"{format_seconds(advice.lower_bound_s):>9}"
        print(f"  {'lower bound':<18} {bound} for any plan; legato's is {percent(advice.gap)} above it")
    if advice.error is not None and advice.measured_s is not None:
        print(
            f"The traced plan is predicted {advice.error:+.1%} off what was measured "
            f"({format_seconds(advice.measured_s)}, without what late ranks delayed)."
        )
    for line in advice.verdict:
        print(line)
    if advice.lacking:
        print(f"No plan: {advice.lacking}.")
    if advice.code:
        print(f"Try: {advice.code}")


def _network_line(advice: Advice) -> None:
    assert advice.cluster is not None
    cost = describe_cost(advice.cluster.cost())
    print(f"Plans for {advice.cluster.workers} workers; an all-reduce takes {cost}:")


def _table(advice: Advice) -> None:
    workers = "" if advice.workers is None else f" of {advice.workers}"
    steps = advice.ranks[0].steps
    title = f"{advice.name}: {len(advice.ranks)}{workers} ranks, {steps} step{'s' if steps > 1 else ''}, measured"
    table = Table(title=title, header_style="dim")
    for heading in ("rank", "iteration", "computing", "communicating", "exposed", "late ranks", "host"):
        table.add_column(heading, justify="right")
    for r in _shown(advice.ranks):
        late = "?" if r.late_s is None else str(r.late_s)
        times = (r.iteration_s, r.computation_s, r.communication_s, r.exposed_s)
        table.add_row(str(r.rank), *map(str, times), late, str(r.host_s))
    print_table(table)
    if len(advice.ranks) > _MOST_ROWS:
        note(f"only the {_MOST_ROWS} ranks that wait least and most for late ranks are shown; --json has all")


def _shown(ranks: Sequence[RankTimes]) -> list[RankTimes]:
    if len(ranks) <= _MOST_ROWS:
        return list(ranks)
    by_wait = sorted(ranks, key=lambda r: 0.0 if r.late_s is None else r.late_s.mean)
    some = [*by_wait[: _MOST_ROWS // 2], *by_wait[-_MOST_ROWS // 2 :]]
    return sorted(some, key=lambda r: r.rank)


def _summary(job: Imported, advice: Advice) -> dict[str, Any]:
    fields = {name: getattr(advice, name) for name in advice.__struct_fields__ if name not in ("plans", "timelines")}
    return fields | {"missing": job.notes.missing, "assumed": job.notes.assumed}


def _write(output: Path, jobs: Sequence[Imported], found: Sequence[Advice]) -> None:
    from legato.report.html import write_report
    from legato.report.model import ModelReport, Report

    sections = []
    for job, advice in zip(jobs, found, strict=True):
        timelines = advice.timelines or tuple(t for t in [job.timeline] if t is not None)
        text = " ".join([*advice.verdict, *([f"Try: {advice.code}"] if advice.code else [])])
        sections.append(ModelReport(advice.name, job.workload, advice.cluster, (), timelines, text, advice.plans))
    write_report(output, Report(tuple(sections)))
