"""Peak memory of a training step on two ranks: DistributedDataParallel and legato, with gradient_as_bucket_view or not.

    python benchmarks/memory.py [--layers 24] [--width 1024] [--mmap-threshold 1000000]

The model is a stack of linear layers with few activations, so that parameters,
gradients, messages and optimizer state are nearly all there is: the worst case
for a copy of the gradients. Every kind runs in processes of its own. Printed is
how much the largest resident set of rank 0 lies above the one before the model.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from legato.auto import default_buckets
from legato.core.plan import Message, Plan, Slice
from legato.pytorch import wrap_model
from legato.pytorch.parameters import trained_parameters

STEPS = 4


def per_tensor(model: nn.Module) -> Plan:
    parameters = reversed(trained_parameters(model).items())
    whole = tuple(Message((Slice(n, 0, p.numel() * p.element_size()),)) for n, p in parameters)
    return Plan("per tensor", whole, forward_overlap=True)


def merged(model: nn.Module) -> Plan:
    return Plan("merged", default_buckets(model).messages, forward_overlap=True)


def cut(model: nn.Module) -> Plan:
    """Every tensor in four messages."""
    messages = []
    for n, p in reversed(trained_parameters(model).items()):
        nbytes, elements = p.numel() * p.element_size(), p.numel()
        ends = [elements * i // 4 * p.element_size() for i in range(5)]
        messages += [Message((Slice(n, a, b),)) for a, b in itertools.pairwise(ends) if a < b <= nbytes]
    return Plan("cut", tuple(messages), forward_overlap=True)


PLANS = {"per tensor": per_tensor, "merged": merged, "cut": cut, "no overlap": default_buckets}
KINDS = [f"{name}{views}" for name in ("ddp", *PLANS) for views in ("", ", views")]


def resident_bytes() -> int:
    """What this process holds in memory now."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def rank_main(rank: int, port: int, kind: str, layers: int, width: int, results) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    before = resident_bytes()
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    name, _, views = kind.partition(", ")
    if name == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=bool(views))
    else:
        plan = PLANS[name](model)
        wrapped, optimizer = wrap_model(model, optimizer, plan, gradient_as_bucket_view=bool(views))
    x = torch.randn(4, width)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(wrapped(x), x).backward()
        optimizer.step()

    for _ in range(STEPS):
        step()
    standing = sum(t.nbytes for t in model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results.put((rank, standing, peak - before))
    dist.destroy_process_group()


def measured(kind: str, layers: int, width: int) -> tuple[int, int]:
    """Bytes of the parameters, and of all that training holds at most, on rank 0."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [context.Process(target=rank_main, args=(r, port, kind, layers, width, results)) for r in range(2)]
    for process in ranks:
        process.start()
    found = sorted(results.get() for _ in ranks)
    for process in ranks:
        process.join()
    return found[0][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument(
        "--mmap-threshold",
        type=int,
        help="bytes; glibc's own grows with what was freed, and leaves holes; a fixed one shows what is really held",
    )
    options = parser.parse_args()
    if options.mmap_threshold is not None:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(options.mmap_threshold)
    found = {kind: measured(kind, options.layers, options.width) for kind in KINDS}
    parameters, reference = found["ddp, views"]
    print(f"parameters: {parameters / 2**20:.0f} MiB")
    for kind, (_, peak) in found.items():
        times, more = peak / parameters, peak / reference - 1
        print(f"{kind:17} {peak / 2**20:8.1f} MiB   {times:.2f} times the parameters   {more:+.1%}")


if __name__ == "__main__":
    main()
