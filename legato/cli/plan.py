"""`legato plan`"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cli.options import (
    SCHEDULER_HELP,
    Bandwidth,
    ClusterFile,
    Collective,
    Compute,
    Json,
    Latency,
    Reduce,
    Servers,
    Workers,
    machines_of,
    split,
)
from legato.cli.output import note, print_json, print_rows, progress
from legato.core import files
from legato.core.units import format_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.schedule.compare import Candidate

_WHY_NOT_THE_FASTEST = " (of the runnable plans within 0.5% of the fastest: DDP's, or else that of the fewest messages)"


def plan(
    workload: Annotated[Path, typer.Argument(metavar="W.json", help="The workload to plan.")],
    scheduler: Annotated[str, typer.Option(help=SCHEDULER_HELP)] = "all",
    cluster: ClusterFile = None,
    workers: Workers = None,
    servers: Servers = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    reduce: Reduce = None,
    collective: Collective = None,
    compute: Compute = "one",
    any_order: Annotated[
        bool,
        typer.Option(
            "--any-order",
            help="Let `legato` plan any order of computation, also one that can only be simulated. "
            "In the graphs of a compiled model it plans any order anyway.",
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="P.json", help="Write the best plan to this file.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="T.json", help="Write the best plan's predicted timeline to this file.")
    ] = None,
    check_bound: Annotated[
        bool,
        typer.Option(
            "--check-bound",
            help="Prove every lower bound again, from its certificate, in exact arithmetic. This takes a second "
            "or two, and up to a minute where each message costs a large part of the iteration.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Plan the transfers of a workload and predict its iteration time.

    Example: [bold]legato plan resnet.json --workers 8 --bandwidth 10Gbit --scheduler all -o plan.json[/]
    """
    from legato.schedule.compare import best, check_bounds, compare

    names = [] if scheduler == "all" else split(scheduler)
    machines = machines_of(cluster, workers, bandwidth, latency, reduce, collective, servers)
    job = files.read(workload, Workload)
    left_out: list[str] = []
    with progress("planning") as advance:
        found = compare(
            job,
            machines.cluster,
            names,
            collective=collective,
            compute=compute,
            any_order=any_order,
            progress=advance,
            left_out=lambda name, error: left_out.append(f"{name} is left out: {error}"),
        )
    for line in left_out:
        note(line)
    if check_bound:
        with progress("checking the bounds") as advance:
            check_bounds(found, job, machines.cluster, compute=compute, progress=advance)
    chosen = best(found)
    if output is not None:
        files.write(output, chosen.plan)
    if timeline is not None:
        files.write(timeline, chosen.timeline)
    rows = [candidate.row() | ({"bound_checked": True} if check_bound else {}) for candidate in found]
    if json:
        print_json(rows)
        return
    bound, proved = format_seconds(chosen.bound.seconds), " (proved in exact arithmetic)" if check_bound else ""
    print_rows(f"{job.name} on {machines.describe(collective)}; no plan can be faster than {bound}{proved}", rows)
    _note_simulated(found)
    _note_collectives(found, collective or machines.cluster.default_collective)
    _note_buckets({candidate.plan.scheduler: candidate for candidate in found}, chosen)
    if output is not None:
        why = "" if chosen.iteration_s == min(row["iteration_s"] for row in rows) else _WHY_NOT_THE_FASTEST
        note(f"{chosen.plan.scheduler}{why} -> {output}")


def _note_simulated(found: list[Candidate]) -> None:
    """Name the plans that can only be simulated."""
    names = [candidate.plan.scheduler for candidate in found if not candidate.runnable]
    if names:
        note(f"only simulated, because they compute in another order or gather other messages: {', '.join(names)}")


def _note_collectives(found: list[Candidate], default: str) -> None:
    """Name the plans that send with other collectives than the one in the title."""
    for candidate in found:
        used = dict.fromkeys(message.collective or default for message in candidate.plan.messages)
        if candidate.plan.messages[0].kind not in ("push", "pull") and list(used) != [default]:
            names = " and ".join(used)
            note(f"{candidate.plan.scheduler} sends with {names}; --collective {default} allows only {default}")


def _note_buckets(found: dict[str, Candidate], chosen: Candidate) -> None:
    """Say what stock DDP can do: keep its default buckets, or take those of merge-optimal."""
    from legato.schedule.compare import SAME, better_buckets

    ddp, merged = found.get("ddp"), found.get("merge-optimal")
    if ddp is not None and ddp.gap <= SAME:
        note(f"stay with DDP: with its default buckets it is predicted to be within {SAME:.1%} of the bound")
    elif ddp is not None and chosen is ddp and len(found) > 1:
        note(f"stay with DDP: no plan is predicted to be more than {SAME:.1%} faster than its default buckets")
    elif merged is not None:
        caps = better_buckets(ddp.iteration_s if ddp else math.inf, merged.iteration_s, merged.plan)
        if caps:
            text = ", ".join(map(repr, caps))
            note(f"merge-optimal with stock DDP: DistributedDataParallel(model, bucket_cap_mb_list=[{text}])")
        else:
            note(f"stock DDP: no other buckets are predicted to be more than {SAME:.1%} faster than the default ones")
