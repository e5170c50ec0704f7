"""Messages by every collective, in chunks and in halves: exact sums, DDP's weights, and what a dead peer does."""

import datetime
import os
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
import torch.distributed as dist
from support import PATIENCE_S
from support.ranks import Ranks, gathered, on_ranks
from support.rows import row
from support.training import OPTIMIZERS, build, distance, random_plan, rounding_error, train
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

import legato
from legato.collectives import COLLECTIVES
from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import PlanError, RankError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Op, Tensor, Workload
from legato.pytorch import attach, attachment
from legato.pytorch.network.channel import channel_for, check_message
from legato.pytorch.network.threads import batch_policy_threads
from legato.pytorch.parameters import trained_parameters
from legato.schedule import SCHEDULERS
from legato.schedule.compare import compare
from legato.schedule.published.dear import dear

SLICES = (Slice("any", 0, 4),)


# ---- what a backend carries out ------------------------------------------------------


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_plans_of_rings_run_over_nccl(scheduler):
    """A ring is what NCCL has of its own, in its own chunks: plans that have rings alone run there."""
    ops = (Op("f", "forward", 1e-3), Op("b", "backward", 2e-3, (0,)), Op("c", "backward", 2e-3, (1,)))
    workload = Workload("w", ops, (Tensor("x", 2**20, 1, (0,)), Tensor("y", 2**22, 2, (0,))))
    cluster = Cluster(8, {"ring": LinearCost(1e-4, 1e-9)})
    plan = legato.plan(workload, cluster, scheduler)
    for message in plan.messages:
        check_message(message, "m", "nccl")


@pytest.mark.parametrize("collective", ["shuffle", "halving-doubling", "no-such"])
def test_other_collectives_are_refused_with_the_command_that_helps(collective):
    with pytest.raises(PlanError, match=f"m.collective: '{collective}' .*--backend nccl"):
        check_message(Message(SLICES, collective=collective), "m", "nccl")


# ---- sums --------------------------------------------------------------------------


def check_sums(dtype=torch.float32, device="cpu"):
    """Every collective, depth and size, whole and in halves, handed over at once: all sums are exact."""
    rank, ranks, channel = dist.get_rank(), dist.get_world_size(), channel_for(dist.new_group())
    sent = []
    for name in (None, "gloo", *COLLECTIVES):
        for depth in (1, 2, 5) if name in COLLECTIVES else (1,):
            for size in (1, 2, 3, 4, 7, 24, 1000, 4099):
                for kinds in (("all_reduce",), ("reduce_scatter", "all_gather")):
                    numbers = [
                        ((torch.arange(size) * 7 + 13 * r + len(sent)) % 31).to(device, dtype) for r in range(ranks)
                    ]
                    buffer = numbers[rank].clone()
                    works = [channel(buffer, Message(SLICES, kind, name, depth)) for kind in kinds]
                    sent.append(((name, depth, size, kinds), works, buffer, sum(numbers)))
    for _, works, _, _ in sent:
        for work in works:
            work.wait()
            assert work.is_completed()
    for what, _, buffer, expected in sent:
        assert torch.equal(buffer, expected), what


@on_ranks(lambda size: size)
@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_sums_are_exact(size):
    check_sums()


@on_ranks(3)
@pytest.mark.slow
def test_sums_of_half_precision():
    check_sums(torch.bfloat16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@on_ranks(2)
def test_sums_of_tensors_on_a_gpu():
    check_sums(device="cuda")


@on_ranks(3)
@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_all_ranks_have_the_same_bits(name):
    """Of numbers whose sum depends on the order of additions."""
    rank, channel = dist.get_rank(), channel_for(dist.new_group())
    buffer = torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    channel(buffer, Message(SLICES, "all_reduce", name, 2)).wait()
    assert all(torch.equal(other, buffer) for other in gathered(buffer))


# ---- threads -----------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="not Linux")
@on_ranks(2)
def test_the_thread_that_waits_for_bytes_interrupts_nobody():
    """It is gloo's own."""
    group = dist.new_group()
    before = set(os.listdir("/proc/self/task"))
    channel = channel_for(group)
    gloos = set(os.listdir("/proc/self/task")) - before
    assert {os.sched_getscheduler(int(task)) for task in gloos} == {os.SCHED_BATCH}
    channel(torch.zeros(10), Message(SLICES)).wait()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="not Linux")
