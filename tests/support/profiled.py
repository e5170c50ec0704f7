"""Trains on one rank of a gloo group under the profiler: `profiled.py KIND...`, started by torchrun.

Writes KIND.RANK.json for each method of `Training` that is named.
"""

import itertools
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

WIDTHS = (96, 128, 128, 64)


class Unrolled(nn.Module):
    """A recurrent network: the same cell four times."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.Linear(96, 96), nn.Linear(96, 64)

    def forward(self, x):
        for _ in range(4):
            x = torch.tanh(self.cell(x))
        return self.head(x)


def stacked(widths=WIDTHS):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


class Training:
    """What a step is; each in buckets of about a layer."""

    def __init__(self, kind):
        models = {"unrolled": [Unrolled()], "alternating": [stacked(), stacked((96, 160, 32))]}.get(kind, [stacked()])
        self.models = [DistributedDataParallel(model, bucket_cap_mb=0.03) for model in models]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in self.models]
        self.x = torch.randn(64, 96)

    def once(self):
        self._backward()
        self._update()

    unrolled = once

    def accumulated(self):
        """Two passes without communication, then one that sends."""
        for k in range(3):
            with self.models[0].no_sync() if k < 2 else nullcontext():
                self._backward()
        self._update()

    def sent_twice(self):
        """Accumulation in a script that does not use `no_sync`."""
        self._backward()
        self._backward()
        self._update()

    def alternating(self):
        """Two models, each with its own optimizer."""
        for k in range(2):
            self._backward(k)
            self._update(k)

    def _backward(self, k=0):
        self.models[k](self.x).square().mean().backward()

    def _update(self, k=0):
        self.optimizers[k].step()
        self.optimizers[k].zero_grad()


def record(kind, out):
    torch.manual_seed(0)
    training = Training(kind)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=2, warmup=1, active=3),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(out),
        record_shapes=True,
    ) as profiler:
        for _ in range(6):
            getattr(training, kind)()
            profiler.step()


def main(rank, workers, folder, kinds):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    for kind in kinds:
        record(kind, str(folder / f"{kind}.{rank}.json"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(), sys.argv[1:])
