"""Gain of each module of the planner: plans with the module, compared with plans without it.

    python benchmarks/ablation.py [--every 13] [--grids zoo,random,captured,sharded,compiled]

For each grid and module, it prints in how many cells the plan without the module is slower (by more than a part in
10**6), how much slower it is on average and in the worst cell, and how the time of planning changes without the module.
The grids are the two of `schedulers.py`, three small models that are captured here (with optimizer ops), the zoo with a
sharded optimizer, and the zoo as compiled models, whose nodes may be reordered. A module is not worth its lines if it
makes plans of models less than 0.1% faster on average, and plans of random networks less than 0.2%.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fabrics import captured
from schedulers import random_grid, zoo_grid

from legato.core.cluster import Cluster
from legato.core.workload import Workload
from legato.lab.testbed.graphs import with_nodes
from legato.schedule import schedule
from legato.simulator.collective import iteration_time

Cell = tuple[Workload, Cluster, dict[str, Any]]
SEARCH = "legato.schedule.search."
#: What stands in for a module that is left out, by the name under which its user imports it.
MODULES: dict[str, dict[str, Any]] = {
    "nested_messages": {
        SEARCH + "message_search.nested_messages": lambda instance: instance.fill([sum(instance.nbytes)])
    },
    "search for messages": {SEARCH + "message_search._Search": lambda *_: SimpleNamespace(run=lambda *_: [])},
    "paired_halves": {SEARCH + "legato.pair_halves": lambda *_: None},
    "op_orders": {SEARCH + "op_orders.promising_orders": lambda *_, **__: []},
}
NONE = 1e-6


def captured_grid() -> Iterator[Cell]:
    """Networks on which the gradients take half as long as the computation, as long, and twice as long."""
    for job in captured():
        for ratio, latency_s, workers in itertools.product((0.5, 1, 2), (30e-6, 300e-6), (4, 64)):
            bandwidth_bps = 2 * 8 * job.nbytes / (ratio * job.compute_s)
            yield job, Cluster.derive(workers, bandwidth_bps, latency_s, collectives=["ring"]), {}


GRIDS: dict[str, Callable[[], Iterator[Cell]]] = {
    "zoo": lambda: ((job, cluster, {}) for _, job, cluster in zoo_grid(False)),
    "random": lambda: ((job, cluster, {}) for _, job, cluster in random_grid(False)),
    "captured": captured_grid,
    "sharded": lambda: ((job, cluster, {"shard": "optimizer"}) for _, job, cluster in zoo_grid(False)),
    "compiled": lambda: ((with_nodes(job), cluster, {}) for _, job, cluster in zoo_grid(False)),
}


def plans(cells: list[Cell], off: dict[str, Any]) -> tuple[list[float], float]:
    """The seconds of the iterations that are planned, and of all planning."""
    patches = [patch(name, put) for name, put in off.items()]
    for each in patches:
        each.start()
    try:
        start = time.process_time()
        found = [schedule("legato", job, cluster, limit_s=600.0, **more) for job, cluster, more in cells]
        took = time.process_time() - start
    finally:
        for each in patches:
            each.stop()
    return [iteration_time(job, plan, cluster) for plan, (job, cluster, _) in zip(found, cells, strict=True)], took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=13, help="only every k-th cell of the large grids")
    parser.add_argument("--grids", default=",".join(GRIDS))
    parser.add_argument("--modules", default=",".join(MODULES))
    chosen = parser.parse_args()
    for grid in chosen.grids.split(","):
        cells = list(GRIDS[grid]())
        cells = cells[:: chosen.every if len(cells) > 100 else 1]
        plans(cells[:1], {})  # what is compiled on first use
        best, all_s = plans(cells, {})
        print(f"\n{grid}: {len(cells)} cells, planned in {all_s:.1f} s")
        print(f"{'without':22}{'slower':>8}{'mean':>10}{'worst':>8}{'planning':>10}")
        for name in chosen.modules.split(","):
            seconds, took_s = plans(cells, MODULES[name])
            slower = [s / least - 1 for s, least in zip(seconds, best, strict=True)]
            print(
                f"{name:22}{sum(s > NONE for s in slower):>8}{statistics.mean(slower):>10.3%}{max(slower):>8.2%}"
                f"{took_s / all_s - 1:>+10.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
