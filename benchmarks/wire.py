"""Loss of a small model that trains with rounded gradients and with exact gradients.

    python benchmarks/wire.py [--seeds 0,1,2] [--steps 600] [--losses FILE]

A small transformer learns, on two ranks, to continue sequences in which each token is the sum
of two earlier tokens (modulo 31). For each seed, all kinds of training begin with the same
weights and see the same batches. The kinds are exact gradients, and gradients in bf16 or fp16.
For some milestones, the benchmark prints the mean loss of the 20 steps before it, over the seeds,
and the spread of the seeds. `--losses` writes the loss of every step, which
`docs/pictures/losses.py` draws.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from legato.core.plan import Message, Plan, Slice
from legato.pytorch import attach, attachment
from legato.pytorch.parameters import trained_parameters

MODULUS, LENGTH, BATCH, WINDOW = 31, 16, 32, 20
KINDS = ("exact", "bf16", "fp16")


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(MODULUS, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, MODULUS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        found = self.layers(self.embed(x) + self.place(torch.arange(x.shape[1])), mask=mask, is_causal=True)
        return self.head(found)


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences, and the same moved by one token."""
    tokens = [torch.randint(MODULUS, (BATCH,), generator=generator) for _ in range(2)]
    while len(tokens) <= LENGTH:
        tokens.append((tokens[-1] + tokens[-2]) % MODULUS)
    whole = torch.stack(tokens, 1)
    return whole[:, :-1], whole[:, 1:]


def plan_of(model: nn.Module, kind: str) -> Plan:
    slices = [Slice(n, 0, p.nbytes) for n, p in reversed(trained_parameters(model).items())]
    messages = [Message(tuple(slices[i : i + 4])) for i in range(0, len(slices), 4)]
    plan = Plan("fours", tuple(messages), forward_overlap=True)
    return plan if kind == "exact" else plan.in_wire_format(kind)


def rank_main(rank: int, port: int, seeds: list[int], steps: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for seed, kind in itertools.product(seeds, KINDS):
        torch.manual_seed(seed)
        model = Model()
        plan = plan_of(model, kind)
        wrapped, optimizer = attach(model, torch.optim.AdamW(model.parameters(), lr=2e-3), plan)
        generator = torch.Generator().manual_seed(2 * seed + rank)
        losses = []
        for _ in range(steps):
            x, y = batch(generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(x)[:, 1:].flatten(0, 1), y[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        attachment(wrapped).flush()
        if rank == 0:
            results.put((kind, seed, losses))
        del wrapped
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--losses", type=Path)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    context = mp.get_context("spawn")
    results = context.Queue()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [context.Process(target=rank_main, args=(r, port, seeds, options.steps, results)) for r in range(2)]
    for process in ranks:
        process.start()
    found = [results.get() for _ in range(len(seeds) * len(KINDS))]
    for process in ranks:
        process.join()
    if options.losses:
        runs = [{"kind": kind, "seed": seed, "losses": losses} for kind, seed, losses in found]
        options.losses.write_text(json.dumps(runs))
    milestones = [options.steps * k // 6 for k in range(1, 7)]
    print(f"{'step':22}" + "".join(f"{m:>10}" for m in milestones) + "   seeds apart")
    for kind in KINDS:
        runs = [losses for name, _, losses in found if name == kind]
        at = [[statistics.mean(losses[max(0, m - WINDOW) : m]) for losses in runs] for m in milestones]
        apart = max(at[-1]) - min(at[-1])
        print(f"{kind:22}" + "".join(f"{statistics.mean(ends):10.4f}" for ends in at) + f"{apart:13.4f}")


if __name__ == "__main__":
    main()
