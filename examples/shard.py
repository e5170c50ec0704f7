"""Train a small transformer with its parameters sharded (FSDP2), one group for each block, or as a plan says.

    torchrun --nproc-per-node 2 examples/shard.py [WRAPPING.json]

Rank r writes rank<r>.json, a trace of one step, for `legato advise`. To capture the training step:
legato capture examples/shard.py:training -o w.json
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, schedule

import legato

STEPS = 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(64, 128)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(6))
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def training():
    """Return the model, its optimizer, and the loss of one step, for `legato capture`."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, labels = torch.randn(8, 32, 64), torch.randint(0, 10, (8,))
    return model, optimizer, lambda: nn.functional.cross_entropy(model(x), labels)


def by_block(model):
    """Shard each block as one group, which is the default without a plan."""
    for module in (model.embed, *model.blocks):
        fully_shard(module)
    fully_shard(model.head, reshard_after_forward=False)
    return fully_shard(model)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = legato.fully_shard(Model(), legato.read(sys.argv[1])) if sys.argv[1:] else by_block(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    patterns = torch.randn(10, 32, 64, generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(rank)
    traced = profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=2, warmup=1, active=4),
        on_trace_ready=lambda done: done.export_chrome_trace(f"rank{rank}.json"),
    )
    with traced:
        for _ in range(STEPS):
            labels = torch.randint(0, 10, (8,), generator=random)
            loss = nn.functional.cross_entropy(model(patterns[labels]), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            traced.step()
    if rank == 0:
        print(f"step {STEPS}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
