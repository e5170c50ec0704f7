"""Gain of each part of Caramel, as in Figs. 11 and 12 of its paper: simulated, and measured.

    python benchmarks/caramel_parts.py [--bandwidth 3.19Gbit]
    python benchmarks/caramel_parts.py --measured inception-v3 --workers 2 --bandwidth 2Gbit

The simulation gives the compute utilization of the paper's models on 8 and 16 workers. First, the parts are added one
by one in the paper's order, starting from Horovod. Then each part is left out of the whole, on a network where adding
up gradients takes time (otherwise depth would gain nothing). `legato/lab/papers/caramel.py` has the setting and says
what is fitted in it; the default bandwidth is the one that the paper's own first stage implies.

With `--measured`, plans with and without the parts run in turns between hosts with shaped links. Computation is
emulated, and takes as long as one message of all gradients. The plans run in compiled models, whose graphs are sorted
by the order of computation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from legato.core.quantities import parse_bandwidth
from legato.core.units import format_bandwidth
from legato.lab.hypothetical import scale_compute
from legato.lab.papers.caramel import MODELS, SHUFFLE_BPS, STAGES, WORKERS, stages, without

PARTS = ("serialization", "batching", "scheduling", "depth")
#: What is measured: the scheduler, and the parts of Caramel that are switched off.
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "horovod": ("horovod", ()),
    "ddp": ("ddp", ()),
    "all-reduce of each tensor": ("caramel", PARTS),
    "+ batching": ("caramel", ("serialization", "scheduling", "depth")),
    "+ transfer boundaries": ("caramel", ("depth",)),
    "+ depth: all parts": ("caramel", ()),
    **{f"all but {part}": ("caramel", (part,)) for part in PARTS[:3]},
    "legato": ("legato", ()),
}
WARM, TIMED, ROUNDS = 4, 4, 3


def table(title: str, columns: list[str], rows: dict[str, list[float]]) -> None:
    """Shares as per cents; the column names above."""
    print(f"\n{title}\n{'':26}" + "".join(f"{name:>22}" for name in columns))
    for name, shares in rows.items():
        print(f"{name:26}" + "".join(f"{share:>22.1%}" for share in shares))


def simulated(bandwidth_bps: float) -> None:
    places = {f"{model}, {n} workers": (model, n) for model in MODELS for n in WORKERS}
    added = {"published, Inception-v3, 8": list(STAGES.values())}
    added |= {name: stages(*place, bandwidth_bps) for name, place in places.items()}
    table(f"parts added one by one, shuffle at {format_bandwidth(bandwidth_bps)}", list(STAGES), added)
    off: list[tuple[str, ...]] = [(), *((part,) for part in PARTS), PARTS]
    names = ["all parts", *(f"no {part}" for part in PARTS), "none"]
    table(
        "one part switched off, with a cost of adding up",
        names,
        {name: [without(*place, bandwidth_bps, parts) for parts in off] for name, place in places.items()},
    )


def measured(model: str, workers: int, bandwidth_bps: float) -> None:
    from legato.lab.testbed.launch import run_workers

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the workers find this file
        run_workers(
            [Path(__file__).stem, model, str(result)], workers, Path(folder) / "log", lambda *_: None, bandwidth_bps
        )
        rows = json.loads(result.read_text())
    table(
        f"{model}, {workers} workers, {format_bandwidth(bandwidth_bps)}: compute utilization",
        ["measured", "predicted"],
        rows,
    )


def worker(model: str, output: Path) -> None:
    """One rank; rank 0 writes the rows."""
    import msgspec
    import torch.distributed as dist

    from legato import zoo
    from legato.core.files import write_text
    from legato.core.plan import Plan
    from legato.lab.testbed.accelerator import Clock, EmulatedOptimizer
    from legato.lab.testbed.graphs import CompiledModel, with_nodes
    from legato.lab.testbed.rank import gloo_rank
    from legato.pytorch import attach, attachment
    from legato.pytorch.network.agreement import broadcast_bytes
    from legato.pytorch.network.calibrate import calibrate, sizes_up_to
    from legato.schedule import schedule
    from legato.simulator.collective import iteration_time

    with gloo_rank():
        workload = zoo.workload(model)
        cluster = calibrate(sizes=sizes_up_to(workload.nbytes)).cluster
        ratio = cluster.cost().cost(workload.nbytes) / workload.compute_s
        workload = with_nodes(scale_compute(workload, 1 / ratio))
        made = b""
        if dist.get_rank() == 0:
            made = msgspec.json.encode(
                [schedule(name, workload, cluster, **dict.fromkeys(off, False)) for name, off in ROWS.values()]
            )
        plans = msgspec.json.decode(broadcast_bytes(made, dist.group.WORLD), type=list[Plan])
        emulated = CompiledModel(workload, clock=Clock(), seed=dist.get_rank())
        wrapped, optimizer = attach(emulated, EmulatedOptimizer(emulated), plans[0])

        def train(plan: Plan) -> list[float]:
            """The seconds of each iteration."""
            attachment(wrapped).adopt(plan)
            dist.barrier()
            emulated.clock.begin()
            began = []
            for _ in range(WARM + TIMED + 1):
                optimizer.zero_grad()
                emulated.clock.ask()
                loss = wrapped()
                began.append(time.perf_counter())
                loss.backward()
                optimizer.step()
            attachment(wrapped).flush()
            return [b - a for a, b in zip(began[WARM:], began[WARM + 1 :], strict=False)]

        times: dict[str, list[float]] = {name: [] for name in ROWS}
        for _ in range(ROUNDS):
            for name, plan in zip(ROWS, plans, strict=True):
                times[name] += train(plan)
        if dist.get_rank() == 0:
            predicted = [iteration_time(workload, plan, cluster) for plan in plans]
            compute_s = workload.compute_s
            rows = {
                name: [compute_s / statistics.median(seconds), compute_s / expected]
                for (name, seconds), expected in zip(times.items(), predicted, strict=True)
            }
            write_text(output, json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth")
    parser.add_argument("--measured", metavar="MODEL", help="rehearse this model of the zoo")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.measured:
        measured(chosen.measured, chosen.workers, parse_bandwidth(chosen.bandwidth or "2Gbit"))
    else:
        simulated(parse_bandwidth(chosen.bandwidth) if chosen.bandwidth else SHUFFLE_BPS)


if __name__ == "__main__":
    if "RANK" in os.environ:
        arguments: Any = sys.argv[1:]
        worker(arguments[0], Path(arguments[1]))
    else:
        main()