@pytest.mark.parametrize("forbidden", ["sched_getscheduler", "sched_setscheduler"])
def test_where_policies_are_forbidden_threads_keep_theirs(monkeypatch, forbidden):
    def refuse(*_):
        raise PermissionError

    look = os.sched_getscheduler
    monkeypatch.setattr(os, forbidden, refuse)
    with batch_policy_threads():
        assert look(0) == os.SCHED_OTHER


def channel_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("legato-channel")}


@on_ranks(2)
def test_a_thread_only_where_there_are_steps():
    """Not with the backend's own all-reduces alone, and no longer when the channel is gone."""
    before, channel = channel_threads(), channel_for(dist.new_group())
    channel(torch.zeros(10), Message(SLICES)).wait()
    assert channel_threads() <= before
    channel(torch.zeros(10), Message(SLICES, "all_reduce", "ring")).wait()
    (thread,) = channel_threads() - before
    del channel
    thread.join(PATIENCE_S)
    assert channel_threads() <= before


# ---- trainings ---------------------------------------------------------------------


class Seen(torch.optim.Optimizer):
    """Says which parameters it updates."""

    steps_parameters_alone = True

    def __init__(self, model, say):
        super().__init__(model.parameters(), {})
        self.names, self.say = {id(p): name for name, p in model.named_parameters()}, say

    def step(self):
        self.say([self.names[id(p)] for g in self.param_groups for p in g["params"] if p.grad is not None])


@on_ranks(2)
def test_what_is_there_is_updated_while_the_rest_is_waited_for():
    """Rank 1 sends `late` only when rank 0, which asks for it first, has updated `early`."""
    rank, store, updated = dist.get_rank(), _get_default_store(), []

    def say(names):
        updated.append(names)
        store.set(f"updated on {rank}", "")

    model = nn.ModuleDict({name: nn.Linear(3, 1, bias=False) for name in ("late", "early")})
    messages = tuple(Message((Slice(f"{name}.weight", 0, 12),)) for name in ("early", "late"))
    wrapped, optimizer = attach(model, Seen(model, say), Plan("p", messages, forward_overlap=True))
    attachment(wrapped)._forward.readers.may_wait = lambda _: True  # there is no forward pass to watch,
    attachment(wrapped).reducer.armed = True  # nor one of the wrapped model
    late, early = (model[name](torch.ones(1, 3)).sum() for name in ("late", "early"))
    if rank == 1:
        late.register_hook(lambda _: store.wait(["updated on 0"], datetime.timedelta(seconds=PATIENCE_S)))
    (late + early).backward()
    optimizer.step()
    if rank == 0:
        attachment(wrapped).reducer.buckets[0].work.wait()  # `early` is in
        model["late"].weight.sum()
    attachment(wrapped).flush()
    dist.barrier()
    store.delete_key(f"updated on {rank}")
    assert rank == 1 or updated == [["early.weight"], ["late.weight"]]


@on_ranks(2)
def test_a_gradient_goes_out_while_the_rest_of_it_is_packed():
    """One tensor is in two messages."""
    model, happened = nn.Linear(4, 2, bias=False), []
    messages = tuple(Message((Slice("weight", start, start + 16),)) for start in (0, 16))
    wrapped, optimizer = attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Plan("p", messages, forward_overlap=True)
    )
    reducer = attachment(wrapped).reducer
    pack, launch = reducer.delivery.pack, reducer.messages.launch

    def packing(bucket):
        happened.append(f"packed {bucket.index}")
        pack(bucket)

    def sending(bucket):
        happened.append(f"sent {bucket.index}")
        launch(bucket)

    reducer.delivery.pack, reducer.messages.launch = packing, sending
    wrapped(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    attachment(wrapped).flush()
    assert happened == ["packed 0", "sent 0", "packed 1", "sent 1"]


def mixed(plan, seed):
    """The same slices by random collectives and depths, some in halves, whose second ones come at any later place."""
    rng = random.Random(seed)
    messages, waiting = [], []
    for message in plan.messages:
        name = rng.choice([None, "gloo", *COLLECTIVES])
        depth = rng.choice([1, 2, 5]) if name in COLLECTIVES else 1
        whole = rng.random() < 0.5
        sent = msgspec.structs.replace(
            message, collective=name, depth=depth, kind="all_reduce" if whole else "reduce_scatter"
        )
        messages.append(sent)
        if not whole:
            waiting.append(msgspec.structs.replace(sent, kind="all_gather", slices=sent.slices[::-1]))
        while waiting and rng.random() < 0.4:
            messages.append(waiting.pop(rng.randrange(len(waiting))))
    return msgspec.structs.replace(plan, messages=(*messages, *waiting))


def trained(kind, name, optimizer, plan_of, steps=8, **training):
    """A model under DDP, or under the plan that `plan_of` makes for it."""
    model = build(name)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=name == "Partial")
        return train(wrapped, optimizer, steps, **training)
    return train(*attach(model, optimizer, plan_of(model)), steps, **training)


