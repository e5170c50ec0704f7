"""Wire formats: everything in one is what torch's hooks do, and what is not in one is exact."""

import itertools
import re

import msgspec
import pytest
import torch
import torch.distributed as dist
from support.automatic import DECIDED, short_tournaments
from support.ranks import on_ranks
from support.rows import row
from support.training import OPTIONS, STEPS, Dense, adam, build, distance, random_plan, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import legato
from legato.collectives import COLLECTIVES
from legato.core.plan import Message, Plan, Slice
from legato.pytorch import attach, attachment

pytestmark = pytest.mark.slow

#: The largest error of rounding: of a number of ordinary size, relative to it, and of a tiny one.
ROUNDING = {"bf16": (2.0**-8, 0.0), "fp16": (2.0**-11, 2.0**-25)}
WIRES = pytest.mark.parametrize("wire", ROUNDING)


def in_wire(plan, wire, chosen=lambda: True):
    """The plan with chosen messages in a wire format; halves of one message alike."""
    wires = {}
    for message in plan.messages:
        wires.setdefault(message.slices, wire if chosen() else None)
    messages = tuple(msgspec.structs.replace(message, wire=wires[message.slices]) for message in plan.messages)
    return msgspec.structs.replace(plan, messages=messages)


# ---- what is in a format, and what is not ------------------------------------------


@row("views")
@WIRES
@pytest.mark.parametrize("model", ["Convolutional", "Attention", "Recurrent"])
def test_all_messages_in_a_wire_format_are_what_torchs_hooks_send(kind, model, wire):
    compress = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[wire]

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP takes torch's hook of bf16 over NCCL only, though it does the same over gloo: hence another name."""
        return compress(state, bucket)

    model = build(model)
    optimizer = adam(model.parameters())
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(None, hook)
        return train(wrapped, optimizer, STEPS)
    return train(*attach(model, optimizer, in_wire(random_plan(model, 3), wire), **OPTIONS), STEPS)


@row()
@WIRES
def test_halves_round_as_a_whole_message_does(wire):
    """Some messages are exact."""
    trained = []
    for cut in (False, True):
        torch.manual_seed(7)
        model = Dense()
        plan = in_wire(random_plan(model, 5), wire, iter([True, False] * 9).__next__)
        if cut:
            first = [msgspec.structs.replace(m, kind="reduce_scatter") for m in plan.messages]
            second = [msgspec.structs.replace(m, kind="all_gather") for m in plan.messages]
            plan = msgspec.structs.replace(plan, messages=(*first, *reversed(second)))
        trained.append(train(*attach(model, adam(model.parameters()), plan), STEPS))
    return distance(*trained)


@row()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_what_is_not_float32_travels_as_it_is(dtype):
    trained = []
    for wire in (None, "bf16"):
        torch.manual_seed(7)
        model = Dense(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        trained.append(train(*attach(model, optimizer, in_wire(random_plan(model, 3), wire)), STEPS))
    return distance(*trained)


# ---- error feedback ----------------------------------------------------------------


class Weights(nn.Module):
    """Its gradient is its input."""

    def __init__(self, count):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self, x):
        return (self.weight * x).sum()


@on_ranks(2)
@pytest.mark.parametrize("error_feedback", [False, True])
def test_error_feedback_loses_no_more_than_one_rounding(error_feedback):
    """In the sum of fifty averaged gradients, one part of which is rounded."""
    model, steps = Weights(1000), 50
    slices = Slice("weight", 0, 1600), Slice("weight", 1600, model.weight.nbytes)
    plan = Plan("halves", (Message(slices[:1], wire="bf16"), Message(slices[1:])))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped, optimizer = attach(model, optimizer, plan, error_feedback=error_feedback)
    x = torch.rand(1000, generator=torch.Generator().manual_seed(1)) + 1  # on all ranks
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(x).backward()
        optimizer.step()
    missing = (model.weight.detach() + steps * x).abs() / 2**-8  # in roundings of one gradient
    rounded, exact = missing[:400].max(), missing[400:].max()
    assert exact < 0.1
    assert rounded <= 1.1 if error_feedback else rounded > 10


