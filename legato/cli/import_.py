"""`legato import`"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from inspect import signature
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
from legato.ingest import FORMATS
from legato.ingest.names import Transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from legato.ingest.traced import Imported, Notes, RankMeasure

#: Options that have another name in readers: that name, and a function that converts the option's value.
_PARAMETERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "forward": ("forward_s", lambda text: quantity("forward", text, parse_seconds)),
    "idle": ("keep_idle", lambda how: how == "keep"),
    "transfer": ("known", Transfers),
}
_DEFAULTS = {"batch_size": 1, "idle": "keep"}
#: Options that apply only to the workload of one worker.
_OF_WORKLOAD = ("batch_size", "rank", "timeline", "cluster")


@dataclass(frozen=True)
class Chosen:
    """The options that say what to import from the traces."""

    name: str | None = setting(None, "Name of the workload.", show_default="the first file's")
    rank: int | None = setting(None, "Rank to import.", show_default="the slowest; chakra: the lowest")
    step: str | None = setting(None, "Step to import.", show_default="the step of median length")
    idle: Literal["keep", "drop"] = setting(
        "keep", "Whether op times keep or drop the time that a device waits for its host."
    )
    batch_size: int = setting(1, "Batch size to record in the workload.", min=1)
    transfer: list[str] | None = setting(None, f"{TRANSFER_HELP} (kineto).", metavar="PATTERN=COLLECTIVE")
    program: bool = setting(
        False,
        "Write a program of what all ranks compute and send, not one rank's workload (kineto, chakra).",
        "--program",
    )


@dataclass(frozen=True)
class OfSends:
    """The options that apply only to traces that list the messages sent (`send-trace`)."""

    forward: str | None = setting(None, "Duration of the forward pass, such as 176ms (send-trace).")
    worker: str | None = setting(None, "Worker to import (send-trace).", show_default="the first")
    after: str | None = setting(None, "Leave out gradients sent before this operation (send-trace).")
    drop: list[str] | None = setting(
        None, "Leave out parameters whose names match (send-trace); may be repeated.", metavar="REGEX"
    )


def import_(
    format: Annotated[str, typer.Argument(metavar="FORMAT", help=f"Format of the traces: {', '.join(FORMATS)}.")],
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES...", help="Traces of one job, or a folder of them; they may be compressed (.gz)."
        ),
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
            metavar="C.json", help="Fit the network to the all-reduces in the trace, and write it to this file."
        ),
    ] = None,
    chosen: Chosen,
    sends: OfSends,
    json: Json = False,
) -> None:
    """Turn traces of other tools into a workload, and list what the traces lack and what legato assumes.

    Example: [bold]legato import kineto worker0.pt.trace.json.gz worker1.pt.trace.json.gz -o job.json[/]
    """
    from legato.ingest.source import in_folders

    traces = in_folders(traces, note)
    keep_apart(traces, output=output, timeline=timeline, cluster=cluster)
    read, given = _reader(format, asdict(chosen) | asdict(sends) | {"timeline": timeline, "cluster": cluster})
    with progress("reading") as advance:
        found = read(traces, progress=advance, **given)
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
    from legato.cli.nouns.program import describe_program, program_values
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


def _reader(format: str, options: dict[str, Any]) -> tuple[Callable[..., Imported], dict[str, Any]]:
    """Return the function that reads this format, and the options as keyword arguments for this function.

    Raises `InputError` if the reader does not have one of the options.
    """
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    program = options.pop("program")
    if program and FORMATS[format].program is None:
        able = " or ".join(sorted((name for name, one in FORMATS.items() if one.program), reverse=True))
        raise InputError(f"--program does not apply to {format} (expected {able})")
    read, keywords = FORMATS[format].reader(program=program), dict[str, Any]()
    takes = signature(read).parameters
    for option, value in options.items():
        if value in (None, _DEFAULTS.get(option)):
            continue
        if program and option in _OF_WORKLOAD:
            raise InputError(f"--{option.replace('_', '-')} does not apply to --program")
        name, convert = _PARAMETERS.get(option, (option, lambda value: value))
        if name in takes:
            keywords[name] = convert(value)
        elif option != "batch_size" and not (option in _OF_WORKLOAD and "step" in takes):
            raise InputError(f"--{option} does not apply to {format}")
    return read, keywords


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
    """Print a line with the measurements of each rank's step."""
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
    """Print what a trace lacks, and what is assumed instead."""
    for missing in notes.missing:
        note(f"missing: {missing}")
    for assumed in notes.assumed:
        note(f"assumed: {assumed}")


def _described(job: Workload) -> str:
    return f"{shorten(job.name)}: {describe_size(job)}, {format_seconds(job.compute_s)} of computation"
