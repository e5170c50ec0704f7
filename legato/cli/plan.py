"""`legato plan`"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from legato.cli.axes import NO_SERVERS, Given, Kinds, axes
from legato.cli.nouns import wrapping
from legato.cli.options import (
    SCHEDULER_HELP,
    Compute,
    Json,
    Options,
    PlanOutput,
    PlanTimeline,
    Shard,
    ShardAll,
    Wire,
    keep_apart,
    quantity,
    scheduler_of,
    setting,
    split,
    taken_by,
)
from legato.cli.output import note, print_json, print_rows, progress
from legato.core import files
from legato.core.quantities import parse_bytes
from legato.core.text import count, percent
from legato.core.units import format_bytes, format_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.core.cluster import Cluster
    from legato.core.plan import Plan
    from legato.core.timeline import Timeline
    from legato.schedule.compare import Candidate

#: What plans send, in words, by `PlanKind.sends`.
_SENDS = {"all_reduces": "only all-reduces", "pairs": "also halves in pairs", "halves": "also other halves"}
_WHY_NOT_THE_FASTEST = (
    " (of the runnable plans within 0.5% of the fastest: DDP's, or else the one with the fewest messages)"
)


@dataclass(frozen=True)
class Planning(Kinds):
    """The options that choose the plans."""

    scheduler: str = setting("all", SCHEDULER_HELP)
    compute: Compute = "one"
    max_message: str | None = setting(
        None,
        "Do not merge tensors into messages larger than this, such as 1GiB. Schedulers that partition tensors also "
        "split larger tensors; all other schedulers send a larger tensor as one message.",
        metavar="SIZE",
        show_default="no limit",
    )
    wire: Wire = "none"


def _plan(
    path: Path,
    shard: Shard,
    /,
    network: Annotated[Given, axes("workers", "servers", "bandwidth", "latency", "reduce", servers=NO_SERVERS)],
    how: Planning,
    output: PlanOutput = None,
    timeline: PlanTimeline = None,
    check_bound: Annotated[
        bool,
        typer.Option(
            "--check-bound",
            help="Check the certificate of every lower bound in exact arithmetic.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Run schedulers to plan the messages of data-parallel training."""
    from legato.schedule.compare import best, check_bounds, compare

    keep_apart([path, *network.files], output=output, timeline=timeline)
    names = [] if how.scheduler == "all" else list(map(scheduler_of, split(how.scheduler)))
    most = None if how.max_message is None else quantity("max-message", how.max_message, parse_bytes)
    machines, job = how.machines(network), files.read(path, Workload)
    left_out: list[str] = []
    again = partial(
        compare,
        job,
        machines.cluster,
        collective=how.collective,
        compute=how.compute,
        max_message_bytes=most,
        shard=shard,
        wire=how.wire,
    )
    with progress("planning") as advance:
        found = again(
            names, progress=advance, left_out=lambda name, error: left_out.append(f"{name} is left out: {error}")
        )
    for line in left_out:
        note(line)
    if check_bound:
        with progress("checking the bounds") as advance:
            check_bounds(found, job, machines.cluster, compute=how.compute, progress=advance)
    chosen = best(found)
    if output is not None:
        files.write(output, chosen.plan)
    setting = machines.describe(how.collective) + ("" if shard == "none" else f", {shard} sharded")
    setting += "" if how.wire == "none" else f", gradients in {how.wire}"
    if timeline is not None:
        files.write(timeline, _beside_baseline(chosen, found, again, {"job": job.name, "network": setting}))
    rows = [candidate.columns | ({"bound_checked": True} if check_bound else {}) for candidate in found]
    if json:
        print_json(rows)
        return
    proved = " (proved in exact arithmetic)" if check_bound else ""
    print_rows(f"{job.name} on {setting}; {_least(chosen, found)}{proved}", rows, best=chosen.plan.scheduler)
    _note_all(found, chosen, job, machines.cluster, how, shard, most)
    if output is not None:
        fastest_s = min(row["iteration_s"] for row in rows)
        why = "" if chosen.iteration_s == fastest_s else _WHY_NOT_THE_FASTEST
        note(f"{chosen.plan.scheduler}{why} -> {output}")
    if timeline is not None:
        note(f"timeline -> {timeline} (legato report {timeline} -o report.html shows it)")


def plan(
    workload: Annotated[Path, typer.Argument(metavar="W.json", help="The workload to plan.")],
    options: Annotated[Options, taken_by(_plan, wrapping.plan)],
    shard: ShardAll = "none",
) -> None:
    """Plan the transfers of a workload and predict its iteration time.

    Example: [bold]legato plan resnet.json --workers 8 --bandwidth 10Gbit --scheduler all -o plan.json[/]
    """
    if shard == "parameters":
        options.run(wrapping.plan, workload, wrong="does not apply with --shard parameters")
    else:
        options.run(_plan, workload, shard, wrong=f"with --shard {shard} (expected --shard parameters)")


def _note_all(
    found: list[Candidate],
    chosen: Candidate,
    job: Workload,
    cluster: Cluster,
    how: Planning,
    shard: Shard,
    most: int | None,
) -> None:
    """Print the notes below the table of plans."""
    _note_simulated(found)
    _note_kinds(found)
    _note_collectives(found, how.collective or cluster.default_collective)
    if most is not None:
        _note_larger(found, job, most)
    if shard != "none":
        _note_memory(shard, job, cluster.workers)
    elif how.wire == "none":
        _note_stock_ddp(found, chosen, job, cluster, how)


