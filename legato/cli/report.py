"""`legato report` and `legato trace`"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from legato.cli.options import Json
from legato.cli.output import note, print_json
from legato.core import files
from legato.core.errors import InputError
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.workload import Workload

Timelines = Annotated[list[Path], typer.Argument(metavar="T.json...", help="Timelines, predicted or measured.")]


def report(
    timelines: Timelines,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")],
    json: Json = False,
) -> None:
    """Draw timelines side by side in one self-contained HTML file.

    Example: [bold]legato report predicted.json measured.json -o report.html[/]
    """
    from legato.report.html import write_report
    from legato.report.model import ModelReport, Report

    found = tuple(files.read(path, Timeline) for path in timelines)
    write_report(output, Report((ModelReport(name=found[0].name, timelines=found),)))
    _say("report", output, len(found), json)


def trace(
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace file to write; its end says which sort.")],
    timelines: Annotated[
        list[Path] | None, typer.Argument(metavar="T.json...", help="Timelines, predicted or measured.")
    ] = None,
    workload: Annotated[Path | None, typer.Option(metavar="W.json", help="Their workload: for .et and .csv.")] = None,
    plan: Annotated[Path | None, typer.Option(metavar="P.json", help="Their plan: for .et.")] = None,
    workers: Annotated[
        int | None, typer.Option(help=".et: write NAME.0.et and so on, one a worker. .csv: how many send.", min=1)
    ] = None,
    servers: Annotated[int | None, typer.Option(help=".csv: how many parameter servers. (default: 1)", min=1)] = None,
    json: Json = False,
) -> None:
    """Write timelines as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

    NAME.et: the execution of one plan as a Chakra trace, for other simulators. NAME.csv: the sends of a workload
    (no timeline) as the five columns of the Network Operator Edition.

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
        _refuse(output, {"--workload": workload, "--plan": plan, "--workers": workers, "--servers": servers})
        if not found:
            raise InputError("no timelines given (expected one T.json or more)")
        write_perfetto(output, found)
    _say("trace", output, len(found), json)


def _refuse(output: Path, options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} means nothing for a trace like {output.name}")


def _write_sends(output: Path, workload: Path | None, workers: int | None, servers: int | None) -> None:
    from legato.ingest.send_trace import export_send_trace

    if workload is None:
        raise InputError("a send trace is of a workload: --workload W.json")
    files.write_text(output, export_send_trace(files.read(workload, Workload), workers or 1, servers or 1))


def _write_chakra(
    found: list[Timeline], output: Path, workload: Path | None, plan: Path | None, workers: int | None
) -> None:
    from legato.ingest.chakra_export import export_chakra

    if len(found) != 1 or workload is None or plan is None:
        raise InputError("a Chakra trace is of one timeline, and needs --workload and --plan")
    data = export_chakra(files.read(workload, Workload), files.read(plan, Plan), found[0])
    names = [output] if workers is None else [output.with_suffix(f".{rank}.et") for rank in range(workers)]
    for name in names:
        files.write_bytes(name, data)


def _say(what: str, output: Path, timelines: int, json: bool) -> None:
    if json:
        print_json({what: str(output), "timelines": timelines})
    else:
        note(f"{timelines} timelines -> {output}" if timelines else f"-> {output}")
