"""What it costs to keep an eye on the pace of training: two ranks, with and without, in turns.

    python benchmarks/drift.py [--rounds 8]

A round trains each way for one window of passes; printed is the median of the
rounds' ratios. The model is small (an iteration of some ten milliseconds) and
every tensor is a message, so the share is larger than in most training.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from legato.core.plan import Message, Plan, Slice
from legato.pytorch import distribute, drift
from legato.pytorch.parameters import trained_parameters


class Blind:
    """In the place of a `Drift`: sees nothing."""

    def pass_begins(self, _: object) -> str:
        return ""


def rank_main(rank: int, port: int, rounds: int, results) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    slices = [Slice(n, 0, p.numel() * p.element_size()) for n, p in reversed(trained_parameters(model).items())]
    plan = Plan("per tensor", tuple(Message((s,)) for s in slices), forward_overlap=True)
    wrapped, optimizer = distribute(model, optimizer, plan)
    eye, blind = wrapped._drift, Blind()
    x = torch.randn(256, 256)
    ratios = []
    for k in range(1 + rounds):
        seconds = {}
        for watch in (eye, blind) if k % 2 else (blind, eye):
            wrapped._drift = watch
            wrapped._exchange.passes = 0 if watch is blind else k * drift.WINDOW
            dist.barrier()
            start = time.perf_counter()
            for _ in range(drift.WINDOW):
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
            wrapped.flush()
            seconds[watch] = time.perf_counter() - start
        if k:
            ratios.append(seconds[eye] / seconds[blind])
    results.put((rank, seconds[blind] / drift.WINDOW, ratios))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [context.Process(target=rank_main, args=(r, port, options.rounds, results)) for r in range(2)]
    for process in ranks:
        process.start()
    _, iteration_s, ratios = min(results.get() for _ in ranks)
    for process in ranks:
        process.join()
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    print(
        f"iteration {iteration_s * 1e3:.1f} ms; with an eye on it {middle - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%})"
    )


if __name__ == "__main__":
    main()
