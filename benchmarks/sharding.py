"""Milliseconds of an iteration with sharded optimizers: schedulers, the bound, and `legato` without shards.

    python benchmarks/sharding.py                        # simulated
    python benchmarks/sharding.py --measured 1Gbit       # legato beside torch's own ways, between two hosts

Simulated: V100s with Adam, which moves 28 bytes of memory for each parameter of 4 bytes, at 900 GB/s. Measured: two
hosts (network namespaces on one machine, with links of that bandwidth) train a transformer of 13.7 million parameters
with AdamW in five ways, which take turns: DDP; `legato.distribute` with shards, after it has decided; DDP with torch's
ZeroRedundancyOptimizer; and torch's FSDP2, which keeps what it gathers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

import legato
from legato import Cluster, Workload, zoo
from legato.core.workload import Op
from legato.schedule import schedule

ADAM_S_PER_BYTE = 28 / 4 / 900e9
SCHEDULERS = ("ddp", "dear", "legato")


def with_adam(workload: Workload) -> Workload:
    """The workload with an optimizer op for each tensor."""
    updates = [Op(f"adam {tensor.name}", "optimizer", ADAM_S_PER_BYTE * tensor.nbytes) for tensor in workload.tensors]
    first = len(workload.ops)
    tensors = (replace(t, readers=(*t.readers, first + k)) for k, t in enumerate(workload.tensors))
    return replace(workload, ops=(*workload.ops, *updates), tensors=tuple(tensors))


WAYS = ("ddp", "gradients", "optimizer", "zero", "fsdp2")


def trained(way: str) -> Iterator[None]:
    """Train a model in one of these ways; one step for each item."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True), 4)
    model = nn.Sequential(nn.Embedding(2048, 512), layers)
    if way == "fsdp2":
        for layer in (*layers.layers, model):
            fully_shard(layer, reshard_after_forward=False)
    else:
        model = DistributedDataParallel(model)
    if way == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if way in ("gradients", "optimizer"):
        model, optimizer = legato.distribute(model, optimizer, shard=way)
    tokens = torch.randint(2048, (8, 64))
    while True:
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if way in ("gradients", "optimizer") and legato.attachment(model).observed:
            continue
        yield


def rank_main(result: Path, rounds: int = 8, steps: int = 3) -> None:
    import torch.distributed as dist

    from legato.lab.testbed.rank import gloo_rank

    with gloo_rank():
        training = {way: trained(way) for way in WAYS}
        for way in WAYS:
            next(training[way])
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _, way in itertools.product(range(rounds), WAYS):
            next(training[way])  # what the way before left behind
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                next(training[way])
            seconds[way].append((time.perf_counter() - start) / steps)
        if dist.get_rank() == 0:
            result.write_text(json.dumps({way: statistics.median(seconds[way]) for way in WAYS}))


def measure(bandwidth: str) -> None:
    from legato.core.quantities import parse_bandwidth
    from legato.lab.testbed.launch import run_workers

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the workers find this file
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        run_workers(
            [Path(__file__).stem, str(result)], 2, Path(folder) / "log", lambda *_: None, parse_bandwidth(bandwidth)
        )
        for way, seconds in json.loads(result.read_text()).items():
            print(f"{way:>20}{1e3 * seconds:>20.0f}")


def simulate() -> None:
    print("".join(f"{what:>20}" for what in ("model", "workers", *SCHEDULERS, "bound", "legato, no shards")))
    for name in ("resnet-v1-50", "vgg-16", "bert-base"):
        workload = with_adam(zoo.workload(name))
        for workers, bandwidth_bps in ((8, 10e9), (32, 25e9)):
            cluster = Cluster.derive(workers, bandwidth_bps, latency_s=30e-6, collectives=["ring"])
            plans = [schedule(scheduler, workload, cluster, shard="optimizer") for scheduler in SCHEDULERS]
            *sharded, whole = (
                legato.simulate(workload, plan, cluster).iteration_s
                for plan in (*plans, legato.plan(workload, cluster))
            )
            bound = legato.lower_bound(workload, cluster, shard="optimizer", step_last=True)
            figures = (1e3 * seconds for seconds in (*sharded, bound.seconds, whole))
            print(f"{name:>20}{workers:>20}" + "".join(f"{figure:>20.1f}" for figure in figures))


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):  # a worker of `measure`
        rank_main(Path(sys.argv[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", metavar="BANDWIDTH", help="measure between two hosts with such links")
    bandwidth = parser.parse_args().measured
    simulate() if bandwidth is None else measure(bandwidth)


if __name__ == "__main__":
    main()
