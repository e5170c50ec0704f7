"""`legato report` and `legato trace`"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from legato.cli.options import Json
from legato.cli.output import note, print_json
from legato.core import files
from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.workload import Workload

#: A plan that is faster by less counts as equally fast.
_SAME = 1.005

Timelines = Annotated[list[Path], typer.Argument(metavar="T.json...", help="Timelines, predicted or measured.")]


def report(
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="T.json...", help="Timelines, predicted or measured; also their workload and cluster."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="R.html", help="Write the page to this file.")],
    json: Json = False,
) -> None:
    """Draw timelines side by side in one self-contained HTML file.

    With a workload and a cluster, which [bold]legato rehearse -o DIR[/] writes, the page also recommends a plan.

    Example: [bold]legato report DIR/*.json -o report.html[/]
    """
    from legato.report.html import write_report
    from legato.report.model import ModelReport, Report

    found = [(path, _read(path)) for path in inputs]
    timelines = tuple(value for _, value in found if isinstance(value, Timeline))
    workload = _one(found, Workload)
    cluster = _one(found, Cluster)
    if not timelines and workload is None:
        raise InputError("nothing to draw (expected a timeline, or a workload)")
    name = workload.name if workload is not None else timelines[0].name
    advice, plans = _advice(workload, cluster) if workload is not None and cluster is not None else ("", ())
    write_report(output, Report((ModelReport(name, workload, cluster, (), _paired(timelines), advice, plans),)))
    _say("report", output, len(timelines), json)


def _read(path: Path) -> Timeline | Workload | Cluster:
    found = files.read(path)
    if isinstance(found, Plan):
        raise InputError(f"{path}: a plan (expected a timeline, a workload or a cluster)")
    return found


Noun = TypeVar("Noun", Workload, Cluster)


def _one(found: list[tuple[Path, Timeline | Workload | Cluster]], kind: type[Noun]) -> Noun | None:
    of_kind = [(path, value) for path, value in found if isinstance(value, kind)]
    if len(of_kind) > 1:
        raise InputError(f"{of_kind[0][0]} and {of_kind[1][0]}: two {kind.__name__.lower()}s (expected one at most)")
    return of_kind[0][1] if of_kind else None


def _paired(timelines: tuple[Timeline, ...]) -> tuple[Timeline, ...]:
    """The timelines, those of one name together, predicted before measured."""
    names = list(dict.fromkeys(timeline.name for timeline in timelines))
    return tuple(sorted(timelines, key=lambda timeline: (names.index(timeline.name), timeline.source == "measured")))


def _advice(workload: Workload, cluster: Cluster) -> tuple[str, tuple[Plan, ...]]:
    """A recommendation by prediction, in words, and the plans that it compares."""
    from legato.schedule.compare import best, compare
    from legato.schedule.published.ddp import bucket_caps

    ddp, merged, ours = compare(workload, cluster, ["ddp", "merge-optimal", "legato"])
    chosen, plans = best([ddp, merged, ours]), (ddp.plan, merged.plan, ours.plan)
    if ddp.iteration_s <= chosen.iteration_s * _SAME:
        return f"Stay with DDP: no plan is predicted to be more than {_SAME - 1:.1%} faster.", plans
    caps = ", ".join(map(repr, bucket_caps(merged.plan)))
    speedup, stock = ddp.iteration_s / chosen.iteration_s, ddp.iteration_s / merged.iteration_s
    with_stock = f"; or with stock DDP: bucket_cap_mb_list=[{caps}]: {stock:.2f}x" if stock > _SAME else ""
    return f"Use this plan: {chosen.plan.scheduler}, {speedup:.2f}x (predicted, over DDP){with_stock}.", plans


def trace(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write the trace to this file: .json, .et (Chakra) or .csv (sends).")
    ],
    timelines: Annotated[
        list[Path] | None, typer.Argument(metavar="T.json...", help="Timelines, predicted or measured.")
    ] = None,
    workload: Annotated[
        Path | None, typer.Option(metavar="W.json", help="Their workload, which shows where gradients come from.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(metavar="P.json", help="Their plan (.et).")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of workers: one file each, NAME.0.et and so on (.et), or senders (.csv).", min=1, max=2**16
        ),
    ] = None,
    servers: Annotated[
        int | None, typer.Option(help="Number of parameter servers (.csv).", show_default="1", min=1, max=2**16)
    ] = None,
    json: Json = False,
) -> None:
    """Write timelines as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

    A NAME.et is a Chakra trace of one plan's execution, for other simulators. A NAME.csv has the sends of a workload,
    without timelines, in the five columns of the Network Operator Edition.

    Example: [bold]legato trace predicted.json measured.json -o trace.perfetto.json[/]
    """
    from legato.report.perfetto import write_perfetto

    paths = timelines or []
    found = [files.read(path, Timeline) for path in paths]
    if output.suffix == ".et":
        _refuse(output, {"--servers": servers})
        _write_chakra(found, output, workload, plan, workers)
    elif output.suffix == ".csv":
        _refuse(output, {"--plan": plan, "a timeline": paths or None})
        _write_sends(output, workload, workers, servers)
    else:
        _refuse(output, {"--plan": plan, "--workers": workers, "--servers": servers})
        if not found:
            raise InputError("no timelines given (expected one T.json or more)")
        write_perfetto(output, found, None if workload is None else files.read(workload, Workload))
    _say("trace", output, len(found), json)


def _refuse(output: Path, options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} means nothing for a trace like {output.name}")


def _write_sends(output: Path, workload: Path | None, workers: int | None, servers: int | None) -> None:
    from legato.ingest.send_trace import export_send_trace

    if workload is None:
        raise InputError("a send trace needs --workload W.json")
    files.write_text(output, export_send_trace(files.read(workload, Workload), workers or 1, servers or 1))


def _write_chakra(
    found: list[Timeline], output: Path, workload: Path | None, plan: Path | None, workers: int | None
) -> None:
    from legato.ingest.chakra.export import export_chakra

    if len(found) != 1 or workload is None or plan is None:
        raise InputError("a Chakra trace needs one timeline, --workload and --plan")
    data = export_chakra(files.read(workload, Workload), files.read(plan, Plan), found[0])
    names = [output] if workers is None else [output.with_suffix(f".{rank}.et") for rank in range(workers)]
    for name in names:
        files.write_bytes(name, data)


def _say(what: str, output: Path, timelines: int, json: bool) -> None:
    if json:
        print_json({what: str(output), "timelines": timelines})
    else:
        count = f"{timelines} timeline{'s' if timelines > 1 else ''} " if timelines else ""
        note(f"{count}-> {output}")