@on_ranks(2)
@WIRES
def test_error_feedback_does_not_make_up_for_overflows(wire):
    """A gradient of 1 is exact after one that the format cannot hold."""
    model = Weights(1000)
    plan = Plan("rounded", (Message((Slice("weight", 0, model.weight.nbytes),), wire=wire),))
    wrapped, _ = attach(model, None, plan, error_feedback=True)
    for value in (torch.inf, -torch.inf, torch.nan, *((1e6, -1e6) if wire == "fp16" else ())):
        for x in (torch.full((1000,), value), torch.ones(1000)):
            model.weight.grad = None
            wrapped(x).backward()
        assert torch.equal(model.weight.grad, torch.ones(1000)), value


@on_ranks(lambda ranks, wire: ranks)
@WIRES
@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_with_error_feedback_sums_lack_no_more_than_a_bound(ranks, wire):
    """The bound of `docs/wire.md`, for all-reduces and halves by every collective."""
    ways = itertools.product(["all_reduce", "halves"], [(None, 1), *zip(COLLECTIVES, itertools.cycle([1, 3]))])
    for seed, (kind, how) in enumerate(ways):
        assert 0 < lacking(wire, kind, *how, seed) <= 1, (kind, how)


def lacking(wire, kind, collective, depth, seed, steps=20):
    """What a sum of averaged gradients lacks at most, over what it may lack.

    Each element has magnitudes of its own, and one gradient, or another in each step.
    """
    ranks, elements = dist.get_world_size(), 400
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (torch.rand(ranks, elements, generator=generator) * 5 - 4)
    steady = torch.randn(ranks, elements, generator=generator) * scale
    steady[0, 0], steady[1:, 0] = 1.0, 1e-3
    model = Weights(elements)
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
    return ((total - found).abs() / allowed).max()


# ---- legato.distribute(wire=) ------------------------------------------------------


def formats(wire, given=None):
    """Formats of the messages under `distribute(wire=)`, with a plan in a given format."""
    model = Dense()
    wrapped, optimizer = legato.distribute(
        model, adam(model.parameters()), in_wire(random_plan(model, 5), given), wire=wire, error_feedback=True
    )
    train(wrapped, optimizer, 2)
    return {message.wire for message in attachment(wrapped).plan.messages}


@on_ranks(2)
@pytest.mark.parametrize(("wire", "kept"), [("all-fp16", "fp16"), ("bf16", "bf16"), ("none", "bf16")])
def test_distribute_takes_a_wire_format_and_a_plan(wire, kept):
    assert formats(wire, "bf16") == {kept}


@on_ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize(("wire", "known"), [("all-bf16", {"bf16"}), ("bf16", {None, "bf16"})])
def test_distribute_takes_a_wire_format(wire, known):
    """Its plan is one of legato's own."""
    model = Dense()
    wrapped, optimizer = legato.distribute(model, adam(model.parameters()), "auto", wire=wire, error_feedback=True)
    with short_tournaments():
        train(wrapped, optimizer, DECIDED)
    assert {message.wire for message in attachment(wrapped).plan.messages} <= known


UNKNOWN = "unknown wire 'fp8'; did you mean 'fp16'? known: none, bf16, fp16, all-bf16, all-fp16"


@on_ranks(2)
@pytest.mark.parametrize(
    ("wire", "given", "line"),
    [
        ("fp8", "bf16", UNKNOWN),
        (
            "bf16",
            None,
            "wire: 'bf16' with a plan that rounds nothing (expected 'none' to carry it out as it is, or ",
        ),
        ("bf16", "fp16", "wire: 'bf16' with a plan that has messages in fp16 (expected 'none' to carry it out as"),
    ],
)
def test_an_error_about_a_format_names_what_is_valid(wire, given, line):
    with pytest.raises(legato.InputError, match=re.escape(line)):
        formats(wire, given)
    for valid in ("none", "all-bf16"):
        assert formats(valid, given)


@on_ranks(2)
def test_an_unknown_format_for_a_plan_of_legatos_own_is_an_error():
    model = Dense()
    with pytest.raises(legato.InputError, match=re.escape(UNKNOWN)):
        legato.distribute(model, adam(model.parameters()), wire="fp8", error_feedback=True)


@on_ranks(2)
@pytest.mark.parametrize("plan", ["auto", "given"])
def test_a_format_and_shards_are_refused_together(plan):
    model, shard = Dense(), "optimizer"
    if plan == "given":
        plan, shard = random_plan(model, 5).sharded("optimizer", {}), "none"
    line = "wire: 'all-bf16' with shard 'optimizer' (expected one or the other)"
    with pytest.raises(legato.InputError, match=re.escape(line)):
        legato.distribute(model, adam(model.parameters()), plan, shard=shard, wire="all-bf16")