@row()
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", ["Convolutional", "Attention"])
def test_weights_are_those_of_ddp(kind, model, seed):
    """Under plans that mix everything."""
    return trained(kind, model, "adam", lambda m: mixed(random_plan(m, seed, forward_overlap=seed != 3), seed))


@row()
def test_parameters_without_gradient(kind):
    return trained(kind, "Partial", "momentum", lambda model: mixed(random_plan(model, 1), 1))


@row()
def test_gradients_that_are_dropped(kind):
    """Now and then, while their second halves are still to come."""
    skipping = {"step": lambda o, i: None if i % 3 == 1 else o.step(), "zero": "after"}
    return trained(kind, "Convolutional", "momentum", lambda model: mixed(random_plan(model, 5), 5), **skipping)


def workload(model):
    """A workload that computes these parameters' gradients in reverse order."""
    parameters = trained_parameters(model)
    n = len(parameters)
    ops = [Op(f"forward {i}", "forward", 1e-3, (i - 1,) if i else ()) for i in range(n)]
    ops += [Op(f"backward {i}", "backward", 1e-3, (n + i - 1,)) for i in range(n)]
    tensors = [
        Tensor(name, p.numel() * p.element_size(), 2 * n - 1 - i, (i,))
        for i, (name, p) in enumerate(parameters.items())
    ]
    return Workload("model", tuple(ops), tuple(tensors), 4, "cpu")


@row()
@pytest.mark.parametrize(
    ("collective", "buffer_bytes"), [("ring", 25 * 2**20), ("halving-doubling", 1), ("shuffle", 999)]
)
def test_dear(kind, collective, buffer_bytes):
    cluster = Cluster.derive(dist.get_world_size(), 1e9, 1e-5)
    options = {"collective": collective, "buffer_bytes": buffer_bytes}
    return trained(kind, "Convolutional", "adam", lambda model: dear(workload(model), cluster, **options))


@pytest.fixture
def plans():
    """What can be run of what the schedulers make of a model on two ranks, with several collectives to choose from."""
    cluster = Cluster.derive(2, 1e9, 1e-6, reduce_s_per_byte=1e-8)
    return [c.plan for c in compare(workload(build("Convolutional")), cluster) if c.runnable]


@on_ranks(2)
@pytest.mark.slow
def test_the_plans_of_all_schedulers(plans):
    assert {"ddp", "mg-wfbp", "pace", "dear", "legato"} <= {plan.scheduler for plan in plans}
    ddp = trained("ddp", "Convolutional", "adam", None, 4)
    for plan in plans:
        legato = trained("legato", "Convolutional", "adam", lambda _, plan=plan: plan, 4)
        assert distance(ddp, legato) == 0.0, plan.scheduler


@on_ranks(3)
@pytest.mark.parametrize("seed", range(2))
def test_gradient_within_the_rounding_bound(seed):
    model = build("Convolutional")
    assert rounding_error(model, mixed(random_plan(model, seed), seed)) <= 1


# ---- plans that are refused --------------------------------------------------------

WHOLE = Message((Slice("weight", 0, 32),))


def message(**changes):
    return msgspec.structs.replace(WHOLE, **changes)


