"""How much slower MG-WFBP's Algorithm 1 is than the exact optimum of its own problem, on the papers' models.

python benchmarks/merging.py
"""

from __future__ import annotations

import itertools

from schedulers import GIGABITS, LATENCY_S, MODELS, WORKERS

from legato.core.cluster import Cluster
from legato.schedule import schedule
from legato.simulator.collective import iteration_time
from legato.zoo import workload


def main() -> None:
    losses = []
    for name in MODELS:
        job = workload(name)
        for gigabits, workers, collective in itertools.product(GIGABITS, WORKERS, ("ring", "halving-doubling")):
            cluster = Cluster.derive(workers, gigabits * 1e9, LATENCY_S, collectives=[collective])
            greedy, exact = (
                iteration_time(job, schedule(name, job, cluster), cluster) for name in ("mg-wfbp", "merge-optimal")
            )
            losses.append((greedy / exact - 1, f"{name}, {gigabits} Gbit, {workers} workers, {collective}"))
    losses.sort(reverse=True)
    slower = sum(loss > 1e-9 for loss, _ in losses)
    print(f"slower in {slower / len(losses):.0%} of {len(losses)} cells, by over 1% in", end=" ")
    print(f"{sum(loss > 0.01 for loss, _ in losses)}; {sum(loss for loss, _ in losses) / len(losses):.1%} on average")
    for loss, where in losses[:5]:
        print(f"  {loss:5.1%}  {where}")


if __name__ == "__main__":
    main()
