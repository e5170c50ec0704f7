"""Peak memory of a training step on two ranks: DistributedDataParallel and legato, with and without bucket views.

    python benchmarks/memory.py [--layers 24] [--width 1024] [--mmap-threshold 1000000] [--shards]

The model is a stack of linear layers with few activations, so nearly all memory
holds parameters, gradients, messages and optimizer states: the worst case for a
copy of the gradients. Every kind of training runs in separate processes. The
benchmark prints how much more memory rank 0 holds than before the model was made:
at the peak of all steps, at the peak of the last step, and after the last step. It
also prints the size of the states. A view is a gradient inside a bucket
(`gradient_as_bucket_view`). With `--shards`, the kinds are DDP, DDP with
ZeroRedundancyOptimizer, and legato's ZeRO-1 and ZeRO-2 without views: under a given
plan, and (`auto`) under the plan that a tournament of two rounds has kept. The peak
of `auto` is that of its first steps, which have whole states.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F

from legato.auto import default_buckets, distribute
from legato.core.plan import Message, Plan, Slice
from legato.pytorch.parameters import trained_parameters
from legato.pytorch.runtime.attached import tournament
from legato.pytorch.runtime.attached.attach import attach, attachment_of

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
SHARDS = [
    "ddp",
    "ddp, views",
    "ddp+zero",
    "ddp+zero, views",
    "per tensor, views",
    "per tensor, optimizer",
    "per tensor, gradients",
    "auto, optimizer",
    "auto, gradients",
]


def resident_bytes() -> int:
    """Return the bytes that this process holds in memory now."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    """The most that this process has held since its peak was forgotten."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def rank_main(rank: int, port: int, kind: str, layers: int, width: int, results) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    before = resident_bytes()
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    name, _, option = kind.partition(", ")
    views, shard = option == "views", option if option in ("optimizer", "gradients") else "none"
    if name.startswith("ddp"):
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
        if name == "ddp+zero":
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=1e-4
            )
    elif name == "auto":
        tournament.FEWEST_ROUNDS = tournament.MOST_ROUNDS = 2
        wrapped, optimizer = distribute(model, optimizer, shard=shard)
    else:
        plan = PLANS[name](model)
        wrapped, optimizer = attach(model, optimizer, plan, shard=shard, gradient_as_bucket_view=views)
    x = torch.randn(4, width)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(wrapped(x), x).backward()
        optimizer.step()

    attached = attachment_of(wrapped)
    while attached is not None and attached.observed:
        step()
    for i in range(STEPS):
        if i == STEPS - 1:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        step()
    last = peak_bytes()
    standing = sum(t.nbytes for t in model.parameters())
    if attached is not None:
        attached.flush()
    optimizer.zero_grad()
    states = getattr(optimizer, "optim", optimizer).state.values()
    state = sum(v.nbytes for entries in states for v in entries.values())
    results.put((rank, standing, max(peak, last) - before, last - before, resident_bytes() - before, state))
    dist.barrier()
    dist.destroy_process_group()


def measured(kind: str, layers: int, width: int) -> tuple[int, ...]:
    """Bytes on rank 0: parameters, the most that training holds, in the last step, after it, and the states."""
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
    parser.add_argument("--shards", action="store_true", help="sharded optimizers and gradients")
    options = parser.parse_args()
    if options.mmap_threshold is not None:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(options.mmap_threshold)
    kinds = SHARDS if options.shards else KINDS
    found = {kind: measured(kind, options.layers, options.width) for kind in kinds}
    parameters, reference, *_ = found["ddp, views"]
    print(f"parameters: {parameters / 2**20:.0f} MiB")
    for kind, (_, peak, last, end, state) in found.items():
        times, more = peak / parameters, peak / reference - 1
        last_step = f"last step {last / 2**20:.1f}, after it {end / 2**20:.1f}, states {state / 2**20:.1f}"
        print(f"{kind:21} {peak / 2**20:8.1f} MiB   {times:.2f} times the parameters   {more:+6.1%}   {last_step}")


if __name__ == "__main__":
    main()
