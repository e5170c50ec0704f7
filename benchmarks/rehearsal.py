"""Predicted against measured, and legato against DDP, between shaped hosts on this machine.

    python benchmarks/rehearsal.py                       # ResNet-50, 4 hosts, 1 Gbit; ratios 0.5, 1 and 2
    python benchmarks/rehearsal.py --models resnet-v1-50,vgg-16 --hosts 2,4 --schedulers all --ratios own

Every cell is one rehearsal: all of its schedulers are measured in turns, in
blocks, by the same processes, so that each row is a comparison inside one run.
A ratio is that of communication (all gradients in one message) to computation;
`own` leaves the workload's times as they are. Cells are kept in the output
file as they are finished; those that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from legato.core.units import format_seconds, parse_bandwidth
from legato.testbed.rehearsal import Task, rehearse, select
from legato.zoo import workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet-v1-50")
    parser.add_argument("--hosts", default="4")
    parser.add_argument("--bandwidths", default="1Gbit")
    parser.add_argument("--ratios", default="0.5,1,2")
    parser.add_argument("--schedulers", default="ddp,merge-optimal,legato")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path, default=Path("rehearsal.json"))
    chosen = parser.parse_args()
    cells = json.loads(chosen.output.read_text()) if chosen.output.exists() else []
    grid = itertools.product(*(getattr(chosen, k).split(",") for k in ("models", "hosts", "bandwidths", "ratios")))
    for model, hosts, bandwidth, ratio in grid:
        key = {"model": model, "hosts": int(hosts), "bandwidth": bandwidth, "ratio": ratio}
        if not any({k: cell[k] for k in key} == key for cell in cells):
            cells.append(key | measure(model, int(hosts), bandwidth, ratio, chosen.schedulers, chosen.iterations))
            chosen.output.write_text(json.dumps(cells, indent=1) + "\n")
        show(next(cell for cell in cells if {k: cell[k] for k in key} == key))
    summarize(cells)


def measure(model: str, hosts: int, bandwidth: str, ratio: str, schedulers: str, iterations: int) -> dict[str, Any]:
    task = Task(
        workload=workload(model),
        schedulers=select(schedulers.split(",")),
        iterations=iterations,
        ratio=None if ratio == "own" else float(ratio),
    )
    found = rehearse(task, hosts, parse_bandwidth(bandwidth), lambda stage, done, total: None)
    cost = found.cluster.cost()
    return {
        "compute_s": found.workload.compute_s,
        "cost": {"alpha_s": cost.alpha_s, "beta_s_per_byte": cost.beta_s_per_byte, "floor_s": cost.floor_s},
        "fit_error": found.fit_error,
        "rows": found.rows(),
    }


def show(cell: dict[str, Any]) -> None:
    where = f"{cell['model']}, {cell['hosts']} hosts, {cell['bandwidth']}, ratio {cell['ratio']}"
    print(f"\n{where}: computation {format_seconds(cell['compute_s'])}")
    for row in sorted(cell["rows"], key=lambda row: row["measured_s"]):
        print(
            f"  {row['scheduler']:20} measured {format_seconds(row['measured_s']):>8}  predicted "
            f"{format_seconds(row['predicted_s']):>8} ({row['error']:+.1%})  {row['speedup_over_ddp']:.2f}x of ddp  "
            f"{row['measured_s'] / row['lower_bound_s'] - 1:+.1%} above the bound  {row['num_messages']} messages",
            flush=True,
        )


def summarize(cells: list[dict[str, Any]]) -> None:
    rows = [row for cell in cells for row in cell["rows"]]
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
