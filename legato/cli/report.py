"""`legato report` and `legato trace`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from legato.cli.options import Json
from legato.cli.output import note, print_json
from legato.core import files
from legato.core.timeline import Timeline

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
    timelines: Timelines,
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace file to write.")],
    json: Json = False,
) -> None:
    """Write timelines as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

    Example: [bold]legato trace predicted.json measured.json -o trace.perfetto.json[/]
    """
    from legato.report.perfetto import write_perfetto

    found = [files.read(path, Timeline) for path in timelines]
    write_perfetto(output, found)
    _say("trace", output, len(found), json)


def _say(what: str, output: Path, timelines: int, json: bool) -> None:
    if json:
        print_json({what: str(output), "timelines": timelines})
    else:
        note(f"{timelines} timelines -> {output}")
