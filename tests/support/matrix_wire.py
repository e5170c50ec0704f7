"""Gradients that travel in another format. Everything here runs on the ranks."""

import itertools

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import legato
from legato.core.plan import Message, Plan, Slice
from legato.pytorch import attach, attachment
from legato.pytorch.network.rounds import ROUNDS
from support.automatic import DECIDED, short_tournaments
from support.matrix_rows import STEPS, Dense, adam
from support.training import MODELS, distance, random_plan, train, under_both


def _hook(wire):
    """torch's hook under another name: DDP takes that of bf16 over NCCL only, though it does the same over gloo."""
    compress = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[wire]

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return compress(state, bucket)

    return hook


def in_wire(plan, wire, chosen=lambda: True):
    """The plan with chosen messages in a wire format; halves of one message alike."""
    wires = {}
    for message in plan.messages:
        wires.setdefault(message.slices, wire if chosen() else None)
    messages = tuple(msgspec.structs.replace(message, wire=wires[message.slices]) for message in plan.messages)
    return msgspec.structs.replace(plan, messages=messages)


@under_both
def as_hook(kind, name, wire, **options):
    """All messages in a wire format, against DDP with torch's hook that compresses."""
    model = MODELS[name]()
    optimizer = adam(model.parameters())
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(None, _hook(wire))
    else:
        wrapped, optimizer = attach(model, optimizer, in_wire(random_plan(model, 3), wire), **options)
    return train(wrapped, optimizer, STEPS)


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
    """What is missing in the sum of this number of averaged gradients, in units of the rounding of one."""
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


def after_overflows(wire):
    """How far averaged gradients of 1 are off with feedback, each after one that the format cannot hold."""
    model, found = Constant(), []
    plan = Plan("rounded", (Message((Slice("weight", 0, model.weight.nbytes),), wire=wire),))
    wrapped, _ = attach(model, None, plan, error_feedback=True)
    for value in (torch.inf, -torch.inf, torch.nan, *((1e6, -1e6) if wire == "fp16" else ())):
        for x in (torch.full((1000,), value), torch.ones(1000)):
            model.weight.grad = None
            wrapped(x).backward()
        found.append((model.weight.grad - 1).abs().max().item())
    return found


#: The largest error of rounding: of a number of ordinary size, relative to it, and of a tiny one.
ROUNDING = {"bf16": (2.0**-8, 0.0), "fp16": (2.0**-11, 2.0**-25)}


def missing(wire):
    """What sums of averaged gradients lack at most with feedback, over what they may lack (`docs/wire.md`), by way."""
    ways = itertools.product(["all_reduce", "halves"], [(None, 1), *zip(ROUNDS, itertools.cycle([1, 3]))])
    return {(kind, *how): _missing(wire, kind, *how, seed) for seed, (kind, how) in enumerate(ways)}


def _missing(wire, kind, collective, depth, seed, steps=20):
    """The same in one way; each element has magnitudes of its own, and one gradient, or another in each step."""
    ranks, elements = dist.get_world_size(), 400
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (torch.rand(ranks, elements, generator=generator) * 5 - 4)
    steady = torch.randn(ranks, elements, generator=generator) * scale
    steady[0, 0], steady[1:, 0] = 1.0, 1e-3
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(elements))
    model.forward = lambda x: (model.weight * x).sum()
    cut = Slice("weight", 0, 1000), Slice("weight", 1000, model.weight.nbytes)
    kinds = ("reduce_scatter", "all_gather") if kind == "halves" else (kind,)
    messages = tuple(Message((piece,), k, collective, depth, wire=wire) for k in kinds for piece in cut)
    wrapped, _ = attach(model, None, Plan("rounded", messages), error_feedback=True)
    total, found, largest = (torch.zeros(elements, dtype=torch.float64) for _ in range(3))
    for _ in range(steps):
        changing = torch.randn(ranks, elements, generator=generator) * scale
        gradients = torch.cat([steady[:, :200], changing[:, 200:]], 1)
        model.weight.grad = None
        wrapped(gradients[dist.get_rank()]).backward()
        found += model.weight.grad
        total += gradients.double().mean(0)
        largest = torch.maximum(largest, gradients.double().abs().mean(0))
    relative, tiny = ROUNDING[wire]
    all_but_one = (1 + relative) ** ranks - 1
    float32 = steps * ranks * 2.0**-23 * largest  # which gradients have in any case
    allowed = (all_but_one * largest + ranks * tiny * (1 + relative) ** (ranks - 1)) / (1 - all_but_one) + float32
    return ((total - found).abs() / allowed).max().item()


def distributed(wire, given):
    """Wire formats of the messages under `distribute(wire=)`, with a plan that was given or one of its own."""
    torch.manual_seed(7)
    model = Dense()
    plan = in_wire(random_plan(model, 5), *given) if given else "auto"
    wrapped, optimizer = legato.distribute(model, adam(model.parameters()), plan, wire=wire, error_feedback=True)
    with short_tournaments():
        train(wrapped, optimizer, DECIDED if plan == "auto" else 2)
    return sorted({message.wire or "" for message in attachment(wrapped).plan.messages})


def sharded(plan):
    """`distribute` with a format and a sharded plan, or one that is to be made."""
    model = Dense()
    shard = "optimizer" if plan == "auto" else "none"
    if plan == "given":
        plan = random_plan(model, 5).sharded("optimizer", {})
    legato.distribute(model, adam(model.parameters()), plan, shard=shard, wire="all-bf16")
