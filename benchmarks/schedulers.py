"""Every scheduler on two grids: which is fastest where, and how close to the bound.

    python benchmarks/schedulers.py [--quick] [--grids zoo] [-o grids.json] [--picture grid.svg]

The first grid combines the zoo's models with bandwidths, numbers of workers and collectives. The second grid combines
random layered networks with latencies and numbers of workers. For each cell, the benchmark finds legato's gap to the
bound, the time of planning, and the gain over DDP and over the best other scheduler whose plan can be run (p3 is also
tried with its best size of slices). A plan of all-reduces is compared with the bound for all-reduces, and also with the
bound for all plans that can be run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grid_picture import draw
from random_nets import layered_net

from legato.core.cluster import Cluster
from legato.core.workload import Workload
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.basics.compose import is_runnable
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.bound.plan_kind import kind_of
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
LATENCIES_S = (1e-6, 30e-6, 300e-6, 1e-3)
NETS = 24
#: legato stops when it is as near to the bound as this.
GAP = 0.005


def cell(job: Workload, cluster: Cluster) -> dict[str, Any]:
    """One cell of a grid: legato's plan that can be run, and the one that may compute in any order."""
    seconds: dict[str, float] = {}
    found: dict[str, Any] = {"seconds": seconds}
    for name in SCHEDULERS:
        start = time.perf_counter()
        plan = schedule(name, job, cluster)
        if name == "legato":
            kind = kind_of(plan, job)
            bound = lower_bound(job, cluster, **kind._asdict()).seconds
            took = iteration_time(job, plan, cluster)
            found |= {
                "bound_s": bound, "gap": took / bound - 1, "taken_s": took, "plan_s": time.perf_counter() - start,
                "gap_of_pairs": took / lower_bound(job, cluster, sends="pairs").seconds - 1,
            }  # fmt: skip
        elif is_runnable(plan, job):
            seconds[name] = iteration_time(job, plan, cluster)
    slices = (max(16, int(job.nbytes / 2 ** (k / 2)) // 16 * 16) for k in range(1, 21))
    seconds["p3, best slices"] = min(
        iteration_time(job, schedule("p3", job, cluster, slice_bytes=nbytes), cluster) for nbytes in slices
    )
    best = min(seconds, key=seconds.__getitem__)
    mine = found["taken_s"]
    found |= {"best_other": best, "over_best_other": seconds[best] / mine, "over_ddp": seconds["ddp"] / mine}
    return found


def zoo_grid(quick: bool) -> Iterator[tuple[dict[str, Any], Workload, Cluster]]:
    for name in MODELS[:3] if quick else MODELS:
        job = model(name)
        for gigabits, workers, label in itertools.product(GIGABITS, WORKERS, COLLECTIVES):
            cluster = Cluster.derive(workers, gigabits * 1e9, LATENCY_S, collectives=COLLECTIVES[label])
            yield {"model": name, "gigabits": gigabits, "workers": workers, "collective": label}, job, cluster


def random_grid(quick: bool) -> Iterator[tuple[dict[str, Any], Workload, Cluster]]:
    """Random layered networks, at rates at which their gradients travel about as long as they compute."""
    for seed in range(6 if quick else NETS):
        job, rng = layered_net(seed), random.Random(seed)
        for latency_s, workers in itertools.product(LATENCIES_S, (2, 16, 256, 4096)):
            label, gigabits = rng.choice(list(COLLECTIVES)), round(10 ** rng.uniform(0.3, 2), 1)
            cluster = Cluster.derive(workers, gigabits * 1e9, latency_s, collectives=COLLECTIVES[label])
            name = {"model": job.name, "gigabits": gigabits, "workers": workers, "collective": label}
            yield name | {"latency_s": latency_s}, job, cluster


def summarise(cells: list[dict[str, Any]]) -> bool:
    """A grid in a few lines; returns whether legato was slower than another scheduler."""
    slower = sum(c["over_best_other"] < 1 - 1e-9 and c["gap"] > GAP for c in cells)
    print(f"{len(cells)} cells:")
    for key, label in (("gap", "gap"), ("gap_of_pairs", "gap to the bound for all plans that can be run")):
        print(f"  {label}: {spread(sorted(c[key] for c in cells))}")
    over_ddp, over_other, planning = ([c[key] for c in cells] for key in ("over_ddp", "over_best_other", "plan_s"))
    print(f"  over ddp: median {statistics.median(over_ddp):.2f}x, most {max(over_ddp):.2f}x")
    print(
        f"  over the best other: median {statistics.median(over_other):.3f}x, most {max(over_other):.2f}x, "
        f"least {min(over_other):.3f}x; slower in {slower}, except plans within {GAP:.1%} of the bound"
    )
    print(f"  planning: median {statistics.median(planning):.2f} s, most {max(planning):.2f} s")
    return slower > 0


def spread(gaps: list[float]) -> str:
    near = [sum(gap <= limit for gap in gaps) / len(gaps) for limit in (0.01, 0.03)]
    return (
        f"median {abs(statistics.median(gaps)):.2%}, at most 1% in {near[0]:.1%}, 3% in {near[1]:.1%}, "
        f"worst {gaps[-1]:.2%}"
    )


def picture(cells: list[dict[str, Any]]) -> str:
    """The plans of the zoo's cells."""
    return draw([c | {"seconds": c["seconds"] | {"legato": c["taken_s"]}} for c in cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three models, six networks")
    parser.add_argument("--grids", default=",".join(GRIDS), help="zoo, random or both")
    parser.add_argument("-o", "--output", help="write all cells to this JSON file")
    parser.add_argument("--picture", help="draw the cells of the zoo to this SVG file")
    parser.add_argument("--of", metavar="GRID.JSON", help="only draw, what -o has written")
    options = parser.parse_args()
    if options.of:
        Path(options.picture).write_text(picture(json.loads(Path(options.of).read_text())["zoo"]), encoding="utf-8")
        return
    grids: dict[str, list[dict[str, Any]]] = {}
    for name in options.grids.split(","):
        cells = grids[name] = []
        for where, job, cluster in GRIDS[name](options.quick):
            cells.append(where | cell(job, cluster))
            run = cells[-1]
            latency_s = where.get("latency_s", LATENCY_S)
            print(
                f"{where['model']:14} {where['gigabits']:5} Gbit {latency_s * 1e6:4.0f} us {where['workers']:4} "
                f"{where['collective']:16} "
                f"gap {run['gap']:6.2%}  "
                f"best other {run['best_other']:15} {run['over_best_other']:.3f}x  "
                f"ddp {run['over_ddp']:.3f}x  {run['plan_s']:.2f} s",
                flush=True,
            )
    if options.output:
        Path(options.output).write_text(json.dumps(grids), encoding="utf-8")
    if options.picture:
        Path(options.picture).write_text(picture(grids["zoo"]), encoding="utf-8")
    slower = False
    for name, cells in grids.items():
        print(f"\n{name}")
        slower |= summarise(cells)
    if slower:
        sys.exit("legato was slower than another scheduler")


GRIDS = {"zoo": zoo_grid, "random": random_grid}

if __name__ == "__main__":
    main()
