"""`legato advise`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cli.axes import Given, axes, note_machine
from legato.cli.options import TRANSFER_HELP, Json, check_file
from legato.cli.output import note, print_json, progress
from legato.cli.verdicts import as_json, print_verdict
from legato.core import files
from legato.core.cluster import Cluster
from legato.core.errors import InputError

if TYPE_CHECKING:
    from legato.ingest.traced import Imported


_Network = Annotated[
    Given,
    axes(
        "workers",
        "bandwidth",
        "latency",
        workers={"show_default": "the trace's", "min": 2},
        bandwidth={"show_default": "the trace's"},
        latency={"show_default": "30us with --bandwidth"},
    ),
]


def advise(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACES...",
            help="Traces of torch.profiler, one per rank of a job, or a folder of traces. They may be compressed (.gz) "
            "and accompanied by execution traces. A second trace of the same rank, or a trace with a different number "
            "of ranks, is assumed to show the same job after a change.",
        ),
    ],
    network: _Network,
    rank: Annotated[int | None, typer.Option(help="Rank to plan for.", show_default="the slowest")] = None,
    step: Annotated[
        str | None, typer.Option(help="Step to plan for.", show_default="the step of median length")
    ] = None,
    transfer: Annotated[list[str] | None, typer.Option(metavar="PATTERN=COLLECTIVE", help=f"{TRANSFER_HELP}.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="R.html", help="Write a report to this file.")
    ] = None,
    json: Json = False,
) -> None:
    """Show where the time of a traced job goes, and what a better plan would save.

    The cost of the network is fitted to the collectives in the traces, unless options describe the network.

    Example: [bold]legato advise rank0.pt.trace.json.gz rank1.pt.trace.json.gz[/]
    """
    from legato.advice import of_traces
    from legato.pages import report

    check_file("output", output, ".html")
    with progress("reading") as advance:
        verdict = of_traces(
            traces,
            cluster=lambda job: _network(job, network),
            workers=network.axes.get("workers"),
            rank=rank,
            step=step,
            transfer=transfer or (),
            say=note,
            progress=advance,
        )
    if output is not None:
        report(verdict, path=output)
    if json:
        print_json(as_json(verdict))
        return
    note_machine(network.machine())
    print_verdict(verdict)
    if output is not None:
        note(f"-> {output}")


def _network(job: Imported, given: Given) -> Cluster | None:
    """Return the network that the options describe, or None to use the network of the trace."""
    given.refuse_beside_file()
    if given.file is not None:
        return files.read(given.file, Cluster)
    workers, bandwidth, latency = (given.axes.get(name) for name in ("workers", "bandwidth", "latency"))
    if bandwidth is None and latency is not None and given.name is None:
        raise InputError("--latency without --bandwidth (expected both or neither)")
    if bandwidth is None and given.name is None:
        return None
    count = workers or job.replicas
    if count is None or count < 2:
        raise InputError("the trace does not show the number of workers (expected --workers)")
    return given.replace(workers=count).machines().cluster