def _beside_baseline(
    chosen: Candidate,
    found: list[Candidate],
    plan_others: Callable[[list[str]], list[Candidate]],
    where: dict[str, str],
) -> Timeline:
    """Return the timeline of the chosen plan, with DDP's timeline as its baseline.

    If `found` has no plan of DDP, `plan_others` makes one. With parameter servers, the baseline is the random order
    instead of DDP. `where` names the job and the network of both timelines.
    """
    name = "random" if chosen.plan.messages[0].kind in ("push", "pull") else "ddp"
    if chosen.plan.scheduler == name:
        return replace(chosen.timeline, **where)
    base = next((candidate for candidate in found if candidate.plan.scheduler == name), None)
    if base is None:
        (base,) = plan_others([name])
        note(f"{name} was planned too, to be drawn next to {chosen.plan.scheduler}")
    return replace(chosen.timeline, baseline=replace(base.timeline, **where), **where)


def _note_stock_ddp(found: list[Candidate], chosen: Candidate, job: Workload, cluster: Cluster, how: Planning) -> None:
    """Say whether stock DDP is good enough with its default buckets, or which other buckets make it faster."""
    from legato.schedule.compare import stock_buckets

    by_name = {candidate.plan.scheduler: candidate for candidate in found}
    ddp, merged = by_name.get("ddp"), by_name.get("merge-optimal")
    stock = None
    if merged is not None:
        stock = stock_buckets(merged, job, cluster, collective=how.collective, compute=how.compute)
    _note_buckets(ddp, stock, is_chosen=chosen is ddp and len(found) > 1)


def _note_memory(shard: str, job: Workload, workers: int) -> None:
    """Say how many bytes each worker saves; an optimizer state has 4 bytes for each element of a gradient."""
    saved = format_bytes(job.nbytes - job.nbytes / workers)
    gradients = f", and {saved} of gradients" if shard == "gradients" else ""
    note(
        f"each worker saves {saved} per state of the optimizer (Adam has two) if gradients have 4 bytes per element, "
        f"or twice as much if they have 2 bytes{gradients}"
    )


def _note_simulated(found: list[Candidate]) -> None:
    """Print the names of plans that can only be simulated."""
    names = [candidate.plan.scheduler for candidate in found if not candidate.runnable]
    if names:
        note(
            "can only be simulated, because they compute in another order or gather other slices than they reduce: "
            f"{', '.join(names)}"
        )


def _least(chosen: Candidate, found: list[Candidate]) -> str:
    """Say which time no plan can beat; without a bound for pairs of halves, say it only for plans of all-reduces."""
    if chosen.kind.sends != "all_reduces":
        return f"no plan can be faster than {format_seconds(chosen.bound.seconds)}"
    pairs = [c.bound.seconds for c in found if c.kind == chosen.kind._replace(sends="pairs")]
    if not pairs:
        return f"no plan of all-reduces can be faster than {format_seconds(chosen.bound.seconds)}"
    return f"no plan can be faster than {format_seconds(pairs[0])}"


def _note_kinds(found: list[Candidate]) -> None:
    """If the bounds of the plans differ, say which bound holds for which kind of plan."""
    bounds = {(c.kind.sends, c.kind.order): c.bound.seconds for c in found}
    if len(set(bounds.values())) > 1:
        parts = (
            f"{_SENDS[sends]}{' in any order of computation' if order == 'any' else ''} {format_seconds(seconds)}"
            for (sends, order), seconds in sorted(bounds.items(), key=lambda entry: -entry[1])
        )
        note(f"above bound: each plan is compared with the bound for what it sends: {', '.join(parts)}")


def _note_collectives(found: list[Candidate], default: str) -> None:
    """Name the plans that use other collectives than the collective in the title of the table."""
    for candidate in found:
        used = dict.fromkeys(message.collective or default for message in candidate.plan.messages)
        if candidate.plan.messages[0].kind not in ("push", "pull") and list(used) != [default]:
            names = " and ".join(used)
            note(f"{candidate.plan.scheduler} sends with {names}; --collective {default} allows only {default}")


def _note_larger(found: list[Candidate], job: Workload, most: int) -> None:
    """Name the plans that have messages above the limit, because they do not partition large tensors."""
    names = [c.plan.scheduler for c in found if any(message.nbytes > most for message in c.plan.messages)]
    if names:
        tensors = count(sum(tensor.nbytes > most for tensor in job.tensors), "tensor")
        note(
            f"{tensors} of more than {format_bytes(most)}: sent whole by {', '.join(names)}, which do not "
            "partition tensors"
        )


def _note_buckets(ddp: Candidate | None, stock: tuple[Plan, float] | None, *, is_chosen: bool) -> None:
    """Say which buckets stock DDP should use: its default buckets, or the buckets of `stock` (from merge-optimal)."""
    from legato.schedule.compare import SAME, better_buckets

    if ddp is not None and ddp.gap <= SAME:
        note(f"stay with DDP: with its default buckets it is predicted to be within {percent(SAME)} of the bound")
    elif ddp is not None and is_chosen:
        note(f"stay with DDP: no plan is predicted to be more than {percent(SAME)} faster than its default buckets")
    elif stock is not None:
        merged, merged_s = stock
        caps = better_buckets(ddp.iteration_s if ddp else math.inf, merged_s, merged)
        if caps:
            text = ", ".join(map(repr, caps))
            note(f"merge-optimal with stock DDP: DistributedDataParallel(model, bucket_cap_mb_list=[{text}])")
        else:
            least = percent(SAME)
            note(f"stock DDP: no other buckets are predicted to be more than {least} faster than the default ones")
