"""Seconds of planning for a model of many tensors: every scheduler, the bound and one simulation.

    python benchmarks/planning.py [tensors]
    python benchmarks/planning.py large [tensors] [chain|decoder]

The seconds are medians of several runs in this process; `import legato` and `legato plan` run in separate processes.
With `large`, everything runs once, each item in a fresh process, and the peak memory of the process is printed next to
the time. The last argument names the model: a chain of layers, or a language model with parallel branches.
"""

from __future__ import annotations

import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace  # a copy, with which nothing is kept that was computed before

from legato.core.cluster import Cluster
from legato.core.errors import TooLargeError
from legato.core.files import write
from legato.core.units import format_seconds
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import SCHEDULERS, SERVER_SCHEDULERS, schedule
from legato.schedule.basics.jackson import jackson
from legato.schedule.bound.lower_bound import lower_bound, verify_bound
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


def decoder(tensors: int, seed: int = 0) -> Workload:
    """A decoder of a language model, 1.4 MB a tensor on average: layers of nine weights, with parallel branches.

    In each layer, queries, keys and values, and then gate and up, are computed side by side, and both halves are added
    to the residual stream. Gradients of inputs and of weights are ops of their own.
    """
    draw, layers = random.Random(seed), max(1, tensors // 9)
    forward: list[Op] = []
    weighted: dict[int, tuple[str, float]] = {}  # by forward op: its weight, and the weight's share of the layer's

    def add(name: str, deps: tuple[int, ...], share: float = 0.0) -> int:
        if share:
            weighted[len(forward)] = name, share
        forward.append(Op(name, "forward", draw.uniform(0.9, 1.1) * (0.02 + share) * 4e-3, deps))
        return len(forward) - 1

    stream = add("embed", ())
    for i in range(layers):
        norm = add(f"{i}.norm1", (stream,), 1e-4)
        branches = tuple(add(f"{i}.{name}", (norm,), 0.08) for name in "qkv")
        stream = add(f"{i}.add1", (stream, add(f"{i}.o", (add(f"{i}.attention", branches),), 0.08)))
        norm = add(f"{i}.norm2", (stream,), 1e-4)
        gated = add(f"{i}.mul", tuple(add(f"{i}.{name}", (norm,), 0.226) for name in ("gate", "up")))
        stream = add(f"{i}.add2", (stream, add(f"{i}.down", (gated,), 0.226)))
    readers: list[list[int]] = [[] for _ in forward]
    for i, op in enumerate(forward):
        for dep in op.deps:
            readers[dep].append(i)
    ops, made, place = list(forward), dict[int, int](), dict[int, int]()
    for i in reversed(range(len(forward))):
        deps = tuple(sorted(made[reader] for reader in readers[i])) or (len(forward) - 1,)
        if i in weighted:
            place[i] = len(ops)
            ops.append(Op(f"{forward[i].name}.dw", "backward", forward[i].duration_s, deps))
        made[i] = len(ops)
        ops.append(Op(f"{forward[i].name}.dx", "backward", forward[i].duration_s, deps))
    gradients = []
    for i in sorted(place, key=place.__getitem__):
        name, share = weighted[i]
        gradients.append(Tensor(name, 16 * max(1, int(share * 9 * 1.4e6 / 16)), place[i], (i, len(ops))))
        ops.append(Op(f"{name}.step", "optimizer", share * 1e-4, (place[i],)))
    return Workload("decoder", tuple(ops), tuple(gradients))


def preemptive_optimum(tensors: int) -> Callable[[], object]:
    """PACE's scheduling problem (section IV) for this number of tensors, each released at a moment of its own."""
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


def large(tensors: int, model: str) -> None:
    """Time and peak memory of every scheduler, the bounds and one simulation, each in a fresh process."""
    headings = f"{'seconds':>9}{'of CPU':>8}{'peak MiB':>10}{'messages':>10}{'iteration':>11}"
    print(f"{f'{model} of {tensors:,} tensors':28}{headings}")
    for what in ("workload", *BOUNDS, "simulate fifo", *SCHEDULERS, SHARDED, *SERVER_SCHEDULERS):
        command = [sys.executable, __file__, "one", str(tensors), model, what]
        print(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout, end="", flush=True)


#: The bounds of `large`, with the arguments of `lower_bound`.
BOUNDS: dict[str, dict[str, Any]] = {
    "lower_bound": {},
    "lower_bound, all-reduces": {"sends": "all_reduces"},
    "lower_bound, any order": {"order": "any"},
    "lower_bound, unlimited": {"compute": "unlimited"},
    "lower_bound, sharded": {"shard": "optimizer", "step_last": True},
}
#: `legato` where the optimizer states are sharded.
SHARDED = "legato, sharded"


def one(tensors: int, model: str, what: str) -> None:
    """One line of `large`. The peak is that of the whole process, which has the workload in memory."""
    workload = {"chain": chain, "decoder": decoder}[model](tensors)
    cluster = Cluster.derive(8, 10e9, 30e-6, servers=2 if what in SERVER_SCHEDULERS else 0)
    fifo = schedule("fifo", workload, cluster) if what == "simulate fifo" else None
    plan, result = None, ""
    start, start_cpu = time.perf_counter(), time.process_time()
    try:
        if what in BOUNDS:
            result = format_seconds(lower_bound(workload, cluster, **BOUNDS[what]).seconds)
        elif fifo is not None:
            result = format_seconds(iteration_time(workload, fifo, cluster))
        elif what == SHARDED:
            plan = schedule("legato", workload, cluster, shard="optimizer")
        elif what != "workload":
            plan = schedule(what, workload, cluster)
    except TooLargeError as error:
        print(f"{what:28} {error}")
        return
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if plan is not None:
        result = format_seconds(iteration_time(workload, plan, cluster))
    messages = len(plan.messages) if plan else ""
    print(f"{what:28}{seconds:>9.2f}{cpu:>8.2f}{peak:>10.0f}{messages:>10}{result:>11}")


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        one(int(sys.argv[2]), *sys.argv[3:])
    elif sys.argv[1:2] == ["large"]:
        tensors, model = [*sys.argv[2:], *("100000", "chain")[len(sys.argv) - 2 :]]
        large(int(tensors), model)
    else:
        every(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)


def every(tensors: int) -> None:
    """Medians of many runs in this process."""
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
        "lower_bound": lambda: lower_bound(replace(workload), cluster),
        "lower_bound, any order": lambda: lower_bound(replace(workload), cluster, order="any"),
        "lower_bound, unlimited": lambda: lower_bound(replace(workload), cluster, compute="unlimited"),
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
        command = [sys.executable, "-m", "legato", "plan", str(path), "--json"]
        whole = median_s(lambda: subprocess.run(command, capture_output=True, check=True), 5)
    print(f"{'legato plan, all of them':28}{format_seconds(whole):>10}  the whole process")


if __name__ == "__main__":
    main()
