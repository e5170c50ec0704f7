"""`legato sweep`"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.table import Table

from legato.cli.options import (
    BANDWIDTH,
    BANDWIDTH_HELP,
    DISTURB_HELP,
    DISTURB_METAVAR,
    FABRIC_HELP,
    GPUS_PER_HOST_HELP,
    JITTER_HELP,
    LATENCY,
    LATENCY_HELP,
    OVERSUBSCRIPTION_HELP,
    RACKS_HELP,
    REDUCE,
    SCHEDULER_HELP,
    SERVERS_HELP,
    SEVERAL,
    SEVERAL_TIMES,
    SLOW_HELP,
    SLOW_LINK_HELP,
    SPINES_HELP,
    WORKERS,
    WORKERS_HELP,
    Aggregation,
    Balance,
    Barrier,
    ClusterFile,
    CoreOversubscription,
    Distribution,
    Fidelity,
    GpusPerCard,
    InFlight,
    Interrupted,
    Iterations,
    Json,
    LocalBandwidth,
    MessageBytes,
    Placement,
    Ports,
    Reduce,
    Seed,
    Send,
    ServerBandwidth,
    Sharing,
    Topology,
    check_installed,
    fabric_options,
    in_flight_words,
    keep_apart,
    quantity,
    refuse_beside_cluster,
    split,
)
from legato.cli.output import note, print_json, print_table, progress
from legato.core import files
from legato.core.cluster import SEND_S, Cluster
from legato.core.errors import InputError
from legato.core.text import count, percent
from legato.core.units import format_bandwidth, format_seconds, parse_bandwidth, parse_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.report.model import SweepRow
    from legato.sweep import Grid

T = TypeVar("T")

_SUFFIXES = (".parquet", ".csv", ".html")
_MOST_SHOWN = 40
#: How the title of a table names what is the same in all cells, unless it is as usual.
_WORDS = {
    "workload": "{}",
    "workers": "{} worker{s}",
    "link": "{}",
    "latency": "latency {}",
    "GPUs per host": "{} GPU{s} per host",
    "racks": "{} rack{s}",
    "spines": "{} spine{s}",
    "oversubscription": "oversubscription {}",
    "slow": "slow {}",
    "slow link": "slow link {}",
    "jitter": "jitter {}",
    "disturbed": "disturbed {}",
    "fabric": "{}",
    "scheduler": "{}",
}
_USUAL = {"GPUs per host": "1", "racks": "1", "spines": "1", "oversubscription": "1:1", "slow": "1x", "slow link": "1x"}
_USUAL |= {"jitter": "0", "disturbed": "none", "scheduler": "plain"}


def _axis(help: str, default: bool | str = True) -> Any:
    """An option of the network that may have several values."""
    return typer.Option(help=help + SEVERAL, show_default=default, rich_help_panel="Network")


def sweep(
    workloads: Annotated[list[Path], typer.Argument(metavar="W.json...", help="The workloads.")],
    fabric: Annotated[str, typer.Option(help=FABRIC_HELP)] = "ring",
    scheduler: Annotated[str, typer.Option(help=f"{SCHEDULER_HELP} plain sends one message per tensor.")] = "plain",
    fidelity: Fidelity = "flow",
    cluster: ClusterFile = None,
    workers: Annotated[str | None, _axis(WORKERS_HELP, str(WORKERS))] = None,
    servers: Annotated[str | None, _axis(SERVERS_HELP, "1, on fabrics with servers")] = None,
    bandwidth: Annotated[str | None, _axis(BANDWIDTH_HELP, BANDWIDTH)] = None,
    latency: Annotated[str | None, _axis(LATENCY_HELP, LATENCY)] = None,
    send: Send = None,
    reduce: Reduce = None,
    server_bandwidth: ServerBandwidth = None,
    gpus_per_host: Annotated[str, _axis(GPUS_PER_HOST_HELP)] = "1",
    gpus_per_card: GpusPerCard = 1,
    local_bandwidth: LocalBandwidth = "100Gbit",
    topology: Topology = "leaf-spine",
    racks: Annotated[str, _axis(RACKS_HELP)] = "1",
    spines: Annotated[str, _axis(SPINES_HELP)] = "1",
    ports: Ports = None,
    oversubscription: Annotated[str, _axis(OVERSUBSCRIPTION_HELP)] = "1",
    core_oversubscription: CoreOversubscription = 1.0,
    balance: Balance = "ecmp",
    sharing: Sharing = "fifo",
    jitter: Annotated[str, _axis(JITTER_HELP)] = "0",
    slow: Annotated[str, _axis(SLOW_HELP)] = "1",
    slow_link: Annotated[str, _axis(SLOW_LINK_HELP)] = "1",
    disturb: Annotated[
        list[str] | None,
        typer.Option(
            metavar=DISTURB_METAVAR,
            help=DISTURB_HELP + SEVERAL_TIMES,
            show_default="none",
            rich_help_panel="Network",
        ),
    ] = None,
    seed: Seed = 0,
    placement: Placement = None,
    distribution: Distribution = None,
    barrier: Barrier = None,
    aggregation: Aggregation = None,
    message_bytes: MessageBytes = None,
    in_flight: InFlight = None,
    iterations: Iterations = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the rows to this .csv or .parquet file, or plots to this .html file."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="R.html", help="Write plots to this file, beside the rows.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Number of cores to use.", show_default="all", min=1)] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Run on a cluster: dask://host:port, or ray.", show_default="this machine"),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget finished cells and start again.")] = False,
    json: Json = False,
) -> None:
    """Simulate every combination of workloads, networks and schedulers, on all cores.

    Finished cells are kept in a file beside the output: after an interruption, or with more values, the same command
    continues from there. In a list, a number without a unit has the unit of the next one. Speedups are over the first
    fabric and scheduler named. A measured cluster's bandwidth and latency are those that explain the measured cost of
    its default collective.

    Example: [bold]legato sweep vgg.json --bandwidth 1,10,25Gbit --workers 4,8,16,32 --fabric all -o sweep.html[/]
    """
    from legato.simulator.flow.disturbances import UNDISTURBED
    from legato.sweep import Grid
    from legato.sweep import sweep as run
    from legato.sweep.grid import fabric_names
    from legato.sweep.journal import Journal, journal_of
    from legato.sweep.parallel import check_backend

    keep_apart(workloads, output=output, report=report)
    _check_outputs(output, report)
    check_backend(backend)
    grid = Grid(
        workloads=tuple(files.read(path, Workload) for path in workloads),
        fabrics=tuple(fabric_names(fidelity)) if fabric == "all" else tuple(split(fabric)),
        schedulers=tuple(split(scheduler)),
        fidelity=fidelity,
        gpus_per_host=tuple(_whole("--gpus-per-host", gpus_per_host)),
        gpus_per_card=gpus_per_card,
        local_bandwidth_bps=quantity("local-bandwidth", local_bandwidth, parse_bandwidth),
        topology=topology,
        racks=tuple(_whole("--racks", racks)),
        spines=tuple(_whole("--spines", spines)),
        ports=ports,
        oversubscriptions=tuple(_factors("--oversubscription", oversubscription)),
        core_oversubscription=core_oversubscription,
        balance=balance,
        jitters=tuple(_factors("--jitter", jitter)),
        slows=tuple(_factors("--slow", slow)),
        slow_links=tuple(_factors("--slow-link", slow_link)),
        disturbs=tuple(text.strip() for text in disturb or [UNDISTURBED]),
        **_network_axes(cluster, workers, servers, bandwidth, latency, send, reduce),
        server_bandwidth_bps=(
            None if server_bandwidth is None else quantity("server-bandwidth", server_bandwidth, parse_bandwidth)
        ),
        sharing=sharing,
        seed=seed,
        iterations=iterations,
        options=fabric_options(
            placement=placement,
            distribution=distribution,
            barrier=barrier,
            aggregation=aggregation,
            message_bytes=message_bytes,
            in_flight=in_flight,
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
                raise Interrupted("interrupted; without --output, no finished cell is kept") from None
            kept_cells = f"{len(journal.done):,} finished cells are kept in {journal.path}"
            raise Interrupted(f"interrupted; {kept_cells}: run the same command again to continue") from None
    _write(rows, output, report)
    if json:
        print_json(rows)
    else:
        _show(rows, grid, cluster, output or report)


def _check_outputs(output: Path | None, report: Path | None) -> None:
    if output is not None and output.suffix not in _SUFFIXES:
        raise InputError(f"--output {output}: {output.suffix or 'no suffix'} (expected {', '.join(_SUFFIXES)})")
    if report is not None and report.suffix != ".html":
        raise InputError(f"--report {report}: {report.suffix or 'no suffix'} (expected .html)")
    for path in (output, report):
        if path is not None and path.is_dir():
            raise InputError(f"{path}: a directory (expected a file)")
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{path}: no such directory (expected an existing one)")
        if path is not None and path.suffix == ".html":
            check_installed("plotly", "report", f"{path}")
        if path is not None and path.suffix == ".parquet":
            check_installed("pyarrow", "parquet", f"{path}")


def _network_axes(
    cluster: Path | None,
    workers: str | None,
    servers: str | None,
    bandwidth: str | None,
    latency: str | None,
    send: str | None,
    reduce: str | None,
) -> dict[str, Any]:
    """The axes of a `Grid` that a cluster file has, or that the options give."""
    if cluster is None:
        links, delays = BANDWIDTH if bandwidth is None else bandwidth, LATENCY if latency is None else latency
        return {
            "workers": tuple(_whole("--workers", str(WORKERS) if workers is None else workers)),
            "servers": tuple(_whole("--servers", "1" if servers is None else servers)),
            "bandwidths_bps": tuple(_quantities("bandwidth", links, parse_bandwidth)),
            "latencies_s": tuple(_quantities("latency", delays, parse_seconds)),
            "send_s": None if send is None else quantity("send", send, parse_seconds),
            "reduce_s_per_byte": quantity("reduce", REDUCE if reduce is None else reduce, parse_seconds) / 2**20,
        }
    refuse_beside_cluster(
        workers=workers, servers=servers, bandwidth=bandwidth, latency=latency, send=send, reduce=reduce
    )
    from legato.simulator.flow import Network

    found = files.read(cluster, Cluster)
    network = Network.of(found)
    return {
        "workers": (network.workers,),
        "servers": (found.servers or 1,),
        "bandwidths_bps": (network.bandwidth_bps,),
        "latencies_s": (network.latency_s,),
        "send_s": network.send_s,
        "reduce_s_per_byte": network.reduce_s_per_byte,
    }


def _whole(option: str, text: str) -> list[int]:
    for name in split(text):
        if not (name.isascii() and name.isdecimal()) or len(name) > 18:
            raise InputError(f"{option} {text!r}: {name!r} (expected whole numbers, like 4,8,16)")
    return [int(name) for name in split(text)]


def _factors(option: str, text: str) -> list[float]:
    found = []
    for name in split(text):
        try:
            found.append(float(name))
        except ValueError:
            raise InputError(f"{option} {text!r}: {name!r} (expected numbers, like 1,2.5)") from None
    return found


def _quantities(option: str, text: str, parse: Callable[[str], T]) -> list[T]:
    """The values of `1,10,25Gbit`; a number without a unit has the unit of the next one that has one."""
    unit, found = "", []
    for name in reversed(split(text)):
        own = name.lstrip("0123456789.")
        unit = own or unit
        found.append(quantity(option, name if own else name + unit, parse))
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


def _elsewhere(grid: Grid) -> list[str]:
    """What no column tells, in words, where it is not as usual."""
    from legato.simulator.flow.fabrics import fitting

    usual = type(grid)(workloads=grid.workloads)
    others = {name: value for name, value in grid.options.items() if name != "in_flight"}
    flow = [fitting(name, grid.options) for name in grid.fabrics] if grid.fidelity == "flow" else []
    latest_s = min(SEND_S, max(grid.latencies_s)) if grid.send_s is None else grid.send_s
    sends = f"{format_seconds(latest_s)} a send" if latest_s else ""
    sends += ", or the latency" if sends and latest_s > min(grid.latencies_s) else ""
    words = {
        "gpus_per_card": f"{grid.gpus_per_card} GPUs per card",
        "local_bandwidth_bps": f"{format_bandwidth(grid.local_bandwidth_bps)} inside hosts",
        "topology": grid.topology,
        "ports": f"{grid.ports} ports",
        "core_oversubscription": f"core oversubscription {grid.core_oversubscription:g}:1",
        "balance": grid.balance,
        "sharing": f"{grid.sharing} sharing",
        "server_bandwidth_bps": f"{format_bandwidth(grid.server_bandwidth_bps or 0)} to servers",
        "reduce_s_per_byte": f"reduction {format_seconds(grid.reduce_s_per_byte * 2**20)} per MiB",
        "options": ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in others.items()),
        "fidelity": f"{grid.fidelity} fidelity",
    }
    unusual = [text for field, text in words.items() if text and getattr(grid, field) != getattr(usual, field)]
    return [*[sends] * bool(sends), *unusual, *in_flight_words(flow)]


def _show(rows: Sequence[SweepRow], grid: Grid, cluster: Path | None, output: Path | None) -> None:
    """Print one row per cell, or of many the fastest on each network; what is the same everywhere is in the title."""
    failed = [row for row in rows if row.error is not None]
    shown = list(rows)
    cells: list[tuple[str, Callable[[SweepRow], str]]] = [
        ("workload", lambda row: row.workload),
        ("workers", lambda row: f"{row.workers}"),
        ("link", lambda row: format_bandwidth(row.bandwidth_bps)),
        ("latency", lambda row: format_seconds(row.latency_s)),
        ("GPUs per host", lambda row: str(row.gpus_per_host)),
        ("racks", lambda row: str(row.racks)),
        ("spines", lambda row: str(row.spines)),
        ("oversubscription", lambda row: f"{row.oversubscription:g}:1"),
        ("slow", lambda row: f"{row.slow:g}x"),
        ("slow link", lambda row: f"{row.slow_link:g}x"),
        ("jitter", lambda row: f"{row.jitter:g}"),
        ("disturbed", lambda row: row.disturb),
        ("fabric", lambda row: row.fabric),
        ("servers", lambda row: str(row.servers or "")),
        ("scheduler", lambda row: row.scheduler),
        ("iteration", lambda row: format_seconds(row.iteration_s) if row.iteration_s is not None else "failed"),
        ("speedup", lambda row: f"{row.speedup:.2f}x" if row.speedup is not None else ""),
        ("above bound", lambda row: percent(row.gap, signed=True) if row.gap is not None else ""),
        ("utilization", lambda row: percent(row.utilization) if row.utilization is not None else ""),
        ("faster with", lambda row: row.anomaly or ""),
    ]
    same = [(name, texts.pop()) for name, text in cells if len(texts := {text(row) for row in rows}) == 1]
    title = ("" if cluster is None else f"{cluster}: ") + count(len(rows), "cell")
    unusual = [(name, text) for name, text in same if name in _WORDS and text != _USUAL.get(name)]
    words = [_WORDS[name].format(text, s="" if text == "1" else "s") for name, text in unusual]
    title += "".join(f", {word}" for word in [*words, *_elsewhere(grid)])
    if len(rows) > _MOST_SHOWN:
        shown = _fastest(rows)
        title += f"; the fastest on each of {count(len(shown), 'network')}"
    if len(shown) > _MOST_SHOWN:
        title += f" ({_MOST_SHOWN} shown)"
    table = Table(title=title, header_style="dim")
    kept = [(name, text) for name, text in cells if _is_shown(name, {text(row) for row in rows} - {""})]
    for name, _ in kept:
        table.add_column(name, justify="left" if name in ("workload", "disturbed", "fabric", "scheduler") else "right")
    for row in shown[:_MOST_SHOWN]:
        table.add_row(*(text(row) for _, text in kept))
    print_table(table, keys=[name for name, _ in kept].index("iteration"))
    for error in dict.fromkeys(row.error for row in failed):
        names = ", ".join(dict.fromkeys(f"{row.scheduler} on {row.fabric}" for row in failed if row.error == error))
        note(f"{sum(row.error == error for row in failed):,} failed ({names}): {error}")
    if odd := sum(row.anomaly is not None for row in rows):
        cells_are = "1 cell is" if odd == 1 else f"{odd:,} cells are"
        note(f"{cells_are} slower than with less of one axis, as fixed priorities allow (Graham's anomalies)")
    if output is not None:
        note(f"{count(len(rows), 'row')} -> {output}")


def _is_shown(name: str, texts: set[str]) -> bool:
    """Whether the table has this column: it has several values, or is always worth a look."""
    return len(texts) > 1 or name == "iteration" or (name in ("utilization", "faster with") and bool(texts))


def _fastest(rows: Sequence[SweepRow]) -> list[SweepRow]:
    from legato.sweep.grid import MACHINE_AXES

    best: dict[Any, SweepRow] = {}
    for row in rows:
        machines = row.workload, *(getattr(row, axis) for axis in MACHINE_AXES if axis != "servers")
        seconds = best[machines].iteration_s if machines in best else None
        if machines not in best or (row.iteration_s is not None and (seconds is None or row.iteration_s < seconds)):
            best[machines] = row
    return list(best.values())
