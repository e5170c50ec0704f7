"""Orders of pulls on real parameter servers, side by side: random, tic, tac, and the proven best.

    python benchmarks/parameter_servers.py [bandwidth] [rounds]      (root: hosts as network namespaces)

Two workers, a server and an inference agent, each in a host of its own with a
link of 500 Mbit/s. A layer has 128 KiB and sleeps for its time (2 ms forward, 3
ms backward), so that the machine's processors stay free for the network. Every
round runs each order for 10 iterations and drops the first two; rounds are
interleaved, so that a busy machine slows all alike.

Printed of each order: median iteration and its variation (standard deviation /
mean), iterations a second, time waited for parameters, overlap coefficient
(N + C - T) / min(N, C) with N = the time of all transfers on the server's link
and C what is not waiting, straggler effect (how much longer one worker waits
than the other, of the iteration), transfers out of order, the agent's median
time of pull and forward pass; and R^2 of a line through (overlap, iteration)
over all of them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from legato.core.cluster import PARAMETER_SERVER, Cluster
from legato.core.units import format_seconds, parse_bandwidth
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import schedule
from legato.testbed.hosts import Hosts

LAYERS, WIDTH, FORWARD_S, BACKWARD_S = 16, 181, 0.002, 0.003
ORDERS = ("random", "tic", "tac", "pull-optimal")
WORKERS, ITERATIONS, DROPPED = 2, 10, 2
NBYTES = 4 * WIDTH * WIDTH


def workload() -> Workload:
    """What the model below does."""
    n = LAYERS
    ops = [Op(f"f{i}", "forward", FORWARD_S, (i - 1,) if i else ()) for i in range(n)]
    ops += [Op(f"b{i}", "backward", BACKWARD_S, (n + i - 1,)) for i in range(n)]
    return Workload("layers", tuple(ops), tuple(Tensor(f"{i}.weight", NBYTES, 2 * n - 1 - i, (i,)) for i in range(n)))


def rank_main(bandwidth_bps: float, rounds: int) -> None:
    """What every rank does; rank 0 prints its results as JSON."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from legato.pytorch.servers import AgentModel, ServedModel, parameter_servers

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            time.sleep(FORWARD_S)
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            time.sleep(BACKWARD_S)
            return gradient

    class Layer(nn.Linear):
        def forward(self, x: Any) -> Any:
            return Sleep.apply(super().forward(x))

    def train(model: ServedModel, optimizer: Any) -> list[Any]:
        x = torch.randn(2, WIDTH)
        with model.measure() as record:
            for _ in range(DROPPED + ITERATIONS + 1):
                loss = model(x).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return [
            (i.seconds, i.waited_s, i.arrivals[0] if i.arrivals else None, i.transfers, i.out_of_order)
            for i in record[DROPPED:]
        ]

    def infer(model: AgentModel) -> list[float]:
        x, found = torch.randn(2, WIDTH), []
        while model.training_goes_on:
            start = time.perf_counter()
            model.pull()
            with torch.no_grad():
                model(x)
            found.append(time.perf_counter() - start)
        return found[1:-1]

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = workload()
    cluster = Cluster.derive(WORKERS, bandwidth_bps, 1e-4, servers=1, collectives=[PARAMETER_SERVER])
    results: dict[str, list[Any]] = {f"{name}, {who}": [] for name in ORDERS for who in ("training", "agent")}
    for k in range(rounds * len(ORDERS)):
        name = ORDERS[k % len(ORDERS)]
        for agents, who in ((0, "training"), (1, "agent")):
            group = None if agents else dist.new_group(range(WORKERS + 1))
            if not agents and dist.get_rank() == WORKERS + 1:
                found = None
            else:
                torch.manual_seed(0)
                model = nn.Sequential(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
                plan = "random" if name == "random" else schedule(name, job, cluster)
                found = parameter_servers(
                    model, torch.optim.SGD(model.parameters(), lr=1e-3), train, infer=infer,
                    agents=agents, plan=plan, seed=k, process_group=group,
                )  # fmt: skip
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, found)
            results[f"{name}, {who}"].append(everybody[-1] if agents else everybody[:WORKERS])
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.barrier()


def run(bandwidth_bps: float, rounds: int) -> dict[str, Any]:
    """All ranks, each in its host; what rank 0 printed."""
    with Hosts(WORKERS + 2, bandwidth_bps) as hosts:
        shared = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "WORLD_SIZE": str(WORKERS + 2),
            "MASTER_ADDR": hosts.address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": hosts.interface,
        }
        command = [sys.executable, str(Path(__file__).resolve()), str(bandwidth_bps), str(rounds)]
        ranks = [
            hosts.popen(r, command, env={**shared, "RANK": str(r)}, stdout=-1 if r == 0 else None, text=True)
            for r in range(WORKERS + 2)
        ]
        out, _ = ranks[0].communicate()
        return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]


def show(results: dict[str, Any], bandwidth_bps: float) -> None:
    network_s = 2 * WORKERS * LAYERS * NBYTES * 8 / bandwidth_bps
    print(f"{'':14}{'iteration':>10}{'variation':>10}{'a second':>9}{'waited':>9}{'overlap':>8}"
          f"{'straggler':>10}{'unordered':>10}{'agent':>10}")  # fmt: skip
    points: list[tuple[float, float]] = []
    for name in ORDERS:
        runs = results[f"{name}, training"]
        seconds = [i[0] for workers in runs for i in workers[0]]
        waited = [i[1] for workers in runs for i in workers[0]]
        busy_s = statistics.median(s - w for s, w in zip(seconds, waited, strict=True))
        overlap = [(network_s + busy_s - s) / min(network_s, busy_s) for s in seconds]
        points += [((network_s - w) / min(network_s, s - w), s) for s, w in zip(seconds, waited, strict=True)]
        pairs = [pair for workers in runs for pair in zip(*workers, strict=False)]
        straggler = [abs(a[2] - b[2]) / max(a[0], b[0]) for a, b in pairs if None not in (a[2], b[2])]
        transfers = sum(i[3] for workers in runs for w in workers for i in w)
        late = sum(i[4] for workers in runs for w in workers for i in w)
        agent = [s for found in results[f"{name}, agent"] for s in found]
        print(
            f"{name:14}{format_seconds(statistics.median(seconds)):>10}"
            f"{statistics.stdev(seconds) / statistics.mean(seconds):>10.1%}{len(seconds) / sum(seconds):>9.1f}"
            f"{format_seconds(statistics.median(waited)):>9}{statistics.median(overlap):>8.2f}"
            f"{statistics.mean(straggler):>10.1%}{late / max(1, transfers):>10.2%}"
            f"{format_seconds(statistics.median(agent)):>10}   of {len(seconds)} iterations"
        )
    x, y = np.array(points).T
    print(f"iteration time on overlap coefficient: R^2 = {np.corrcoef(x, y)[0, 1] ** 2:.2f} over {len(points)}")


def main() -> None:
    if "RANK" in os.environ:
        rank_main(float(sys.argv[1]), int(sys.argv[2]))
        return
    bandwidth_bps = parse_bandwidth(sys.argv[1] if len(sys.argv) > 1 else "500Mbit")
    show(run(bandwidth_bps, int(sys.argv[2]) if len(sys.argv) > 2 else 12), bandwidth_bps)


if __name__ == "__main__":
    main()
