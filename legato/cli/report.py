"""`legato report` and `legato trace`"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer
from msgspec.structs import replace

from legato.cli.options import Json, keep_apart
from legato.cli.output import note, print_json
from legato.core import files
from legato.core.cluster import Cluster
from legato.core.errors import FileError, InputError
from legato.core.files import AnyNoun
from legato.core.measurement import Measurement
from legato.core.plan import Plan
from legato.core.text import count, percent, shorten
from legato.core.timeline import Timeline
from legato.core.units import format_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.report.model import ModelReport, TextTable

Inputs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILES...",
        help="Timelines, predicted or measured; also their workload, cluster, plans and measured times. A folder "
        "stands for all of these in it.",
    ),
]


def report(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="R.html", help="Write the page to this file.")],
    inputs: Inputs = None,
    json: Json = False,
) -> None:
    """Draw timelines side by side in one self-contained HTML file.

    Of a folder that [bold]legato rehearse -o DIR[/] or [bold]legato verify -o DIR[/] wrote, the page says what the
    command said. With a workload and a cluster alone, legato plans for the page, and recommends a plan. Two predicted,
    or two measured, timelines of one name are told apart by their files.

    Example: [bold]legato report DIR -o report.html[/]
    """
    from legato.report.html import write_report
    from legato.report.model import ModelReport, Report

    found = _read(inputs or [], output)
    timelines, measured = found.timelines(), found.one(Measurement)
    workload, cluster = found.one(Workload), found.one(Cluster)
    if not timelines and workload is None and measured is None:
        raise InputError("nothing to draw (expected a timeline, or a workload)")
    jobs = [workload.name] if workload else [measured.job] if measured else [t.job for t in timelines if t.job]
    model = ModelReport(
        ", ".join(dict.fromkeys(jobs)) or timelines[0].name,
        workload,
        cluster,
        timelines=_paired(timelines, [plan.scheduler for plan in measured.plans] if measured else ()),
        plans=tuple(found.of(Plan)),
        measured=measured,
        told=_jobs(timelines),
    )
    if workload is not None and cluster is not None and not timelines and measured is None:
        model = _planned(model, workload, cluster)
    write_report(output, Report((model,)))
    _say("report", output, len(timelines), json)


Noun = TypeVar("Noun", Workload, Cluster, Timeline, Plan, Measurement)


class _Files(NamedTuple):
    """What was read, with the paths, in the order given."""

    found: Sequence[tuple[Path, AnyNoun]]

    def of(self, kind: type[Noun]) -> list[Noun]:
        return [value for _, value in self.found if isinstance(value, kind)]

    def one(self, kind: type[Noun]) -> Noun | None:
        """The only value of a kind, or None. Raises `InputError` if there are several."""
        paths = [path for path, value in self.found if isinstance(value, kind)]
        if len(paths) > 1:
            raise InputError(f"{paths[0]} and {paths[1]}: two {kind.__name__.lower()}s (expected one at most)")
        return next(iter(self.of(kind)), None)

    def timelines(self) -> tuple[Timeline, ...]:
        """The timelines, each after its baseline; those with one name and source get those of their files as well."""
        given = [(path, value) for path, value in self.found if isinstance(value, Timeline)]
        found = [
            (path, one)
            for path, value in given
            for line in (value.baseline, value)
            if line is not None
            for one in line.drawn()
        ]
        times = Counter((value.name, value.source) for _, value in found)
        return tuple(
            _renamed(value, f"{value.name} ({path})") if times[value.name, value.source] > 1 else value
            for path, value in found
        )


def _renamed(timeline: Timeline, name: str) -> Timeline:
    return replace(timeline, name=name, job=name if timeline.job == timeline.name else timeline.job)


def _jobs(timelines: Sequence[Timeline]) -> tuple[TextTable, ...]:
    """The table of jobs on one network; none where the timelines are of plans of one job."""
    from legato.report.model import TextTable, are_jobs

    rows = [
        (
            shorten(t.name, 60),
            *map(format_seconds, (t.iteration_s, t.computation_s, t.communication_s, t.exposed_comm_s)),
        )
        for t in timelines
    ]
    whole = any(t.whole for t in timelines)
    title = f"{count(len(rows), 'GPU')} of one job" if whole else f"{count(len(rows), 'job')} on one network"
    heads = ("GPU" if whole else "job", "iteration", "computing", "communicating", "exposed")
    return (TextTable(f"{title}, predicted", heads, tuple(rows)),) if are_jobs(timelines) else ()


def _read(paths: Sequence[Path], output: Path) -> _Files:
    """What the files hold, and the folders, of which files in another format are left out."""
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
                note(f"left out: {path} (no file of legato)")
    keep_apart((path for path, _ in found), output=output)
    return _Files(found)


def _paired(timelines: Sequence[Timeline], first: Sequence[str] = ()) -> tuple[Timeline, ...]:
    """The timelines, those of one name together, predicted before measured, and those with `first` names first."""
    names = list(dict.fromkeys([*first, *(timeline.name for timeline in timelines)]))
    return tuple(sorted(timelines, key=lambda timeline: (names.index(timeline.name), timeline.source == "measured")))


def _planned(model: ModelReport, workload: Workload, cluster: Cluster) -> ModelReport:
    """The report with plans that are made for it, and a recommendation by their predictions."""
    from legato.report.model import SchedulerRow
    from legato.schedule.compare import SAME, best, better_buckets, compare, stock_buckets

    ddp, merged, ours = found = compare(workload, cluster, ["ddp", "merge-optimal", "legato"])
    chosen = best(found)
    if chosen is ddp:
        advice = f"Stay with DDP: no plan is predicted to be more than {percent(SAME)} faster."
    else:
        buckets, stock_s = stock_buckets(merged, workload, cluster)
        caps = ", ".join(map(repr, better_buckets(ddp.iteration_s, stock_s, buckets)))
        speedup, stock = ddp.iteration_s / chosen.iteration_s, ddp.iteration_s / stock_s
        with_stock = f"; or with stock DDP: bucket_cap_mb_list=[{caps}]: {stock:.2f}x" if caps else ""
        advice = f"Use this plan: {chosen.plan.scheduler}, {speedup:.2f}x (predicted, over DDP){with_stock}."
    made = "planned for this page: ddp, merge-optimal and legato"
    note(made)
    return replace(
        model,
        rows=tuple(SchedulerRow(**candidate.row()) for candidate in found),
        timelines=tuple(candidate.timeline for candidate in (ddp, ours)),
        plans=(*model.plans, ddp.plan, ours.plan),
        advice=f"{advice} ({made[0].upper()}{made[1:]}.)",
    )


def trace(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write the trace to this file: .json, .et (Chakra) or .csv (sends).")
    ],
    inputs: Inputs = None,
    workload: Annotated[
        Path | None, typer.Option(metavar="W.json", help="The workload, if it is not among the T.json.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="P.json", help="The plan (.et), if it is not among the T.json.")
    ] = None,
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

    It takes the same files as [bold]legato report[/]; a workload adds arrows from gradients to their messages. A
    NAME.et is a Chakra trace of one plan's execution, for other simulators. A NAME.csv has the sends of a workload,
    without timelines, in the five columns of the Network Operator Edition.

    Example: [bold]legato trace DIR/*.json -o trace.perfetto.json[/]
    """
    given = [*(inputs or []), *(path for path in (workload, plan) if path is not None)]
    found = _read(given, output)
    timelines, job = found.timelines(), found.one(Workload)
    if output.suffix == ".et":
        _refuse(output, {"--servers": servers})
        _write_chakra(found.of(Timeline), output, job, found.one(Plan), workers)
    elif output.suffix == ".csv":
        _refuse(output, {"a plan": found.of(Plan) or None, "a timeline": timelines or None})
        _write_sends(output, job, workers, servers)
    else:
        _refuse(output, {"--plan": plan, "--workers": workers, "--servers": servers})
        _write_perfetto(timelines, output, job)
    _say("trace", output, len(timelines), json)


def _refuse(output: Path, options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} means nothing for a trace like {output.name}")


def _write_perfetto(timelines: Sequence[Timeline], output: Path, workload: Workload | None) -> None:
    from legato.report.perfetto import write_perfetto

    if not timelines:
        raise InputError("no timelines given (expected one T.json or more)")
    write_perfetto(output, _paired(timelines), workload)


def _write_sends(output: Path, workload: Workload | None, workers: int | None, servers: int | None) -> None:
    from legato.ingest.send_trace import export_send_trace

    if workload is None:
        raise InputError("a send trace needs a workload (expected W.json, or --workload W.json)")
    files.write_text(output, export_send_trace(workload, workers or 1, servers or 1))


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