@on_ranks(2)
@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([message(collective="butterfly")], "messages[0].collective: 'butterfly' (this runtime carries out gloo, "),
        ([message(depth=2)], "messages[0].depth: 2 (expected 1 with gloo's own all-reduce)"),
        ([message(kind="push"), message(kind="pull")], "messages[0].kind: 'push' (expected 'all_reduce', "),
        ([message(kind="push")], "messages[0].kind: 'push' (expected 'all_reduce', "),
        (
            [message(kind="all_gather"), message(kind="reduce_scatter")],
            "messages[0]: an all_gather whose slices are not one earlier reduce_sc",
        ),
        (
            [
                message(kind="reduce_scatter"),
                message(kind="all_gather", slices=(Slice("weight", 0, 16),)),
                message(kind="all_gather", slices=(Slice("weight", 16, 32),)),
            ],
            "messages[1]: an all_gather whose slices are not one earlier reduce_scatter",
        ),
        (
            [message(kind="reduce_scatter", collective="ring"), message(kind="all_gather", collective="tree")],
            "messages[1]: an all_gather by collective, depth and wire ('tree', 1, None)",
        ),
    ],
    ids=[
        "unknown collective",
        "depth of the backend's own",
        "push and pull",
        "push alone",
        "gathered before it is scattered",
        "gathered in pieces",
        "gathered by another collective",
    ],
)
def test_plans_that_are_refused(messages, line):
    model = nn.Linear(4, 2, bias=False)
    with pytest.raises(PlanError, match=re.escape(line)):
        attach(model, OPTIMIZERS["sgd"](model.parameters()), Plan("odd", tuple(messages)))


# ---- peers that die ----------------------------------------------------------------


def leave_messages():
    """Rank 1 goes when all collectives have its messages under way; what the others are told, by collective."""
    patience = datetime.timedelta(seconds=60)
    channels = {name: channel_for(dist.new_group(timeout=patience)) for name in COLLECTIVES}
    for name, channel in channels.items():
        channel(torch.zeros(10), Message(SLICES, "all_reduce", name, 2)).wait()
    dist.barrier()
    works = {
        name: channel(torch.zeros(2**22), Message(SLICES, "all_reduce", name, 2)) for name, channel in channels.items()
    }
    if dist.get_rank() == 1:
        os._exit(0)

    def told(name):
        errors = []
        for work in works[name], channels[name](torch.zeros(2**22), Message(SLICES, "all_reduce", name, 2)):
            try:
                work.wait()
            except RuntimeError as error:
                errors.append(str(error))
        return errors[-1]

    with ThreadPoolExecutor(len(COLLECTIVES)) as waiting:  # all at once, each until patience ends
        return dict(zip(COLLECTIVES, waiting.map(told, COLLECTIVES), strict=True))


@pytest.mark.slow
def test_a_peer_that_dies():
    ranks = Ranks(3)
    try:
        ranks.begin(leave_messages)
        for rank in (0, 2):
            ok, errors = ranks.answer(rank)
            assert ok and sorted(errors) == sorted(COLLECTIVES)
    finally:
        ranks.close(force=True)


def leave_in_the_backward_pass():
    """Rank 1 goes in the middle of it; what the other is told."""
    model = build("Recurrent")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    slices = [Slice(n, 0, p.numel() * p.element_size()) for n, p in reversed(trained_parameters(model).items())]
    steps = Message(tuple(slices[:2]), "all_reduce", "halving-doubling", 2)
    halves = [Message(tuple(slices[2:]), kind, "ring") for kind in ("reduce_scatter", "all_gather")]
    wrapped, optimizer = attach(model, optimizer, Plan("mortal", (steps, *halves), forward_overlap=True))
    train(wrapped, optimizer, 2)
    if dist.get_rank() == 1:
        model.embed.weight.register_post_accumulate_grad_hook(lambda _: os._exit(0))
    with pytest.raises(RankError, match=r"^rank 0: message .* of backward pass 3 "):
        train(wrapped, optimizer, 2)


@pytest.mark.slow
def test_a_peer_that_dies_in_training():
    ranks = Ranks(2)
    try:
        ranks.begin(leave_in_the_backward_pass)
        ok, said = ranks.answer(0)
        assert ok, said
    finally:
        ranks.close(force=True)
