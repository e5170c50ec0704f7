"""Cost of a small message: torch's own gloo, and the runtime's channel, whose threads do not disturb each other.

    python benchmarks/messages.py [--ranks 2] [--repetitions 40]

Ranks are processes on loopback. A stream of eight all-reduces is started at once.
For each size, the benchmark prints the time of one all-reduce: the median over the
repetitions, on the slowest rank. The two kinds take turns, so a busy machine slows
both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from legato.core.plan import Message, Slice
from legato.core.units import format_bytes
from legato.pytorch.network.channel import channel_for

SIZES = (64, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
STREAM = 8
PORT = "29517"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=40)
    chosen = parser.parse_args()
    mp.spawn(measure, (chosen.ranks, chosen.repetitions), nprocs=chosen.ranks)


def measure(rank: int, ranks: int, repetitions: int) -> None:
    """One rank; the first one prints."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    stock, own = dist.new_group(), dist.new_group()
    channel, message = channel_for(own), Message((Slice("any", 0, 4),))
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "gloo": lambda buffer: dist.all_reduce(buffer, group=stock, async_op=True),
        "channel": lambda buffer: channel(buffer, message),
    }
    for nbytes in SIZES:
        buffers = [torch.zeros(nbytes // 4) for _ in range(STREAM)]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repetitions + 2):
            for name, send in ways.items():
                seconds[name].append(once(send, buffers))
        typical = {name: statistics.median(times[2:]) / STREAM for name, times in seconds.items()}
        if rank == 0:
            words = "   ".join(f"{name} {1e3 * s:6.2f} ms" for name, s in typical.items())
            print(f"{format_bytes(nbytes):>9}   {words}   {typical['gloo'] / typical['channel']:.1f}x", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def once(send: Callable[[torch.Tensor], Any], buffers: Sequence[torch.Tensor]) -> float:
    """Seconds of a stream, of the rank that took longest."""
    dist.barrier()
    start = time.perf_counter()
    for work in [send(buffer) for buffer in buffers]:
        work.wait()
    slowest = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


if __name__ == "__main__":
    main()
