"""`legato sweep` for whole jobs: which axes they have, and the rows as a table, a file or a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from legato.cli.axes import Given
from legato.cli.options import check_file
from legato.cli.output import note, print_json, print_text
from legato.cli.whole_jobs import (
    DRAWN,
    OF_MACHINE,
    OF_NETWORK,
    breakdown,
    caveats,
    described,
    is_given,
    refuse_network,
    refuse_others,
    waits,
)
from legato.core.axes import BY_NAME, Axis
from legato.core.job import Job
from legato.core.text import count, percent
from legato.core.units import format_seconds

if TYPE_CHECKING:
    from legato.report.model import ModelReport, TextTable
    from legato.sweep import JobRow

__all__ = ["axes_of_jobs", "show_jobs"]

_USED = {"workloads", "fidelity", "output", "report", "json", "jobs", "backend", "fresh", *OF_MACHINE, *OF_NETWORK}
_MOST_SHOWN = 40


def axes_of_jobs(typed: typer.Context, network: Given) -> dict[str, tuple[Any, ...]]:
    """The values on the axes that were typed, by field. Raises `InputError` on options that mean nothing for jobs."""
    refuse_others(typed, _USED)
    if typed.params["fidelity"] == "formulas":
        refuse_network(typed)
    check_file("output", typed.params["output"], ".csv", ".html")
    several = network.several()
    return {axis.field: several[axis.field] for axis in _axes(several) if is_given(typed, axis.name)}


def show_jobs(typed: typer.Context, jobs: Mapping[str, Job], rows: Sequence[JobRow]) -> None:
    """Write the rows where the options say, and print them."""
    from legato.report.html import write_report
    from legato.report.model import Report
    from legato.sweep.table import write_csv

    for path in (typed.params["output"], typed.params["report"]):
        if path is not None and path.suffix == ".html":
            mine = {name: [row for row in rows if row.job == name] for name in jobs}
            write_report(path, Report(tuple(_page(typed, job, mine[name]) for name, job in jobs.items())))
        elif path is not None:
            write_csv(path, [row.columns for row in rows])
    if typed.params["json"]:
        print_json([row.columns for row in rows])
        return
    shown = rows[:_MOST_SHOWN]
    title = f"{count(len(rows), 'cell')}{_same(typed, rows)}: predicted"
    print_text(_table(shown, _differing(rows), title, named=True), "job", "waits for")
    if len(rows) > len(shown):
        note(f"the first {len(shown)} of {len(rows):,} are shown (--json and -o have all)")
    for line in _failed(rows):
        note(line)
    if (output := typed.params["output"] or typed.params["report"]) is not None:
        note(f"{count(len(rows), 'row')} -> {output}")


def _axes(values: Mapping[str, Any]) -> list[Axis]:
    return [axis for name in (*OF_MACHINE, *OF_NETWORK) if (axis := BY_NAME[name]).field in values]


def _differing(rows: Sequence[JobRow]) -> list[Axis]:
    """The axes on which the rows have several values: the columns of the table."""
    return [axis for axis in _axes(rows[0].axes) if len({row.axes[axis.field] for row in rows}) > 1]


def _same(typed: typer.Context, rows: Sequence[JobRow]) -> str:
    """What no column says, in words."""
    same = [axis for axis in _axes(rows[0].axes) if axis not in _differing(rows) and axis.words]
    words = "".join(f", {axis.say(axis.write(rows[0].axes[axis.field]))}" for axis in same)
    return f"{words}, by {typed.params['fidelity']}"


def _table(rows: Sequence[JobRow], axes: Sequence[Axis], title: str, *, named: bool = False) -> TextTable:
    from legato.report.model import TextTable

    heads = (
        *(["job"] if named else []),
        *(axis.column for axis in axes),
        "step",
        "speedup over the first",
        "utilization",
    )
    return TextTable(
        title, (*heads, "waits for"), tuple((*([row.job] if named else []), *_cells(row, axes)) for row in rows)
    )


def _cells(row: JobRow, axes: Sequence[Axis]) -> list[str]:
    texts = [axis.write(row.axes[axis.field]) for axis in axes]
    if row.step_s is None or row.speedup is None or row.utilization is None:
        return [*texts, "failed", "", "", ""]
    return [*texts, format_seconds(row.step_s), f"{row.speedup:.2f}x", percent(row.utilization), waits(row.parts)]


def _failed(rows: Sequence[JobRow]) -> list[str]:
    errors = [row.error for row in rows if row.error is not None]
    return [f"{errors.count(error):,} failed: {error}" for error in dict.fromkeys(errors)]


def _page(typed: typer.Context, job: Job, rows: Sequence[JobRow]) -> ModelReport:
    """Of one job: what its step consists of on each network, drawn, and the table."""
    from legato.report.model import BreakdownChart, ModelReport
    from legato.whole_jobs.step import predict

    axes = _differing(rows)
    bars = [
        breakdown(
            ", ".join(axis.say(axis.write(row.axes[axis.field])) for axis in axes) or "the network",
            row.parts,
            note=f"{row.speedup:.2f}x",
        )
        for row in rows
        if row.step_s is not None
    ]
    hint = f"{DRAWN} The time of each step is followed by the speedup over the first one."
    charts = [BreakdownChart(f"The step on each network{_same(typed, rows)}", hint, tuple(bars))] if bars else []
    return ModelReport(
        described(job),
        told=(_table(rows, axes, "networks: predicted"), *_failed(rows)),
        asides=tuple(caveats(predict(job))),
        breakdowns=tuple(charts),
    )
