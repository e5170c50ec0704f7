"""Which all-reduce is fastest for which size: gloo's own, or one made of steps, in one chunk or in several.

    python benchmarks/collectives.py [--ranks 2,4] [--bandwidth 1Gbit] [--depths 1,4] [--rounds 15]
                                    [--least]

Without a bandwidth, the ranks communicate over loopback. With a bandwidth, each rank is on a
separate host whose link has this bandwidth. The benchmark prints Markdown: the median time of
gloo's own all-reduce, and the time of every other all-reduce as a multiple of it. All kinds take
turns within a round, so a machine that slows down slows all kinds. The time of a message is the
time of its slowest rank. If others use the machine at the same time, `--least` prints the least
time over the rounds instead of the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from legato.core.plan import Message, Slice
from legato.core.quantities import parse_bandwidth
from legato.core.units import format_bytes, format_seconds
from legato.lab.testbed.hosts import Hosts
from legato.pytorch.network.channel import channel_for

SIZES = tuple(4096 * 8**k for k in range(5))  # 4 KiB to 16 MiB
NAMES = ("shuffle", "ring", "halving-doubling")
LARGE, FEW = 4 * 2**20, 3  # above this size, a third of the rounds


def ways(depths: list[int]) -> list[tuple[str | None, int]]:
    return [(None, 1), *((name, depth) for name in NAMES for depth in depths)]


def measure(depths: list[int], rounds: int, least: bool) -> dict[int, list[float]]:
    """Median (or least) seconds of every way, by size; the same on all ranks."""
    torch.set_num_threads(1)
    channel = channel_for(dist.group.WORLD)
    clock = dist.new_group()
    found = {}
    for nbytes in SIZES:
        buffer = torch.zeros(nbytes // 4)
        times: list[list[float]] = []
        for _ in range(1 + (rounds if nbytes <= LARGE else max(5, rounds // FEW))):
            times.append([])
            for name, depth in ways(depths):
                dist.barrier(clock)
                start = time.perf_counter()
                channel(buffer, Message((Slice("any", 0, 4),), "all_reduce", name, depth)).wait()
                times[-1].append(time.perf_counter() - start)
        slowest = torch.tensor(times[1:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=clock)
        found[nbytes] = [(min if least else statistics.median)(column) for column in slowest.T.tolist()]
    return found


def run_rank(depths: list[int], rounds: int, least: bool) -> None:
    dist.init_process_group("gloo")
    found = measure(depths, rounds, least)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def launch(ranks: int, bandwidth_bps: float | None, arguments: list[str]) -> dict[int, list[float]]:
    """Measure between this number of processes."""
    command = [sys.executable, __file__, "--rank", *arguments]
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_PORT": "29577", "OMP_NUM_THREADS": "1"}
    if bandwidth_bps is None:
        started = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(i), "MASTER_ADDR": "127.0.0.1"},
                stdout=None if i else subprocess.PIPE,
            )
            for i in range(ranks)
        ]
        return _result(started)
    with Hosts(ranks, bandwidth_bps) as hosts:
        environment |= {"MASTER_ADDR": hosts.address(0), "GLOO_SOCKET_IFNAME": hosts.interface}
        return _result(
            [
                hosts.popen(i, command, env={**environment, "RANK": str(i)}, stdout=None if i else subprocess.PIPE)
                for i in range(ranks)
            ]
        )


def _result(started: list[subprocess.Popen[bytes]]) -> dict[int, list[float]]:
    out, _ = started[0].communicate()
    for process in started[1:]:
        process.wait()
    return {int(nbytes): times for nbytes, times in json.loads(out).items()}


def table(found: dict[int, list[float]], depths: list[int]) -> str:
    names = [name if depth == 1 else f"{name} x{depth}" for name, depth in ways(depths) if name]
    lines = [" | ".join(["", "bytes", "gloo's own", *names, ""]).strip(), "|---|---:" * 1 + "|---:" * len(names) + "|"]
    for nbytes, (own, *others) in found.items():
        cells = [f"{other / own:.2f}" for other in others]
        if min(others) < own:
            best = others.index(min(others))
            cells[best] = f"**{cells[best]}**"
        lines.append(" | ".join(["", format_bytes(nbytes), format_seconds(own), *cells, ""]).strip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--bandwidth")
    parser.add_argument("--depths", default="1,4")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--least", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    depths = [int(depth) for depth in options.depths.split(",")]
    if options.rank:
        run_rank(depths, options.rounds, options.least)
        return
    bandwidth = parse_bandwidth(options.bandwidth) if options.bandwidth else None
    arguments = ["--depths", options.depths, "--rounds", str(options.rounds), *["--least"] * options.least]
    for ranks in map(int, options.ranks.split(",")):
        print(f"\n{ranks} ranks, {options.bandwidth or 'loopback'}\n", flush=True)
        print(table(launch(ranks, bandwidth, arguments), depths), flush=True)


if __name__ == "__main__":
    main()
