"""Orders of pulls from real parameter servers: measured times, compared with each other and with predictions.

    python benchmarks/parameter_servers.py                                   # layers, 2 workers, 1 server, 500 Mbit
    python benchmarks/parameter_servers.py --models resnet-v1-50 --servers 1,2 --bandwidth 1Gbit --iterations 10

Every worker, server and inference agent is on a separate host, as in
`legato rehearse --servers`. `layers` is a chain of 16 layers of 128 KiB, with 2 ms
forward and 3 ms backward per layer; any other model is one of `legato workload`.
Cells are stored in the output file as they are finished, and stored cells are not
measured again.

For each order, the benchmark prints what `legato rehearse` prints, and the time spent
waiting for parameters. Below, it prints R^2 of a line that gives iteration time by
overlap coefficient, over all iterations of a cell (TicTac, section 6.2). The
coefficient of an iteration is (N + C - T) / min(N, C): N is calibrated, T is
measured, and C is T without the time spent waiting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from legato.core.quantities import parse_bandwidth
from legato.core.text import percent
from legato.core.timeline import overlap_coefficient
from legato.core.units import format_seconds
from legato.core.workload import Op, Tensor, Workload
from legato.lab.testbed.servers.rehearsal import ServerTask, ServerTrial, rehearse_servers, select_orders
from legato.zoo import workload as of_the_zoo

LAYERS, NBYTES, FORWARD_S, BACKWARD_S = 16, 1 << 17, 0.002, 0.003


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="layers")
    parser.add_argument("--workers", default="2")
    parser.add_argument("--servers", default="1")
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--bandwidth", default="500Mbit")
    parser.add_argument("--ratio", type=float, default=None)
    parser.add_argument("--schedulers", default="all")
    parser.add_argument("--iterations", type=int, default=110)
    parser.add_argument("-o", "--output", type=Path, default=Path("parameter-servers.json"))
    chosen = parser.parse_args()
    cells = json.loads(chosen.output.read_text()) if chosen.output.exists() else []
    for model, workers, servers in itertools.product(
        *(getattr(chosen, k).split(",") for k in ("models", "workers", "servers"))
    ):
        key = {
            "model": model,
            "workers": int(workers),
            "servers": int(servers),
            "bandwidth": chosen.bandwidth,
            "ratio": chosen.ratio,
        }
        if not any({k: cell[k] for k in key} == key for cell in cells):
            cells.append(key | measure(key, chosen.agents, chosen.schedulers, chosen.iterations))
            chosen.output.write_text(json.dumps(cells, indent=1) + "\n")
        show(next(cell for cell in cells if {k: cell[k] for k in key} == key))
    errors = sorted(abs(row["error"]) for cell in cells for row in cell["rows"])
    typical, worst = statistics.median(errors), errors[-1]
    print(f"\npredicted against measured, {len(errors)} rows: median {typical:.1%}, worst {worst:.1%}")


def measure(key: dict[str, Any], agents: int, schedulers: str, iterations: int) -> dict[str, Any]:
    task = ServerTask(
        workload=layers() if key["model"] == "layers" else of_the_zoo(key["model"]),
        schedulers=select_orders(schedulers.split(",")),
        servers=key["servers"],
        agents=agents,
        iterations=iterations,
        ratio=key["ratio"],
    )
    found = rehearse_servers(task, key["workers"], parse_bandwidth(key["bandwidth"]), lambda *_: None)
    rows = [
        row | {"waited_s": statistics.median(trial.waited_s), "iterations": len(trial.measured_s)}
        for row, trial in zip(found.rows(), found.trials, strict=True)
    ]
    points = np.array([point for trial in found.trials for point in overlaps(trial)]).T
    return {
        "computation_s": found.trials[0].computation_s,
        "communication_s": found.trials[0].communication_s,
        "r2": float(np.corrcoef(points)[0, 1] ** 2),
        "points": points.shape[1],
        "rows": rows,
    }


def layers() -> Workload:
    n = LAYERS
    ops = [Op(f"f{i}", "forward", FORWARD_S, (i - 1,) if i else ()) for i in range(n)]
    ops += [Op(f"b{i}", "backward", BACKWARD_S, (n + i - 1,)) for i in range(n)]
    tensors = (Tensor(f"{i}.weight", NBYTES, 2 * n - 1 - i, (i,)) for i in range(n))
    return Workload("layers", tuple(ops), tuple(tensors))


def overlaps(trial: ServerTrial) -> list[tuple[float, float]]:
    """(overlap coefficient, seconds) of every iteration."""
    return [
        (overlap_coefficient(trial.communication_s, seconds - waited, seconds), seconds)
        for seconds, waited in zip(trial.measured_s, trial.waited_s, strict=True)
    ]


def show(cell: dict[str, Any]) -> None:
    compute, alone = (format_seconds(cell[key]) for key in ("computation_s", "communication_s"))
    where = f"{cell['model']}, {cell['workers']} workers, {cell['servers']} servers, {cell['bandwidth']}"
    print(f"\n{where}: computation {compute}, pushes and pulls alone {alone}")
    for row in cell["rows"]:
        measured, predicted, waited = (format_seconds(row[key]) for key in ("measured_s", "predicted_s", "waited_s"))
        agent = "" if row["agent_s"] is None else f"  agent {format_seconds(row['agent_s'])}"
        print(
            f"  {row['scheduler']:13} {measured:>8}  predicted {predicted:>8} ({percent(row['error'], signed=True)})"
            f"  {row['speedup_over_random']:.2f}x of random  {row['iterations_per_s']:.2f} per s  waited {waited:>8}"
            f"  overlap {row['overlap']:.2f}  straggler {row['straggler']:.1%}  variation {row['variation']:.1%}"
            f"  out of order {row['out_of_order']:.2%}{agent}  of {row['iterations']}",
            flush=True,
        )
    print(f"  iteration time on overlap coefficient: R^2 = {cell['r2']:.2f} over {cell['points']}")


if __name__ == "__main__":
    main()
