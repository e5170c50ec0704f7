"""The runtime's own cost: one process, in which every message arrives at once.

    python benchmarks/runtime.py [--iterations 40] [--cuda]

For each model and plan (a message per tensor; a message per 20 tensors; one message), the
benchmark prints the CPU time of an iteration with DistributedDataParallel and with legato, and
the ratio, all as medians. The time to wrap the model is also printed. With `--cuda`, the model
is on a GPU with NCCL, and times end when the GPU is done. Blocks of five iterations of both
kinds alternate, and a ratio compares two neighbouring blocks, so a machine that slows down
slows both. (A block ends when all updates are applied. Otherwise, DDP's next module call would
wait for the updates.)
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

from legato.core.plan import Message, Plan, Slice
from legato.pytorch import attach, attachment
from legato.pytorch.parameters import trained_parameters

BLOCK = 5


def plans(model: nn.Module) -> dict[str, Plan]:
    """A message per tensor, one for 20 tensors, and one for all, with forward overlap."""
    slices = [Slice(n, 0, p.numel() * p.element_size()) for n, p in reversed(trained_parameters(model).items())]
    apart = Plan("per tensor", tuple(Message((s,)) for s in slices), forward_overlap=True)
    merged = Plan("merged", tuple(Message(tuple(slices[i : i + 20])) for i in range(0, len(slices), 20)), True)
    return {"per tensor": apart, "merged": merged, "single": Plan("single", (Message(tuple(slices)),), True)}


def training(build, kind):
    torch.manual_seed(0)
    with torch.device("cuda" if dist.get_backend() == "nccl" else "cpu"):
        model, optimizer, loss_of = build()
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        plan = plans(model)[kind]
        start = time.perf_counter()
        wrapped, optimizer = attach(model, optimizer, plan)
        print(f"{build.__name__:9} {kind:11} wrapped in {time.perf_counter() - start:.2f} s")

    def block():
        for _ in range(BLOCK):
            optimizer.zero_grad()
            loss_of(wrapped).backward()
            optimizer.step()
        if kind != "ddp":
            attachment(wrapped).flush()

    return block


def resnet50():
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    x, y = torch.randn(2, 3, 64, 64), torch.randint(0, 1000, (2,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, lambda m: m(pixel_values=x, labels=y).loss


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_head=8, n_embd=256, vocab_size=8000))
    x = torch.randint(0, 8000, (2, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), lambda m: m(input_ids=x, labels=x).loss


class Tiny(nn.Module):
    """5,000 parameters of four elements: nothing to compute or send."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(5000))

    def forward(self) -> torch.Tensor:
        return torch.stack([(p * p).sum() for p in self.parts]).sum()


def tiny():
    model = Tiny()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), lambda m: m()


def seconds(block):
    cuda = dist.get_backend() == "nccl"
    clock = time.perf_counter if cuda else time.process_time
    start = clock()
    block()
    if cuda:
        torch.cuda.synchronize()
    return (clock() - start) / BLOCK


def compare(build, kind, iterations):
    blocks = [training(build, "ddp"), training(build, kind)]
    pairs = [[seconds(block) for block in blocks] for _ in range(1 + iterations // BLOCK)][1:]
    ddp, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"{build.__name__:9} {kind:11} {ours * 1e3:8.1f} ms, DDP {ddp * 1e3:8.1f} ms: {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--cuda", action="store_true")
    options = parser.parse_args()
    backend = "nccl" if options.cuda else "gloo"
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group(backend, init_method=f"file://{store.name}", rank=0, world_size=1)
        for build in (resnet50, gpt2) if options.cuda else (tiny, resnet50, gpt2):
            for kind in ("per tensor", "merged", "single"):
                compare(build, kind, options.iterations)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
