"""Wire formats: everything in one is what torch's hooks do, and what is not in one is exact."""

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
from legato.pytorch import attach, attachment

pytestmark = pytest.mark.slow

WIRES = pytest.mark.parametrize("wire", ["bf16", "fp16"])


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


# ---- legato.distribute(wire=) ------------------------------------------------------


def formats(wire, given=None):
    """Formats of the messages under `distribute(wire=)`, with a plan in a given format."""
    model = Dense()
    wrapped, optimizer = legato.distribute(
        model, adam(model.parameters()), in_wire(random_plan(model, 5), given), wire=wire
    )
    train(wrapped, optimizer, 2)
    return {message.wire for message in attachment(wrapped).plan.messages}


@on_ranks(2)
@pytest.mark.parametrize(
    ("wire", "given", "kept"), [("fp16", None, "fp16"), ("fp16", "bf16", "fp16"), ("none", "bf16", "bf16")]
)
def test_distribute_takes_a_wire_format_and_a_plan(wire, given, kept):
    assert formats(wire, given) == {kept}


@on_ranks(2)
def test_distribute_takes_a_wire_format():
    """Its plan is one of legato's own."""
    model = Dense()
    wrapped, optimizer = legato.distribute(model, adam(model.parameters()), "auto", wire="bf16")
    with short_tournaments():
        train(wrapped, optimizer, DECIDED)
    assert attachment(wrapped).plan.wires == ["bf16"]


UNKNOWN = "unknown wire 'fp8'; did you mean 'fp16'? known: none, bf16, fp16"


@on_ranks(2)
def test_an_unknown_format_is_an_error():
    model = Dense()
    for plan in ("auto", random_plan(model, 5)):
        with pytest.raises(legato.InputError, match=re.escape(UNKNOWN)):
            legato.distribute(model, adam(model.parameters()), plan, wire="fp8")


@on_ranks(2)
@pytest.mark.parametrize("plan", ["auto", "given"])
def test_a_format_and_shards_are_refused_together(plan):
    model, shard = Dense(), "optimizer"
    if plan == "given":
        plan, shard = random_plan(model, 5).sharded("optimizer", {}), "none"
    line = "wire: 'bf16' with shard 'optimizer' (expected one or the other)"
    with pytest.raises(legato.InputError, match=re.escape(line)):
        legato.distribute(model, adam(model.parameters()), plan, shard=shard, wire="bf16")
