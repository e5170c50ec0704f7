"""How fast the flow simulator is, and how much memory it needs.

    python benchmarks/simulator.py [--quick]

Every line runs in a separate process that has simulated something small before.
So times do not include numba's compiler (which runs once on a machine, and stores
its results on disk) and its loading. Events are services on links and streams
(docs/simulator.md). "hot loop" is the engine alone, the best of five runs.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from legato.core.workload import Workload
from legato.simulator.flow import FABRICS, Network, SharedJob, SharedNetwork, fabric, simulate_flow
from legato.simulator.flow.engine.loop import run_services
from legato.simulator.flow.iterations.run import compile_flow
from legato.zoo import workload as model

MODEL = "resnet-v1-50"


def network(workers: int) -> Network:
    return Network(workers=workers, bandwidth_bps=25e9, latency_s=5e-6)


def whole(name: str, workers: int) -> dict[str, Any]:
    """One simulation from the workload to the result; of all fabrics, their sum."""
    job, events = model(MODEL), 0
    start = time.perf_counter()
    for each in FABRICS if name == "all" else [name]:
        events += simulate_flow(job, None, each, network(workers)).num_events
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "events": events}


def symmetric(name: str, workers: int) -> dict[str, Any]:
    """With symmetry and without: seconds each, and whether the iteration time is the same to the last bit."""
    job, found, events = model(MODEL), {}, 0
    for symmetry in (True, False):
        start = time.perf_counter()
        result = simulate_flow(job, None, name, network(workers), symmetry=symmetry)
        found[symmetry] = (result.iteration_s, time.perf_counter() - start)
        events = events or result.num_events
    assert found[True][0] == found[False][0]
    return {"seconds": found[True][1], "without_symmetry_s": found[False][1], "events": events}


def shared(jobs: int, workers: int) -> dict[str, Any]:
    """Jobs on the same hosts, alone and beside each other."""
    job, hosts = model(MODEL), tuple(range(workers))
    start = time.perf_counter()
    sharing = SharedNetwork([SharedJob(name=str(j), workload=job, hosts=hosts) for j in range(jobs)], network(workers))
    sharing.run()
    return {"seconds": time.perf_counter() - start, "events": sharing.num_services}


def hot_loop(name: str, workers: int, symmetry: bool = True) -> dict[str, Any]:
    """The engine alone."""
    job: Workload = model(MODEL)
    unrolled = compile_flow(job, None, fabric(name), network(workers), symmetry=symmetry)
    services = unrolled.graph.freeze(unrolled.topology.num_links)
    best = float("inf")
    for _ in range(5):
        records = services.records.copy()
        start = time.perf_counter()
        run_services(records, services.successors, services.num_links)
        best = min(best, time.perf_counter() - start)
    return {"seconds": best, "events": len(services.records)}


CASES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "all 13 fabrics, 32 workers": (partial(whole, "all", 32), "< 2 s"),
    "ring, 1,024 workers": (partial(whole, "ring", 1024), "< 5 s"),
    "ring, 16,384 workers": (partial(whole, "ring", 16384), "< 60 s, < 8 GB"),
    "parameter server, 16,384 workers": (partial(whole, "parameter-server", 16384), "< 60 s, < 8 GB"),
    "tree, 16,384 workers": (partial(whole, "tree", 16384), "< 60 s, < 8 GB"),
    "ring, 32 workers, with and without symmetry": (partial(symmetric, "ring", 32), "same answer"),
    "2 jobs in rings on the same 24 hosts": (partial(shared, 2, 24), ""),
    "hot loop: parameter server, 32 workers": (partial(hot_loop, "parameter-server", 32), "> 10 M events/s"),
    "hot loop: ring, 32 workers": (partial(hot_loop, "ring", 32), "> 10 M events/s"),
    "hot loop: ring, 512 workers": (partial(hot_loop, "ring", 512), "> 10 M events/s"),
    "hot loop: ring, 1,024 workers": (partial(hot_loop, "ring", 1024), "> 10 M events/s"),
    "hot loop: parameter server, 256 workers": (partial(hot_loop, "parameter-server", 256), "> 10 M events/s"),
    "hot loop: ring, 32 workers, each of them": (partial(hot_loop, "ring", 32, symmetry=False), ""),
    "hot loop: tree, 1,024 workers": (partial(hot_loop, "tree", 1024), ""),
    "hot loop: parameter server, 2,048 workers": (partial(hot_loop, "parameter-server", 2048), ""),
}
SLOW = ("ring, 16,384 workers", "parameter server, 16,384 workers", "tree, 16,384 workers")


def run(case: str) -> dict[str, Any]:
    """Run a case in a process of its own."""
    command = [sys.executable, __file__, "--case", case]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the largest")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        for name in FABRICS:
            for workers in (8, 256):
                simulate_flow(model("alexnet-v2"), None, name, network(workers))
        found = CASES[arguments.case][0]()
        found["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(json.dumps(found))
        return
    print(f"{MODEL}, one message per tensor, 25 Gbit/s")
    print(f"{'case':<46} {'seconds':>8} {'events':>12} {'M events/s':>10} {'peak GB':>8}  wanted")
    for name, (_, wanted) in CASES.items():
        if arguments.quick and name in SLOW:
            continue
        found = run(name)
        rate = found["events"] / found["seconds"] / 1e6
        times = f"{found['seconds']:>8.3f} {found['events']:>12,} {rate:>10.2f} {found['peak_gb']:>8.2f}"
        print(f"{name:<46} {times}  {wanted}", flush=True)


if __name__ == "__main__":
    main()
