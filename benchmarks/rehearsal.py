"""Predicted and measured times, and legato and DDP, between shaped hosts on this machine.

    python benchmarks/rehearsal.py                       # ResNet-50, 4 hosts, 1 Gbit; ratios 0.5, 1 and 2
    python benchmarks/rehearsal.py --matrix              # every scheduler, model, bandwidth and number of hosts
    python benchmarks/rehearsal.py --matrix --minutes 30 # ... as much of it as half an hour allows

A cell is one rehearsal: the same processes measure all of its schedulers in turns,
in blocks, so its rows are a comparison within one run. A ratio is the time of
communication (all gradients in one message) divided by the time of computation;
`own` leaves the workload's times as they are. Cells are stored in the output file
as they are finished, with the part of the links' rate that large messages reached
(`carried`; headers leave 0.956 of the rate). A later run only measures what the
file lacks: other cells, and for stored cells other schedulers (together with DDP, in
a separate rehearsal). A table (.md) and a picture (.html) next to the output show
everything that the file has.

`--matrix` runs every scheduler on four models at ratio 1: on two hosts at 1, 2 and
5 Gbit, on four at 0.5, 1 and 2 Gbit, and on eight at 0.25, 0.5 and 1 Gbit. By the
predicted time of its iterations, that is 30 hours, or 6 with `--iterations 3`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rehearsal_picture import draw

from legato.core.cluster import Cluster
from legato.core.quantities import parse_bandwidth
from legato.core.text import percent
from legato.core.units import format_seconds
from legato.lab.testbed.rehearsal import Task, rehearse, select
from legato.zoo import workload

MODELS = "resnet-v1-50,inception-v3,vgg-16,gpt2"
#: By the number of hosts: all of them together send 2 to 10 Gbit.
LINKS = {"2": "1Gbit,2Gbit,5Gbit", "4": "500Mbit,1Gbit,2Gbit", "8": "250Mbit,500Mbit,1Gbit"}


class Cell(NamedTuple):
    """One rehearsal's conditions."""

    model: str
    hosts: int
    bandwidth: str
    ratio: str

    def __str__(self) -> str:
        return f"{self.model}, {self.hosts} hosts, {self.bandwidth}, ratio {self.ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet-v1-50")
    parser.add_argument("--hosts", default="4")
    parser.add_argument("--bandwidths", default="1Gbit")
    parser.add_argument("--ratios", default="0.5,1,2")
    parser.add_argument("--schedulers", default="ddp,merge-optimal,legato")
    parser.add_argument("--matrix", action="store_true", help="all of them, instead of the five above")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after this time")
    parser.add_argument("-o", "--output", type=Path, default=Path("rehearsal.json"))
    chosen = parser.parse_args()
    runs = json.loads(chosen.output.read_text()) if chosen.output.exists() else []
    until = time.monotonic() + 60 * chosen.minutes
    for cell, names in grid(chosen):
        there = {row["scheduler"] for run in runs if of(run) == cell for row in run["rows"]}
        missing = [name for name in names if name not in there]
        if missing and time.monotonic() < until:
            runs.append(cell._asdict() | measure(cell, missing, chosen.iterations))
            write(chosen.output, runs)
            show(runs[-1])
    write(chosen.output, runs)
    summarize(runs)


def grid(chosen: argparse.Namespace) -> Iterator[tuple[Cell, tuple[str, ...]]]:
    """The cells that are asked for, and their schedulers."""
    if chosen.matrix:
        places = [(hosts, rate) for hosts, rates in LINKS.items() for rate in rates.split(",")]
        models, ratios, names = MODELS, "1", select(["all"])
    else:
        places = list(itertools.product(chosen.hosts.split(","), chosen.bandwidths.split(",")))
        models, ratios, names = chosen.models, chosen.ratios, select(chosen.schedulers.split(","))
    for (hosts, rate), model, ratio in itertools.product(places, models.split(","), ratios.split(",")):
        yield Cell(model, int(hosts), rate, ratio), names


