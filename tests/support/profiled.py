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
from torch.distributed.fsdp import fully_shard
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


class Block(nn.Module):
    """What a block of a transformer has, without the attention."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, width=64, blocks=5, words=50):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


#: Of `Transformer`: the groups that `fully_shard` makes, and whether each is kept. The embedding is left to the root.
WRAPPED = (
    (("layers.0",), False),
    (("layers.1", "layers.2"), False),
    (("layers.3",), False),
    (("layers.4", "head"), True),
)


def stacked(widths=WIDTHS):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


class Sharded:
    """FSDP2 with several groups."""

    def __init__(self):
        self.model = Transformer()
        for paths, kept in WRAPPED:
            modules = [self.model.get_submodule(path) for path in paths]
            fully_shard(modules if len(modules) > 1 else modules[0], reshard_after_forward=not kept)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.words = torch.randint(0, 50, (512,))

    def sharded(self):
        self.model(self.words).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


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

    def exchanged(self):
        """What DLRM does: an all-to-all, whose result the replicas compute from."""
        received = torch.empty_like(self.x)
        dist.all_to_all_single(received, self.x)
        self.models[0](received).square().mean().backward()
        self._update()

    def _backward(self, k=0):
        self.models[k](self.x).square().mean().backward()

    def _update(self, k=0):
        self.optimizers[k].step()
        self.optimizers[k].zero_grad()


def record(kind, out):
    torch.manual_seed(0)
    training = Sharded() if kind == "sharded" else Training(kind)
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
