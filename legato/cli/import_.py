"""`legato import`"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from legato.cli.options import TRANSFER_HELP, Json, keep_apart, quantity, setting
from legato.cli.output import describe_size, note, print_json, progress
from legato.core import files
from legato.core.errors import InputError, unknown_name
from legato.core.quantities import parse_seconds
from legato.core.text import percent, shorten
from legato.core.units import format_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from legato.ingest.traced import Imported, Notes, RankMeasure

_FORMATS = ("chakra", "execution-trace", "kineto", "send-trace")


@dataclass(frozen=True)
class Chosen:
    """What is imported of the traces."""

    name: str | None = setting(None, "Name of the workload.", show_default="the first file's")
    rank: int | None = setting(None, "Rank to import.", show_default="the one that takes longest; chakra: the lowest")
    step: str | None = setting(None, "Step to import.", show_default="the one of median length")
    idle: Literal["keep", "drop"] = setting("keep", "Whether op times keep a device's waits for its host.")
    batch_size: int = setting(1, "Batch size, which is written into the workload.", min=1)
    transfer: list[str] | None = setting(None, f"{TRANSFER_HELP} (kineto).", metavar="PATTERN=COLLECTIVE")
    program: bool = setting(
        False, "Write what all ranks compute and send, not the workload of one of them (kineto, chakra).", "--program"
    )


@dataclass(frozen=True)
class OfSends:
    """What only traces of sends need."""

    forward: str | None = setting(None, "Duration of the forward pass, such as 176ms (send-trace).")
    worker: str | None = setting(None, "Worker to import (send-trace).", show_default="the first")
    after: str | None = setting(None, "Leave out gradients sent before this operation (send-trace).")
    drop: list[str] | None = setting(
        None, "Leave out parameters that match (send-trace); may be repeated.", metavar="REGEX"
    )


def import_(
    format: Annotated[str, typer.Argument(metavar="FORMAT", help=f"Format of the traces: {', '.join(_FORMATS)}.")],
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="FILES...", help="The traces of one job, or their folder, possibly compressed (.gz)."),
    ],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="W.json", help="Write the workload to this file.")],
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="T.json", help="Write the measured timeline to this file (kineto, execution-trace)."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="C.json", help="Fit the network to the trace's all-reduces, and write the cluster to this file."
        ),
    ] = None,
    chosen: Chosen,
    sends: OfSends,
    json: Json = False,
) -> None:
    """Turn foreign traces into a workload, and list what they lack and what is assumed.

    Example: [bold]legato import kineto worker0.pt.trace.json.gz worker1.pt.trace.json.gz -o job.json[/]
    """
    from legato.ingest.source import in_folders

    traces = in_folders(traces, note)
    keep_apart(traces, output=output, timeline=timeline, cluster=cluster)
    if chosen.program:
        _refuse("--program", asdict(sends) | {"timeline": timeline, "cluster": cluster, "rank": chosen.rank})
        if chosen.batch_size != 1:
            raise InputError("--batch-size means nothing for --program")
        if format not in ("chakra", "kineto"):
            raise InputError(f"--program means nothing for {format} (expected kineto or chakra)")
    only_step = {"step": chosen.step, "timeline": timeline, "cluster": cluster, "transfer": chosen.transfer}
    with progress("reading") as advance:
        found = _read(format, traces, chosen, sends, only_step, advance)
    if chosen.program:
        _write_program(found, traces, output, json)
        return
    if timeline is not None and found.timeline is not None:
        files.write(timeline, found.timeline)
    if cluster is not None:
        from legato.ingest.network import cluster_of, doubt
        from legato.ingest.source import refusals_name_files

        fitted = refusals_name_files(lambda _: cluster_of(found))(traces)
        if why := doubt(fitted):
            found.notes.lacks(f"the cost of the network: {why}")
        files.write(cluster, fitted)
    if found.workload is None:
        from legato.ingest.source import named

        show_measures(found.ranks)
        show_notes(found.notes)
        raise InputError(f"no workload: {found.lacking}: {named(traces)}")
    job = msgspec.structs.replace(found.workload, batch_size=chosen.batch_size)
    files.write(output, job)
    if json:
        print_json(_summary(format, found, job, output, timeline))
    else:
        show_measures(found.ranks)
        show_notes(found.notes)
        waits = chosen.idle == "keep" and any(measure.idle_s > 0 for measure in found.ranks)
        note(f"{_described(job)}{' and waiting for the host' if waits else ''} -> {output}")


def _write_program(found: Imported, traces: list[Path], output: Path, json: bool) -> None:
    from legato.cli.programs import describe_program, program_values
    from legato.ingest.source import named

    assert found.whole is not None
    program, notes = found.whole.program, found.whole.notes
    if program is None:
        raise InputError(f"no program: {found.whole.lacking}: {named(traces)}")
    files.write(output, program)
    if json:
        print_json({"program": str(output), **program_values(program, notes)})
        return
    show_measures(found.ranks)
    show_notes(notes)
    note(f"{describe_program(program)} -> {output}")


def _read(
    format: str,
    traces: list[Path],
    chosen: Chosen,
    sends: OfSends,
    only_step: dict[str, Any],
    advance: Callable[[int, int], None],
) -> Imported:
    """Read traces in this format; `only_step` are the other options of those that have steps."""
    usual: dict[str, Any] = {"name": chosen.name, "progress": advance}
    if format in ("kineto", "execution-trace"):
        from legato.ingest.execution_trace import import_execution_traces
        from legato.ingest.kineto.importer import import_kineto
        from legato.ingest.names import Transfers

        _refuse(format, asdict(sends))
        read = import_kineto if format == "kineto" else import_execution_traces
        usual["known"] = Transfers(only_step["transfer"] or ())
        return read(traces, step=chosen.step, rank=chosen.rank, keep_idle=chosen.idle == "keep", **usual)
    if format == "chakra":
        from legato.ingest.chakra.importer import import_chakra, import_chakra_program

        _refuse(format, asdict(sends) | only_step)
        if chosen.program:
            return import_chakra_program(traces, name=chosen.name, progress=advance)
        return import_chakra(traces, rank=chosen.rank, **usual)
    if format == "send-trace":
        from legato.ingest.send_trace import import_send_trace

        _refuse(format, only_step | {"rank": chosen.rank})
        forward_s = None if sends.forward is None else quantity("forward", sends.forward, parse_seconds)
        given: dict[str, Any] = asdict(sends) | usual
        del given["forward"]
        return import_send_trace(traces, forward_s=forward_s, **given)
    raise unknown_name("format", format, _FORMATS)


def _refuse(format: str, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if value is not None:
            raise InputError(f"--{option} means nothing for {format}")


def _summary(format: str, found: Imported, job: Workload, output: Path, timeline: Path | None) -> dict[str, Any]:
    return {
        "workload": str(output),
        "timeline": None if timeline is None else str(timeline),
        "format": format,
        "name": job.name,
        "num_ops": len(job.ops),
        "num_tensors": len(job.tensors),
        "nbytes": job.nbytes,
        "compute_s": job.compute_s,
        "ranks": [msgspec.to_builtins(measure) for measure in found.ranks],
        "missing": found.notes.missing,
        "assumed": found.notes.assumed,
    }


def show_measures(measures: Sequence[RankMeasure]) -> None:
    """One line for each rank's step."""
    for m in measures:
        waiting = "" if m.waiting_s is None else f", {format_seconds(m.waiting_s)} waiting for late ranks"
        note(
            f"rank {m.rank}, {m.step}: {format_seconds(m.iteration_s)} per iteration; computing "
            f"{format_seconds(m.computation_s)} (U {percent(m.utilization)}), communicating "
            f"{format_seconds(m.communication_s)} (rho {m.rho:.2f}), {format_seconds(m.exposed_comm_s)} of it "
            f"exposed{waiting}; waiting for the host {format_seconds(m.idle_s)}; overlap alpha {m.overlap:.2f}, "
            f"{m.host_overlap:.2f} with the host's time as computation"
        )


def show_notes(notes: Notes) -> None:
    """What a trace lacks, and what is assumed instead."""
    for missing in notes.missing:
        note(f"missing: {missing}")
    for assumed in notes.assumed:
        note(f"assumed: {assumed}")


def _described(job: Workload) -> str:
    return f"{shorten(job.name)}: {describe_size(job)}, {format_seconds(job.compute_s)} of computation"
