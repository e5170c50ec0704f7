"""`legato sweep`"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer
from rich.table import Table

from legato.cli.network_options import (
    Aggregation,
    Barrier,
    Distribution,
    Group,
    InFlight,
    Iterations,
    MessageBytes,
    Placement,
    Reduce,
    Seed,
    Sharing,
    fabric_options,
    sharing_of,
)
from legato.cli.options import Json
from legato.cli.output import format_gap, note, print_json, print_table, progress
from legato.core import files
from legato.core.errors import InputError, unknown_name
from legato.core.units import format_bandwidth, format_seconds, parse_bandwidth, parse_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.report.model import SweepRow

T = TypeVar("T")

_SUFFIXES = (".parquet", ".csv", ".html")
_MOST_SHOWN = 40


def sweep(
    workloads: Annotated[list[Path], typer.Argument(metavar="W.json...", help="The workloads.")],
    bandwidth: Annotated[str, typer.Option(help="Of every host's link, like 1,10,25Gbit.")] = "10Gbit",
    workers: Annotated[str, typer.Option(help="Numbers of workers, like 4,8,16,32.")] = "8",
    fabric: Annotated[str, typer.Option(help="Fabrics' names, or all.")] = "ring",
    scheduler: Annotated[str, typer.Option(help="Schedulers' names, plain (a message a tensor), or all.")] = "plain",
    fidelity: Annotated[
        str, typer.Option(help="flow: every transfer on every link; collective: as planners do.")
    ] = "flow",
    latency: Annotated[str, typer.Option(help="From host to host, like 5,30us.")] = "0",
    servers: Annotated[str, typer.Option(help="Numbers of parameter servers, on fabrics that have some.")] = "1",
    server_bandwidth: Annotated[str | None, typer.Option(help="Of servers' links. (default: as the others')")] = None,
    racks: Annotated[str, typer.Option(help="Numbers of racks that the workers stand in.")] = "1",
    oversubscription: Annotated[str, typer.Option(help="Of the racks' uplinks: 1,4 is 1:1 and 4:1.")] = "1",
    jitter: Annotated[str, typer.Option(help="Of computation: sigmas of a lognormal factor.")] = "0",
    slow: Annotated[str, typer.Option(help="The last worker computes so many times as long, like 1,2.")] = "1",
    slow_link: Annotated[str, typer.Option(help="The last worker's link is so many times as slow.")] = "1",
    reduce: Reduce = "0",
    placement: Placement = None,
    distribution: Distribution = None,
    barrier: Barrier = None,
    aggregation: Aggregation = None,
    message_bytes: MessageBytes = None,
    in_flight: InFlight = None,
    group: Group = None,
    sharing: Sharing = "fifo",
    seed: Seed = 0,
    iterations: Iterations = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Rows as .parquet or .csv, plots as .html.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="R.html", help="Plots, beside the rows.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Cores to use. (default: all)", min=1)] = None,
    backend: Annotated[
        str | None, typer.Option(help="A cluster: dask://host:port, or ray. (default: this machine)")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget finished cells, and start again.")] = False,
    json: Json = False,
) -> None:
    """Simulate every combination of workloads, networks and schedulers, on all cores.

    Finished cells are kept beside the output: after an interruption, or with more values, the same command goes on
    from there. A bare number has the unit of the next one. Speedups are over the first fabric and scheduler named.

    Example: [bold]legato sweep vgg.json --bandwidth 1,10,25Gbit --workers 4,8,16,32 --fabric all -o sweep.html[/]
    """
    from legato.sweep import Grid
    from legato.sweep import sweep as run
    from legato.sweep.grid import Fidelity, fabric_names
    from legato.sweep.journal import Journal, journal_of
    from legato.sweep.parallel import check_backend

    if fidelity not in get_args(Fidelity):
        raise unknown_name("fidelity", fidelity, get_args(Fidelity))
    level: Fidelity = "flow" if fidelity == "flow" else "collective"
    _check_outputs(output, report)
    check_backend(backend)
    grid = Grid(
        workloads=tuple(files.read(path, Workload) for path in workloads),
        fabrics=tuple(fabric_names(level)) if fabric == "all" else tuple(_names(fabric)),
        schedulers=tuple(_names(scheduler)),
        fidelity=level,
        workers=tuple(_whole("--workers", workers)),
        servers=tuple(_whole("--servers", servers)),
        racks=tuple(_whole("--racks", racks)),
        oversubscriptions=tuple(_factors("--oversubscription", oversubscription)),
        jitters=tuple(_factors("--jitter", jitter)),
        slows=tuple(_factors("--slow", slow)),
        slow_links=tuple(_factors("--slow-link", slow_link)),
        bandwidths_bps=tuple(_quantities(bandwidth, parse_bandwidth)),
        latencies_s=tuple(_quantities(latency, parse_seconds)),
        reduce_s_per_byte=parse_seconds(reduce) / 2**20,
        server_bandwidth_bps=None if server_bandwidth is None else parse_bandwidth(server_bandwidth),
        sharing=sharing_of(sharing),
        seed=seed,
        iterations=iterations,
        options=fabric_options(
            placement=placement,
            distribution=distribution,
            barrier=barrier,
            aggregation=aggregation,
            message_bytes=message_bytes,
            in_flight=in_flight,
            group=group,
        ),
    )
    kept = output or report
    with nullcontext() if kept is None else Journal(journal_of(kept)) as journal:
        if fresh and journal is not None:
            journal.forget()
        if journal is not None and journal.done:
            note(f"{journal.path} has {len(journal.done):,} finished cells")
        try:
            with progress("sweeping") as advance:
                rows = run(grid, journal=journal, jobs=jobs, backend=backend, progress=advance)
        except KeyboardInterrupt:
            if journal is None:
                note("interrupted; without --output, no finished cell is kept")
            else:
                kept_cells = f"{len(journal.done):,} finished cells are kept in {journal.path}"
                note(f"interrupted; {kept_cells}: run the same command again to continue")
            raise
    _write(rows, output, report)
    if json:
        print_json(rows)
    else:
        _show(rows, output or report)


def _check_outputs(output: Path | None, report: Path | None) -> None:
    if output is not None and output.suffix not in _SUFFIXES:
        raise InputError(f"--output {output}: {output.suffix or 'no suffix'} (expected {', '.join(_SUFFIXES)})")
    if report is not None and report.suffix != ".html":
        raise InputError(f"--report {report}: {report.suffix or 'no suffix'} (expected .html)")
    for path in (output, report):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{path}: no such directory (expected an existing one)")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _whole(option: str, text: str) -> list[int]:
    for name in _names(text):
        if not (name.isascii() and name.isdecimal()) or len(name) > 18:
            raise InputError(f"{option} {text!r}: {name!r} (expected whole numbers, like 4,8,16)")
    return [int(name) for name in _names(text)]


def _factors(option: str, text: str) -> list[float]:
    found = []
    for name in _names(text):
        try:
            found.append(float(name))
        except ValueError:
            raise InputError(f"{option} {text!r}: {name!r} (expected numbers, like 1,2.5)") from None
    return found


def _quantities(text: str, parse: Callable[[str], T]) -> list[T]:
    """Values from `1,10,25Gbit`: a bare number takes the unit of the next one that has one."""
    unit, found = "", []
    for name in reversed(_names(text)):
        own = name.lstrip("0123456789.")
        unit = own or unit
        found.append(parse(name if own else name + unit))
    return found[::-1]


def _write(rows: Sequence[SweepRow], output: Path | None, report: Path | None) -> None:
    from legato.report.html import write_report
    from legato.report.model import Report
    from legato.sweep import write_rows

    for path in (output, report):
        if path is not None and path.suffix == ".html":
            write_report(path, Report(sweep=tuple(rows)))
        elif path is not None:
            write_rows(path, rows)


def _show(rows: Sequence[SweepRow], output: Path | None) -> None:
    """A row a cell, without the columns that are the same everywhere; of many, the fastest for each of the machines."""
    failed = [row for row in rows if row.error is not None]
    shown = list(rows)
    title = f"{len(rows):,} cells"
    if len(rows) > _MOST_SHOWN:
        shown = _fastest(rows)
        title += f"; the fastest on each of {len(shown):,} sets of machines"
    if len(shown) > _MOST_SHOWN:
        title += f", of which {_MOST_SHOWN} are shown"
    cells: list[tuple[str, Callable[[SweepRow], str]]] = [
        ("workload", lambda row: row.workload),
        ("workers", lambda row: str(row.workers)),
        ("link", lambda row: format_bandwidth(row.bandwidth_bps)),
        ("latency", lambda row: format_seconds(row.latency_s)),
        ("racks", lambda row: str(row.racks)),
        ("oversubscription", lambda row: f"{row.oversubscription:g}:1"),
        ("slow", lambda row: f"{row.slow:g}x"),
        ("slow link", lambda row: f"{row.slow_link:g}x"),
        ("jitter", lambda row: f"{row.jitter:g}"),
        ("fabric", lambda row: row.fabric),
        ("servers", lambda row: str(row.servers or "")),
        ("scheduler", lambda row: row.scheduler),
        ("iteration", lambda row: format_seconds(row.iteration_s) if row.iteration_s is not None else "failed"),
        ("speedup", lambda row: f"{row.speedup:.2f}x" if row.speedup is not None else ""),
        ("above bound", lambda row: format_gap(row.gap) if row.gap is not None else ""),
        ("utilization", lambda row: f"{row.utilization:.1%}" if row.utilization is not None else ""),
    ]
    table = Table(title=title, header_style="dim")
    kept = [(name, text) for name, text in cells if name == "iteration" or len({text(row) for row in rows} - {""}) > 1]
    for name, _ in kept:
        table.add_column(name, justify="left" if name in ("workload", "fabric", "scheduler") else "right")
    for row in shown[:_MOST_SHOWN]:
        table.add_row(*(text(row) for _, text in kept))
    print_table(table)
    for error in dict.fromkeys(row.error for row in failed):
        names = ", ".join(dict.fromkeys(f"{row.scheduler} on {row.fabric}" for row in failed if row.error == error))
        note(f"{sum(row.error == error for row in failed):,} failed ({names}): {error}")
    if output is not None:
        note(f"{len(rows):,} rows -> {output}")


def _fastest(rows: Sequence[SweepRow]) -> list[SweepRow]:
    from legato.sweep.grid import MACHINE_AXES

    best: dict[Any, SweepRow] = {}
    for row in rows:
        machines = row.workload, *(getattr(row, axis) for axis in MACHINE_AXES if axis != "servers")
        seconds = best[machines].iteration_s if machines in best else None
        if machines not in best or (row.iteration_s is not None and (seconds is None or row.iteration_s < seconds)):
            best[machines] = row
    return list(best.values())