def of(run: dict[str, Any]) -> Cell:
    """Where it was measured."""
    return Cell(*(run[field] for field in Cell._fields))


def measure(cell: Cell, schedulers: Iterable[str], iterations: int) -> dict[str, Any]:
    task = Task(
        workload=workload(cell.model),
        schedulers=select(tuple(schedulers)),
        iterations=iterations,
        ratio=None if cell.ratio == "own" else float(cell.ratio),
    )
    found = rehearse(task, cell.hosts, parse_bandwidth(cell.bandwidth), lambda stage, done, total: None)
    cost = found.cluster.cost()
    line_s_per_byte = Cluster.derive(cell.hosts, parse_bandwidth(cell.bandwidth), 0.0).cost("ring").beta_s_per_byte
    return {
        "iterations": iterations,
        "compute_s": found.workload.compute_s,
        "cost": {"alpha_s": cost.alpha_s, "beta_s_per_byte": cost.beta_s_per_byte, "floor_s": cost.floor_s},
        "fit_error": found.fit_error,
        "carried": line_s_per_byte / cost.beta_s_per_byte,
        "rows": found.rows(),
    }


def write(output: Path, runs: list[dict[str, Any]]) -> None:
    """The runs, and beside them a table and a picture of them."""
    output.write_text(json.dumps(runs, indent=1) + "\n")
    output.with_suffix(".md").write_text(table(runs))
    draw(runs).write_html(output.with_suffix(".html"))


def table(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| model | hosts | link | ratio | plan | measured | predicted | against ddp | above the bound | messages |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        where = " | ".join(map(str, of(run)))
        lines += [
            f"| {where} | {row['scheduler']} | {format_seconds(row['measured_s'])} "
            f"| {format_seconds(row['predicted_s'])} ({percent(row['error'], signed=True)}) "
            f"| {row['speedup_over_ddp']:.2f}x "
            f"| {percent(row['measured_s'] / row['lower_bound_s'] - 1)} | {row['num_messages']} |"
            for row in sorted(run["rows"], key=lambda row: row["measured_s"])
        ]
    return "\n".join(lines) + "\n"


def show(run: dict[str, Any]) -> None:
    print(f"\n{of(run)}: computation {format_seconds(run['compute_s'])}, {run['carried']:.1%} of the link's rate")
    for row in sorted(run["rows"], key=lambda row: row["measured_s"]):
        print(
            f"  {row['scheduler']:20} measured {format_seconds(row['measured_s']):>8}  predicted "
            f"{format_seconds(row['predicted_s']):>8} ({percent(row['error'], signed=True)})  "
            f"{row['speedup_over_ddp']:.2f}x of ddp  "
            f"{percent(row['measured_s'] / row['lower_bound_s'] - 1)} above the bound  {row['num_messages']} messages",
            flush=True,
        )


def summarize(runs: list[dict[str, Any]]) -> None:
    rows = [row for run in runs for row in run["rows"]]
    if not rows:
        return
    print(f"\npredicted against measured, {len(rows)} rows: {errors(rows)}")
    for name in dict.fromkeys(row["scheduler"] for row in rows):
        print(f"  {name:20} {errors(row for row in rows if row['scheduler'] == name)}")
    ours = [row for row in rows if row["scheduler"] == "legato"]
    if ours:
        speedups = [row["speedup_over_ddp"] for row in ours]
        above = [row["measured_s"] / row["lower_bound_s"] - 1 for row in ours]
        print(
            f"legato over ddp: {min(speedups):.2f}x to {max(speedups):.2f}x; {max(above):.1%} above the bound at most"
        )


def errors(rows: Iterable[dict[str, Any]]) -> str:
    found = sorted((abs(row["error"]) for row in rows), reverse=True)
    return f"median {statistics.median(found):.1%}, worst {found[0]:.1%}"


if __name__ == "__main__":
    main()
