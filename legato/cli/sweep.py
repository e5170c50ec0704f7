"""`legato sweep`"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from rich.table import Table

from legato.cli.axes import FabricOptions, SweptOptions
from legato.cli.options import (
    FABRIC_HELP,
    SCHEDULER_HELP,
    Fidelity,
    Interrupted,
    Iterations,
    Json,
    Simulated,
    check_file,
    in_flight_words,
    keep_apart,
    setting,
    split,
)
from legato.cli.output import fidelity_of, note, print_json, print_table, progress
from legato.cli.share import sweep_shared
from legato.cli.sweep_jobs import axes_of_jobs, show_jobs
from legato.cli.whole_jobs import jobs_of
from legato.core import files
from legato.core.axes import NETWORK, SERVERS, SWEPT, Axis
from legato.core.cluster import SEND_S
from legato.core.errors import InputError
from legato.core.text import count, percent
from legato.core.units import format_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.report.model import SweepRow
    from legato.sweep import Grid

_SUFFIXES = (".parquet", ".csv", ".html")
_MOST_SHOWN = 40


@dataclass(frozen=True)
class Cells:
    """What is simulated on the networks, beside workloads."""

    fabric: str = setting("ring", FABRIC_HELP)
    scheduler: str = setting("plain", f"{SCHEDULER_HELP} plain sends one message per tensor.")
    fidelity: Fidelity = None
    iterations: Iterations = None
    share: bool = setting(
        False,
        "Let the workloads be jobs that share each network. Then --workers, --fabric and --scheduler take one value for"
        " all jobs, or one for each.",
        "--share",
    )
    hosts: Literal["packed", "spread", "random", "together"] | None = setting(
        None, "Hosts of jobs that share a network, as in legato simulate.", show_default="packed"
    )


@dataclass(frozen=True)
class Running:
    """How the cells are simulated."""

    jobs: int | None = setting(None, "Number of cores to use.", show_default="all", min=1)
    backend: str | None = setting(None, "Run on a cluster: dask://host:port, or ray.", show_default="this machine")
    fresh: bool = setting(False, "Forget finished cells and start again.", "--fresh")


@dataclass(frozen=True)
class Written:
    """Files for the rows."""

    output: Path | None = setting(
        None, "Write the rows to this .csv or .parquet file, or plots to this .html file.", "--output", "-o"
    )
    report: Path | None = setting(None, "Write plots to this file, beside the rows.", metavar="R.html")


def sweep(
    typed: typer.Context,
    workloads: Annotated[list[Path], typer.Argument(metavar="W.json...", help="The workloads, or whole jobs.")],
    cells: Cells,
    network: SweptOptions,
    options: FabricOptions,
    *,
    written: Written,
    running: Running,
    json: Json = False,
) -> None:
    """Simulate every combination of workloads, networks and schedulers, on all cores.

    Finished cells are kept in a file beside the output: after an interruption, or with more values, the same command
    continues from there. In a list, a number without a unit has the unit of the next one. Speedups are over the first
    fabric and scheduler named. A measured cluster's bandwidth and latency are those that explain the measured cost of
    its default collective.

    With --share, the workloads are a mix of jobs on one network, and a row per network has the iteration of each.

    Whole jobs, as legato workload --tensor writes them, are swept over --bandwidth, --local-bandwidth and
    --gpus-per-host, and, by flows, over networks.

    Example: [bold]legato sweep vgg.json --bandwidth 1,10,25Gbit --workers 4,8,16,32 --fabric all -o sweep.html[/]
    """
    from legato.sweep import Grid, sweep_jobs
    from legato.sweep import sweep as sweep_grid
    from legato.sweep.grid import fabric_names
    from legato.sweep.parallel import check_backend

    output, report = written.output, written.report
    keep_apart(workloads, output=output, report=report)
    data = [files.load(path) for path in workloads]
    check_file("report", report, ".html")
    check_backend(running.backend)
    if jobs := jobs_of(data, workloads):
        typed.params["fidelity"] = fidelity = fidelity_of(cells.fidelity, "flows")
        named, axes = dict(zip(map(str, workloads), jobs, strict=True)), axes_of_jobs(typed, network)
        with _running(running, output or report) as how:
            found = sweep_jobs(named, axes, fidelity, **how)
        show_jobs(typed, named, found)
        return
    check_file("output", output, *_SUFFIXES)
    fidelity = fidelity_of(cells.fidelity, "transfers")
    read = tuple(files.decode(one, Workload, str(path)) for one, path in zip(data, workloads, strict=True))
    if cells.share:
        if output is not None or report is not None or network.axes["servers"] is not None:
            raise InputError("--share: no --output, --report and --servers in a sweep (expected --json for the rows)")
        if running != Running():
            raise InputError("--share: no --jobs, --backend and --fresh in a sweep (expected none of them)")
        what = Simulated(cells.fabric, fidelity, cells.iterations, cells.scheduler)
        sweep_shared(read, what, network, options, cells.hosts or "packed", json)
        return
    if cells.hosts is not None:
        raise InputError("--hosts: means nothing for one job (expected --share)")
    grid = Grid(
        workloads=read,
        fabrics=tuple(fabric_names(fidelity) if cells.fabric == "all" else split(cells.fabric)),
        schedulers=tuple(split(cells.scheduler)),
        fidelity=fidelity,
        axes=network.several(),
        iterations=cells.iterations,
        options=options,
    )
    with _running(running, output or report) as how:
        rows = sweep_grid(grid, **how)
    _write(rows, output, report)
    if json:
        print_json([row.columns for row in rows])
    else:
        _show(rows, grid, network.file, output or report)


@contextmanager
def _running(running: Running, kept: Path | None) -> Iterator[dict[str, Any]]:
    """How cells are run, as the functions of `legato.sweep` take it: with a journal beside the file to be `kept`."""
    from legato.sweep.journal import Journal, journal_of

    journal = None
    try:
        with nullcontext() if kept is None else Journal(journal_of(kept)) as journal:
            if running.fresh and journal is not None:
                journal.forget()
            if journal is not None and journal.done:
                note(f"{journal.path} has {len(journal.done):,} finished cells")
            with progress("sweeping") as advance:
                yield {"journal": journal, "jobs": running.jobs, "backend": running.backend, "progress": advance}
    except KeyboardInterrupt:
        if kept is None:
            raise Interrupted("interrupted; without --output, no finished cell is kept") from None
        count = "" if journal is None else f"{len(journal.done):,} "
        kept_cells = f"{count}finished cells are kept in {journal_of(kept)}"
        raise Interrupted(f"interrupted; {kept_cells}: run the same command again to continue") from None


def _write(rows: Sequence[SweepRow], output: Path | None, report: Path | None) -> None:
    from legato.report.html import write_report
    from legato.report.model import Report
    from legato.sweep import write_rows

    for path in (output, report):
        if path is not None and path.suffix == ".html":
            write_report(path, Report(sweep=tuple(rows)))
        elif path is not None:
            write_rows(path, rows)


class _Column(NamedTuple):
    head: str
    text: Callable[[SweepRow], str]
    is_name: bool = False


def _columns(rows: Sequence[SweepRow]) -> list[_Column]:
    """The columns of the table, of which those are shown that tell rows apart."""
    from legato.report.sweeps import over

    def of(axis: Axis) -> _Column:
        return _Column(axis.column, lambda row: axis.write(row.axes[axis.field]), type(axis.usual) is str)

    return [
        _Column("workload", lambda row: row.workload, True),
        *(of(axis) for axis in SWEPT if axis is not SERVERS),
        _Column("fabric", lambda row: row.fabric, True),
        of(SERVERS),
        _Column("scheduler", lambda row: row.scheduler, True),
        _Column("iteration", lambda row: "failed" if row.iteration_s is None else format_seconds(row.iteration_s)),
        _Column(f"speedup {over(rows)}", lambda row: "" if row.speedup is None else f"{row.speedup:.2f}x"),
        _Column("above bound", lambda row: "" if row.gap is None else percent(row.gap, signed=True)),
        _Column("utilization", lambda row: "" if row.utilization is None else percent(row.utilization)),
        _Column("faster with", lambda row: row.anomaly or ""),
    ]


def _is_shown(head: str, texts: set[str]) -> bool:
    """Whether the table has this column: it has several values, or is always worth a look."""
    return len(texts) > 1 or head == "iteration" or (head in ("utilization", "faster with") and bool(texts))


def _same_everywhere(rows: Sequence[SweepRow], grid: Grid) -> list[str]:
    """What all cells have in common, in words: the machines and links, and of the rest what is not as usual."""
    from legato.simulator.flow.fabrics import fitting
    from legato.sweep.grid import PLAIN

    def only(name: str) -> list[str]:
        names = {getattr(row, name) for row in rows}
        return list(names) if len(names) == 1 else []

    same = [(axis, values[0]) for axis in NETWORK if axis.words and len(values := grid.values[axis.field]) == 1]
    said = [(axis, axis.say(axis.write(v))) for axis, v in same if v != axis.usual or (axis.in_cluster and axis.column)]
    words = only("workload") + [text for axis, text in said if axis.column]
    words += only("fabric") + [name for name in only("scheduler") if name != PLAIN]
    words += _sends(grid) + [text for axis, text in said if not axis.column]
    others = [f"{name.replace('_', ' ')} {value}" for name, value in grid.options.items() if name != "in_flight"]
    if grid.fidelity == "formulas":
        return [*words, *others, "by formulas"]
    return [*words, *others, *in_flight_words(fitting(name, grid.options) for name in grid.fabrics)]


def _sends(grid: Grid) -> list[str]:
    """For how long a send keeps its sender busy, if it does."""
    latencies_s, (send_s,) = grid.values["latency_s"], grid.values["send_s"]
    latest_s = min(SEND_S, max(latencies_s)) if send_s is None else send_s
    less = ", or the latency" if latest_s > min(latencies_s) else ""
    return [f"{format_seconds(latest_s)} a send{less}"] if latest_s else []


def _show(rows: Sequence[SweepRow], grid: Grid, cluster: Path | None, output: Path | None) -> None:
    """Print one row per cell, or of many the fastest on each network; what is the same everywhere is in the title."""
    shown = list(rows)
    title = ", ".join(
        [("" if cluster is None else f"{cluster}: ") + count(len(rows), "cell"), *_same_everywhere(rows, grid)]
    )
    if len(rows) > _MOST_SHOWN:
        shown = _fastest(rows)
        title += f"; the fastest on each of {count(len(shown), 'network')}"
    if len(shown) > _MOST_SHOWN:
        title += f" ({_MOST_SHOWN} shown)"
    table = Table(title=title, header_style="dim")
    columns = [one for one in _columns(rows) if _is_shown(one.head, {one.text(row) for row in rows} - {""})]
    for one in columns:
        table.add_column(one.head, justify="left" if one.is_name else "right")
    for row in shown[:_MOST_SHOWN]:
        table.add_row(*(one.text(row) for one in columns))
    print_table(table, keys=[one.head for one in columns].index("iteration"))
    failed = [row for row in rows if row.error is not None]
    for error in dict.fromkeys(row.error for row in failed):
        names = ", ".join(dict.fromkeys(f"{row.scheduler} on {row.fabric}" for row in failed if row.error == error))
        note(f"{sum(row.error == error for row in failed):,} failed ({names}): {error}")
    if odd := sum(row.anomaly is not None for row in rows):
        cells_are = "1 cell is" if odd == 1 else f"{odd:,} cells are"
        note(f"{cells_are} slower than with less of one axis, as fixed priorities allow (Graham's anomalies)")
    if output is not None:
        note(f"{count(len(rows), 'row')} -> {output}")


def _fastest(rows: Sequence[SweepRow]) -> list[SweepRow]:
    best: dict[Any, SweepRow] = {}
    for row in rows:
        machines = row.workload, *(row.axes[axis.field] for axis in SWEPT if axis is not SERVERS)
        seconds = best[machines].iteration_s if machines in best else None
        if machines not in best or (row.iteration_s is not None and (seconds is None or row.iteration_s < seconds)):
            best[machines] = row
    return list(best.values())
