"""Seconds of planning: every scheduler, the bound and one simulation, for a model of many tensors.

    python benchmarks/planning.py [tensors]

Medians of several runs in this process; `import legato` and `legato plan` are processes of their own.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from legato.core.cluster import Cluster
from legato.core.files import write
from legato.core.units import format_seconds
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import SCHEDULERS, SERVER_SCHEDULERS, schedule
from legato.schedule.basics.jackson import jackson
from legato.schedule.bound.check import verify_bound
from legato.schedule.bound.lower_bound import lower_bound
from legato.simulator.collective import iteration_time, simulate

RUNS = 9


def chain(tensors: int, seed: int = 0) -> Workload:
    """A chain of layers, a tensor each: three ops a layer, sizes from bytes to megabytes, about 1.3 s for 1,000."""
    draw = random.Random(seed)
    n = tensors
    ops = [Op(f"forward{i}", "forward", draw.expovariate(2400), (i - 1,) if i else ()) for i in range(n)]
    ops += [Op(f"backward{i}", "backward", draw.expovariate(1200), (n + i - 1,)) for i in range(n)]
    ops += [Op(f"update{i}", "optimizer", draw.expovariate(1e5), (2 * n - 1 - i,)) for i in range(n)]
    gradients = (
        Tensor(f"weight{i}", 4 * (1 + int(draw.lognormvariate(10, 3)) % 2**22), 2 * n - 1 - i, (i, 2 * n + i))
        for i in reversed(range(n))
    )
    return Workload("chain", tuple(ops), tuple(gradients))


def branching(ops: int, tensors: int, seed: int = 0) -> Workload:
    """Forward ops that join results of up to 100 ops before, so that nearly every one needs another set of tensors."""
    draw, half = random.Random(seed), ops // 2
    deps = [tuple({max(0, i - draw.randint(1, 100)) for _ in range(2)}) if i else () for i in range(half)]
    forward = [Op(f"forward{i}", "forward", draw.expovariate(1200), deps[i]) for i in range(half)]
    backward = [Op(f"backward{i}", "backward", draw.expovariate(1200), (half + i - 1,)) for i in range(ops - half)]
    parameters = (
        Tensor(f"weight{t}", 4 * draw.randint(1, 10**6), ops - 1 - t, (draw.randrange(half),)) for t in range(tensors)
    )
    return Workload("branching", (*forward, *backward), tuple(parameters))


def branches(ops: int = 5000, tensors: int = 400, seed: int = 0) -> Workload:
    """A DAG: every op depends on one or two of the last few of its pass; tensors at random places of it."""
    draw = random.Random(seed)
    half = ops // 2
    near = [tuple({max(0, i - draw.randint(1, 8)) for _ in range(2)}) if i else () for i in range(half)]
    all_ops = [Op(f"forward{i}", "forward", draw.expovariate(5000), near[i]) for i in range(half)]
    all_ops += [
        Op(f"backward{i}", "backward", draw.expovariate(2500), tuple(half + k for k in near[i]) or (half - 1,))
        for i in range(half)
    ]
    places = sorted(draw.sample(range(half), tensors))
    gradients = (
        Tensor(f"weight{k}", 4 * (1 + int(draw.lognormvariate(10, 3)) % 2**22), half + k, (half - 1 - k,))
        for k in places
    )
    return Workload("branches", tuple(all_ops), tuple(gradients))


def preemptive_optimum(tensors: int) -> Callable[[], object]:
    """PACE's scheduling problem (section IV) for so many tensors, each released at a moment of its own."""
    draw = random.Random(0)
    release, processing, tail = ([draw.random() * scale for _ in range(tensors)] for scale in (1.0, 2 / tensors, 1.0))
    return lambda: jackson(release, processing, tail)


def median_s(work: Callable[[], object], runs: int = RUNS) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    tensors = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    workload, cluster = chain(tensors), Cluster.derive(8, 10e9, 30e-6)
    print(f"{tensors} tensors, {len(workload.ops)} ops, {len(cluster.collectives)} collectives, medians of {RUNS}")
    bound = lower_bound(workload, cluster)
    print(f"{'':28}{'planning':>10}{'messages':>10}{'iteration':>11}{'gap':>8}")
    for name in SCHEDULERS:
        plan = schedule(name, workload, cluster)
        seconds = median_s(lambda name=name: schedule(name, workload, cluster))  # type: ignore[misc]
        iteration_s = iteration_time(workload, plan, cluster)
        gap = iteration_s / bound.seconds - 1
        print(
            f"{name:28}{format_seconds(seconds):>10}{len(plan.messages):>10}{format_seconds(iteration_s):>11}{gap:>8.1%}"
        )
    dag = branches()
    others = [name for name in SCHEDULERS if name != "legato"]
    plan = schedule("fifo", workload, cluster)
    works: dict[str, Callable[[], object]] = {
        "PACE's optimum, 100,000": preemptive_optimum(100_000),
        "all but legato, 5,000 ops": lambda: [schedule(name, dag, cluster) for name in others],
        "legato, 5,000 ops": lambda: schedule("legato", dag, cluster),
        "lower_bound": lambda: lower_bound(workload, cluster),
        "lower_bound, any order": lambda: lower_bound(workload, cluster, order="any"),
        "lower_bound, unlimited": lambda: lower_bound(workload, cluster, compute="unlimited"),
        "verify_bound": lambda: verify_bound(bound, workload, cluster),
        "iteration_time of fifo": lambda: iteration_time(workload, plan, cluster),
        "simulate fifo": lambda: simulate(workload, plan, cluster),
    }
    for what, work in works.items():
        print(f"{what:28}{format_seconds(median_s(work)):>10}")
    joined, servers = branching(5000, 400), Cluster.derive(8, 10e9, 30e-6, servers=2)
    for name in SERVER_SCHEDULERS:
        seconds = median_s(lambda name=name: schedule(name, joined, servers))  # type: ignore[misc]
        print(f"{name + ', 5,000 ops, 400 tensors':34}{format_seconds(seconds):>10}")
    for module in ("legato", "legato.schedule.bound.lower_bound"):
        command = [
            sys.executable,
            "-c",
            f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)",
        ]
        inside = [float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(RUNS)]
        print(f"{'import ' + module:28}{format_seconds(statistics.median(inside)):>10}  in a fresh process")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.json"
        write(path, workload)
        command = [sys.executable, "-m", "legato.cli", "plan", str(path), "--json"]
        whole = median_s(lambda: subprocess.run(command, capture_output=True, check=True), 5)
    print(f"{'legato plan, all of them':28}{format_seconds(whole):>10}  the whole process")


if __name__ == "__main__":
    main()
