"""Predictions compared with simulations of transfers: every scheduler on every fabric without servers.

    python benchmarks/fabrics.py [--quick] [--any]

Workloads are three small torch models that are captured here, and two models of the zoo. Each workload is planned for
every fabric, on two networks, for 6 and 8 workers, and simulated with one message in flight, as the runtime sends
messages. The summary says by how much the best other scheduler is faster than legato at most, and how far legato's
predictions (by formulas) are from the simulation. Plans that need another order of computation than the captured order
cannot be run, and are summarized separately. The exit status is 1 if another plan that can be run is over 0.5% faster,
or if a prediction is over 1% off. `--any` allows any number of messages in flight, for comparison.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator

import torch
from torch import nn

import legato
from legato.core.errors import PlanError
from legato.core.workload import Workload
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.basics.compose import is_runnable
from legato.simulator.collective import iteration_time
from legato.simulator.flow import FABRICS, Network, simulate_flow
from legato.simulator.flow.fabrics import fitting
from legato.simulator.flow.pricing import cluster_for
from legato.zoo import workload as model

#: (bits per second, seconds): links on which the gradients of the captured models, and of the zoo's, take about as
#: long as the computation.
SLOW, FAST = ((2e9, 100e-6), (10e9, 30e-6)), ((10e9, 30e-6), (25e9, 5e-6))
WORKERS = (6, 8)
BEHIND, OFF = 0.005, 0.01


class Encoder(nn.Module):
    def __init__(self, wide: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(4000, wide)
        one = nn.TransformerEncoderLayer(wide, 4, 4 * wide, batch_first=True)
        self.layers = nn.TransformerEncoder(one, layers, enable_nested_tensor=False)
        self.head = nn.Linear(wide, 4000)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(self.words(words)))
        return found


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((3, 32, 64, 128, 256)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 2000), nn.ReLU(), nn.Linear(2000, 10))


def perceptron() -> nn.Module:
    return nn.Sequential(
        *(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())), nn.Linear(1024, 10)
    )


def captured() -> Iterator[Workload]:
    torch.manual_seed(0)
    inputs = {
        "encoder": (Encoder(), torch.randint(4000, (8, 64))),
        "convolutional": (convolutional(), torch.randn(32, 3, 32, 32)),
        "perceptron": (perceptron(), torch.randn(64, 1024)),
    }
    for name, (net, batch) in inputs.items():
        optimizer = torch.optim.AdamW(net.parameters())
        yield legato.capture(net, optimizer, lambda net=net, batch=batch: net(batch).square().mean(), name=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 workers and one network only")
    parser.add_argument("--any", action="store_true", help="any number of messages in flight")
    options = parser.parse_args()
    jobs = [*((job, SLOW) for job in captured()), *((model(name), FAST) for name in ("resnet-v1-50", "gpt2"))]
    names = [name for name, fabric in FABRICS.items() if not fabric.servers]
    behind, ahead, off, start = [], [], [], time.perf_counter()
    reordered = {"captured": [0.0], "zoo": [0.0]}
    for (job, links), name in itertools.product(jobs, names):
        fabric = fitting(name, {"in_flight": None} if options.any else {})
        for (bps, latency_s), workers in itertools.product(
            links[: 1 if options.quick else 2], WORKERS[options.quick :]
        ):
            network = Network(workers=workers, bandwidth_bps=bps, latency_s=latency_s)
            cluster = cluster_for(name, fabric, network)
            seconds: dict[str, float] = {}
            simulated: list[float] = []
            for scheduler in SCHEDULERS:
                try:
                    plan = schedule(scheduler, job, cluster)
                except PlanError:  # it needs halves, which this fabric does not have
                    continue
                found = simulate_flow(job, plan, fabric, network).iteration_s
                if scheduler == "legato":
                    off.append(abs(found / iteration_time(job, plan, cluster) - 1))
                elif not is_runnable(plan, job):
                    simulated.append(found)
                    continue
                seconds[scheduler] = found
            mine = seconds.pop("legato")
            best = min(seconds, key=seconds.__getitem__)
            reordered["captured" if links is SLOW else "zoo"] += (mine / one - 1 for one in simulated)
            behind.append(mine / seconds[best] - 1)
            ahead.append(seconds[best] / mine)
            print(
                f"{job.name:14} {name:18} {workers} workers, {bps / 1e9:2.0f} Gbit/s, {latency_s * 1e6:3.0f} us: "
                f"legato {mine * 1e3:8.2f} ms, best other {best:13} {seconds[best] * 1e3:8.2f} ms ({behind[-1]:+.2%}), "
                f"prediction off by {off[-1]:.2%}",
                flush=True,
            )
    print(
        f"{len(ahead)} cells in {time.perf_counter() - start:.0f} s: legato is at most {max(behind):.2%} behind, and "
        f"{max(ahead):.2f}x as fast at most; its predictions are off by {max(off):.2%} at most; "
        f"plans that cannot be run are at most {max(reordered['captured']):.2%} faster on captured models, "
        f"and {max(reordered['zoo']):.2%} on those of the zoo"
    )
    if max(behind) > BEHIND or max(off) > OFF:
        sys.exit(f"expected at most {BEHIND:.1%} behind, and {OFF:.0%} off")


if __name__ == "__main__":
    main()
