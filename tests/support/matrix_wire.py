"""Gradients that travel in another format. Everything here runs on the ranks."""

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import legato
from legato.core.plan import Message, Plan, Slice
from legato.pytorch import attach, attachment
from support.automatic import DECIDED, short_tournaments
from support.matrix_rows import STEPS, Dense, adam
from support.training import MODELS, distance, random_plan, train


def _hook(wire):
    """torch's hook under another name: DDP takes that of bf16 over NCCL only, though it does the same over gloo."""
    compress = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[wire]

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return compress(state, bucket)

    return hook


def in_wire(plan, wire, chosen=lambda: True):
    """The plan with chosen messages in a wire format; halves of one message alike."""
    of = {}
    for message in plan.messages:
        of.setdefault(message.slices, wire if chosen() else None)
    messages = tuple(msgspec.structs.replace(message, wire=of[message.slices]) for message in plan.messages)
    return msgspec.structs.replace(plan, messages=messages)


def as_hook(name, wire, **options):
    """All messages in a wire format, against DDP with torch's hook that compresses."""
    trained = []
    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = MODELS[name]()
        optimizer = adam(model.parameters())
        if kind == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
            wrapped.register_comm_hook(None, _hook(wire))
        else:
            wrapped, optimizer = attach(model, optimizer, in_wire(random_plan(model, 3), wire), **options)
        trained.append(train(wrapped, optimizer, STEPS))
    return distance(*trained)


def halves(wire):
    """Reduce-scatters and all-gathers in a wire format, against all-reduces; some messages are exact."""
    trained = []
    for cut in (False, True):
        torch.manual_seed(7)
        model = Dense()
        plan = in_wire(random_plan(model, 5), wire, iter([True, False] * 9).__next__)
        if cut:
            first = [msgspec.structs.replace(m, kind="reduce_scatter") for m in plan.messages]
            second = [msgspec.structs.replace(m, kind="all_gather") for m in plan.messages]
            plan = msgspec.structs.replace(plan, messages=(*first, *reversed(second)))
        wrapped, optimizer = attach(model, adam(model.parameters()), plan)
        trained.append(train(wrapped, optimizer, STEPS))
    return distance(*trained)


def exact_dtypes(dtype):
    """What is not float32 travels as it is."""
    trained = []
    for wire in (None, "bf16"):
        torch.manual_seed(7)
        model = Dense(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wrapped, optimizer = attach(model, optimizer, in_wire(random_plan(model, 3), wire))
        trained.append(train(wrapped, optimizer, STEPS))
    return distance(*trained)


class Constant(nn.Module):
    """Its gradient is the same in every step."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))

    def forward(self, x):
        return (self.weight * x).sum()


def lost(error_feedback, steps=50):
    """What is missing in the sum of so many averaged gradients, in units of the rounding of one."""
    model = Constant()
    size = model.weight.nbytes
    plan = Plan("halves", (Message((Slice("weight", 0, 1600),), wire="bf16"), Message((Slice("weight", 1600, size),))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped, optimizer = attach(model, optimizer, plan, error_feedback=error_feedback)
    x = torch.rand(1000, generator=torch.Generator().manual_seed(1)) + 1  # on all ranks
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(x).backward()
        optimizer.step()
    missing = (model.weight.detach() + steps * x).abs()
    return (missing[:400].max() / 2**-8).item(), (missing[400:].max() / 2**-8).item()


def distributed(wire, given):
    """Wire formats of the messages under `distribute(wire=)`, with a plan that was given or one of its own."""
    torch.manual_seed(7)
    model = Dense()
    plan = in_wire(random_plan(model, 5), *given) if given else "auto"
    wrapped, optimizer = legato.distribute(model, adam(model.parameters()), plan, wire=wire, error_feedback=True)
    with short_tournaments():
        train(wrapped, optimizer, DECIDED if plan == "auto" else 2)
    return sorted({message.wire or "" for message in attachment(wrapped).plan.messages})
