"""Every scheduler on the grid of models, bandwidths, workers and collectives: who wins where, and how near the bound.

    python benchmarks/schedulers.py [--quick] [-o grid.json] [--picture grid.svg]

Per cell: the bound, our gap to it, the best of the others and its gap, DDP's gap, and our planning time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grid_picture import draw

from legato.core.cluster import Cluster
from legato.core.workload import Workload
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.bound.lower_bound import kind_of, lower_bound
from legato.simulator.collective import iteration_time
from legato.zoo import workload as model

MODELS = (
    *("vgg-16", "resnet-v1-50", "resnet-v2-152", "inception-v3", "alexnet-v2", "googlenet"),
    *("seq2seq", "transformer", "bert-base", "gpt2", "gpt2-xl"),
)
GIGABITS = (1, 3, 10, 25, 100)
WORKERS = (4, 8, 64, 512)
COLLECTIVES = {"ring": ["ring"], "halving-doubling": ["halving-doubling"], "best": ["ring", "halving-doubling"]}
LATENCY_S = 30e-6


def cell(job: Workload, cluster: Cluster, budget_s: float) -> dict[str, Any]:
    """One cell of the grid; `budget_s` is legato's."""
    seconds = {}
    planning = {}
    plans = {}
    for name in SCHEDULERS:
        start = time.perf_counter()
        options = {"any_order": True, "budget_s": budget_s} if name == "legato" else {}
        plan = plans[name] = schedule(name, job, cluster, **options)
        planning[name] = time.perf_counter() - start
        seconds[name] = iteration_time(job, plan, cluster)
    order, all_reduce_only = kind_of(plans["legato"], job)
    bound = lower_bound(job, cluster, order=order, all_reduce_only=all_reduce_only).seconds
    others = {name: s for name, s in seconds.items() if name != "legato"}
    best = min(others, key=others.__getitem__)
    return {
        "bound_s": bound,
        "order": order,
        "gap": seconds["legato"] / bound - 1,
        "best_other": best,
        "over_best_other": others[best] / seconds["legato"],
        "over_ddp": seconds["ddp"] / seconds["legato"],
        "plan_s": planning["legato"],
        "seconds": seconds,
    }


def grid(quick: bool, budget_s: float) -> Iterator[tuple[tuple[str, int, int, str], dict[str, Any]]]:
    models = MODELS[:3] if quick else MODELS
    for name in models:
        job = model(name)
        for gigabits, workers, label in itertools.product(GIGABITS, WORKERS, COLLECTIVES):
            cluster = Cluster.derive(workers, gigabits * 1e9, LATENCY_S, collectives=COLLECTIVES[label])
            yield (name, gigabits, workers, label), cell(job, cluster, budget_s)


def summarise(cells: list[dict[str, Any]]) -> None:
    """The whole grid in a few lines."""
    over_ddp, over_other, planning = ([c[key] for c in cells] for key in ("over_ddp", "over_best_other", "plan_s"))
    print(f"{len(cells)} cells; slower than another scheduler in {sum(ratio < 1 - 1e-9 for ratio in over_other)}")
    rings = [c for c in cells if c["collective"] == "ring" and c["workers"] >= 64]
    parts = {
        "all": cells,
        "all but rings of 64 and more workers": [c for c in cells if c not in rings],
        "plans in the captured order of computation": [c for c in cells if c["order"] == "captured"],
        "plans in another": [c for c in cells if c["order"] == "any"],
    }
    for name, part in parts.items():
        gaps = sorted(c["gap"] for c in part)
        near = [sum(gap <= limit for gap in gaps) / len(gaps) for limit in (0.01, 0.03)]
        print(
            f"gap, {name} ({len(gaps)} cells): median {abs(statistics.median(gaps)):.2%}, worst {gaps[-1]:.2%}; "
            f"at most 1% in {near[0]:.1%}, 3% in {near[1]:.1%}"
        )
    print(f"faster than ddp: median {statistics.median(over_ddp):.2f}x, most {max(over_ddp):.2f}x")
    print(f"faster than the best other: median {statistics.median(over_other):.3f}x, most {max(over_other):.2f}x")
    print(f"planning: median {statistics.median(planning):.2f} s, most {max(planning):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="three models only")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds that legato may take for a cell")
    parser.add_argument("-o", "--output", help="write all cells to this JSON file")
    parser.add_argument("--picture", help="draw all cells to this SVG file")
    parser.add_argument("--of", metavar="GRID.JSON", help="only draw, what -o has written")
    options = parser.parse_args()
    if options.of:
        Path(options.picture).write_text(draw(json.loads(Path(options.of).read_text())), encoding="utf-8")
        return
    cells: list[dict[str, Any]] = []
    for (name, gigabits, workers, label), found in grid(options.quick, options.budget):
        cells.append({"model": name, "gigabits": gigabits, "workers": workers, "collective": label, **found})
        print(
            f"{name:14} {gigabits:4} Gbit {workers:4} {label:16} gap {found['gap']:7.2%}  "
            f"best other {found['best_other']:13} {found['over_best_other']:.3f}x  "
            f"ddp {found['over_ddp']:.3f}x  {found['plan_s']:.2f} s",
            flush=True,
        )
    summarise(cells)
    if options.output:
        Path(options.output).write_text(json.dumps(cells), encoding="utf-8")
    if options.picture:
        Path(options.picture).write_text(draw(cells), encoding="utf-8")
    if any(c["over_best_other"] < 1 - 1e-9 for c in cells):
        sys.exit("legato was slower than another scheduler")


if __name__ == "__main__":
    main()
