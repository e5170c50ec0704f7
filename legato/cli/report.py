"""`legato report` and `legato trace`"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cli.options import Json, keep_apart
from legato.cli.output import note, print_json
from legato.core import files
from legato.core.errors import FileError, InputError
from legato.core.files import AnyNoun
from legato.core.plan import Plan
from legato.core.text import count
from legato.core.timeline import Timeline
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.pages import Given

Inputs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILES...",
        help="Files of timelines (predicted or measured), workloads, clusters, plans and measured times. A folder "
        "means all such files in it.",
    ),
]


def report(
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="R.html",
            help="Write the page to this file, or its figures to .svg or .pdf files (files after the first get a "
            "number).",
        ),
    ],
    inputs: Inputs = None,
    json: Json = False,
) -> None:
    """Draw timelines side by side in one self-contained HTML file, or as a figure (.svg, .pdf).

    For a folder written by [bold]legato rehearse -o DIR[/] or [bold]legato verify -o DIR[/], the page repeats what the
    command printed. Given only a workload and a cluster, legato makes plans for the page and recommends one. Two
    predicted or two measured timelines with the same name are shown with the names of their files.

    Example: [bold]legato report DIR -o report.html[/]
    """
    from legato.pages import report_of_nouns
    from legato.reports.html import write_report
    from legato.reports.model import Report

    found = _read(inputs or [], output)
    write_report(output, Report((report_of_nouns(found, note),)))
    _say("report", output, len(found.timelines()), json)


def _read(paths: Sequence[Path], output: Path) -> Given:
    """Read the given files, and from the given folders the files that legato has written."""
    from legato.pages import Given

    found: list[tuple[Path, AnyNoun]] = []
    for given in paths:
        inside = sorted(given.glob("*.json")) if given.is_dir() else [given]
        if not inside:
            raise InputError(f"{given}: no .json in this folder (expected what legato rehearse -o DIR writes)")
        for path in inside:
            try:
                found.append((path, files.read(path)))
            except FileError as error:
                if not given.is_dir() or "format: " not in str(error):
                    raise
                note(f"left out: {path} (not a file of legato)")
    keep_apart((path for path, _ in found), output=output)
    return Given([(str(path), value) for path, value in found])


def trace(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write the trace to this file: .json, .et (Chakra) or .csv (sends).")
    ],
    inputs: Inputs = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of workers: each is a sender in a .csv, or has its own .et file (NAME.0.et and so on).",
            min=1,
            max=2**16,
        ),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option(help="Number of parameter servers (only for .csv).", show_default="1", min=1, max=2**16),
    ] = None,
    json: Json = False,
) -> None:
    """Write timelines as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

    The input files are the same as for [bold]legato report[/]; a workload adds arrows from gradients to their messages.
    An output file NAME.et is a Chakra trace of one plan's execution, for other simulators. An output file NAME.csv
    lists a workload's sends in the five columns of the Network Operator Edition; for it, give no timeline or plan.

    Example: [bold]legato trace DIR/*.json -o trace.perfetto.json[/]
    """
    found = _read(inputs or [], output)
    timelines, job = found.timelines(), found.one(Workload)
    if output.suffix == ".et":
        _refuse(output, {"--servers": servers})
        _write_chakra(found.of(Timeline), output, job, found.one(Plan), workers)
    elif output.suffix == ".csv":
        _refuse(output, {"a plan": found.of(Plan) or None, "a timeline": timelines or None})
        _write_sends(output, job, workers, servers)
    else:
        _refuse(output, {"--workers": workers, "--servers": servers})
        _write_perfetto(timelines, output, job)
    _say("trace", output, len(timelines), json)


def _refuse(output: Path, options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} does not apply to a trace like {output.name}")


def _write_perfetto(timelines: Sequence[Timeline], output: Path, workload: Workload | None) -> None:
    from legato.pages import paired
    from legato.reports.perfetto import write_perfetto

    if not timelines:
        raise InputError("no timelines given (expected one T.json or more)")
    write_perfetto(output, paired(timelines), workload)


def _write_sends(output: Path, workload: Workload | None, workers: int | None, servers: int | None) -> None:
    from legato.ingest import FORMATS, load

    if workload is None:
        raise InputError("a send trace needs a workload (expected W.json among FILES)")
    files.write_text(output, load(FORMATS["send-trace"].export)(workload, workers or 1, servers or 1))


def _write_chakra(
    found: Sequence[Timeline], output: Path, workload: Workload | None, plan: Plan | None, workers: int | None
) -> None:
    from legato.ingest.chakra.export import export_chakra

    if len(found) != 1 or workload is None or plan is None:
        raise InputError("a Chakra trace needs one timeline, its workload and its plan")
    data = export_chakra(workload, plan, found[0])
    names = [output] if workers is None else [output.with_suffix(f".{rank}.et") for rank in range(workers)]
    for name in names:
        files.write_bytes(name, data)


def _say(what: str, output: Path, timelines: int, json: bool) -> None:
    if json:
        print_json({what: str(output), "timelines": timelines})
    else:
        drawn = f"{count(timelines, 'timeline')} " if timelines else ""
        note(f"{drawn}-> {output}")
