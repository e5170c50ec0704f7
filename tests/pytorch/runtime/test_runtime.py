"""The runtime on real processes: the weights are DDP's, whatever the plan.

On two ranks a sum has one order only, so the weights must be equal bit for
bit. On three, the order of a sum depends on where a number lies in its
message; there one gradient is held against the exact sum with the bound of
rounding analysis, and many steps against the distance that DDP has from itself.
"""

import copy
import ctypes
import gc
import io
import multiprocessing
import os
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from support import PATIENCE_S
from support.ranks import Ranks, on_ranks
from support.rows import SHARDED, in_mode, row
from support.strategies import seeds, some
from support.training import (
    OPTIMIZERS,
    build,
    distance,
    first_passes,
    random_plan,
    rounding_error,
    sharded_plan,
    train,
    trained,
    wrap,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from legato.auto import default_buckets
from legato.core.errors import RankError
from legato.core.plan import Message, Plan, Slice
from legato.pytorch import attach, attachment
from legato.pytorch.parameters import trained_parameters
from legato.pytorch.runtime.waiting.gate import GatedParameter

# ---- what is trained ---------------------------------------------------------------


@row("views", "four ranks", *SHARDED)
@pytest.mark.parametrize(
    "model", some(["Convolutional", "Attention", "Recurrent", "Checkpointed"], ["Convolutional", "Attention"])
)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_weights_are_those_of_ddp(kind, model, optimizer):
    return trained(kind, model, optimizer)


@row(*SHARDED)
@pytest.mark.parametrize("optimizer", some(sorted(OPTIMIZERS), ["adam-fused", "adagrad", "sgd"]))
def test_any_optimizer(kind, optimizer):
    return trained(kind, "Attention", optimizer)


@row()
@pytest.mark.parametrize("seed", seeds(5, quick=2))
def test_any_plan(kind, seed):
    return trained(kind, "Convolutional", "adam", seed=100 + seed)


@row("views", "compiled", *SHARDED)
@pytest.mark.parametrize("optimizer", some(["momentum", "adam", "adamw"], ["adam"]))
def test_parameters_without_gradient(kind, optimizer):
    return trained(kind, "Partial", optimizer, seed=3)


@row(*SHARDED)
@pytest.mark.parametrize("zero", ["before", "between", "after"])
@pytest.mark.parametrize("set_to_none", some([True, False], [True]))
def test_zero_grad_anywhere(kind, zero, set_to_none):
    return trained(kind, "Convolutional", "momentum", zero=zero, set_to_none=set_to_none)


# ---- habits of training scripts ----------------------------------------------------


def clipped(kind):
    return trained(kind, "Attention", "adam", inner=lambda m, o, i: nn.utils.clip_grad_norm_(m.parameters(), 0.05))


@row()
def test_clipping(kind):
    return clipped(kind)


@on_ranks(2)
def test_clipping_parameters_is_refused_where_gradients_are_sharded():
    with pytest.raises(RankError, match="sharded"):
        in_mode(["sharded optimizer"], clipped, "legato")


@row()
def test_clipping_by_value(kind):
    return trained(kind, "Attention", "adam", inner=lambda m, o, i: nn.utils.clip_grad_value_(m.parameters(), 1e-3))


@row()
def test_gradients_are_changed(kind):
    def change(model, optimizer, i):
        for p in list(model.parameters())[:2]:
            p.grad.mul_(0.5)
            p.grad = p.grad + 0.01 * p.detach()

    return trained(kind, "Convolutional", "momentum", inner=change)


@row(*SHARDED)
def test_skipped_steps(kind):
    """As GradScaler does: now and then the gradients are thrown away."""
    return trained(kind, "Convolutional", "adam", step=lambda o, i: None if i % 3 == 1 else o.step(), zero="after")


@row(*SHARDED)
def test_own_hooks_read_gradients_in_the_backward_pass(kind):
    norms = []
    model = build("Convolutional")
    model, optimizer = wrap(kind, model, OPTIMIZERS["momentum"](model.parameters()))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
    return train(model, optimizer, 4), norms


@row()
def test_two_steps_on_the_same_gradients(kind):
    return trained(kind, "Convolutional", "momentum", step=lambda o, i: (o.step(), o.step()))


@row()
def test_hooks_on_the_optimizer_run_once_a_step(kind):
    calls = []
    model = build("Convolutional")
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    optimizer.register_step_post_hook(lambda *_: calls.append(torch.ones(1)))
    return train(*wrap(kind, model, optimizer), 4), calls


@row(*SHARDED)
@pytest.mark.parametrize("early", [False, True])
def test_a_scheduler_that_is_made_before_or_after(kind, early):
    model = build("Convolutional")
    optimizer = OPTIMIZERS["adam"](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7) if early else None
    model, optimizer = wrap(kind, model, optimizer)
    schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    return train(model, optimizer, 6, step=lambda o, i: (o.step(), schedule.step()))


@row()
def test_parameter_groups_and_strangers(kind):
    """Parameter groups of their own, one of them with parameters the model does not have."""
    model = build("Attention")
    stranger = nn.Parameter(torch.ones(3))
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if "norm" in n], "weight_decay": 0.0},
        {"params": [p for n, p in named.items() if "norm" not in n], "lr": 3e-3, "betas": (0.8, 0.9)},
        {"params": [stranger], "lr": 1.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)

    def pull(model, optimizer, i):
        stranger.grad = stranger.detach().clone()

    return train(*wrap(kind, model, optimizer), 6, inner=pull), [stranger]


@row("compiled", *SHARDED)
def test_accumulation(kind):
    """Three backward passes a step, the first two under `no_sync()`."""
    model = build("Convolutional")
    wrapped, optimizer = wrap(kind, model, OPTIMIZERS["momentum"](model.parameters()))
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    for _ in range(4):
        with wrapped.no_sync():
            for _ in range(2):
                x, y = model.batch(generator)
                F.cross_entropy(wrapped(x), y).backward()
        x, y = model.batch(generator)
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wrapped


@row()
def test_two_backward_passes_before_a_step_that_both_send(kind):
    """The second adds to the average of the first."""
    model = build("Convolutional")
    wrapped, optimizer = wrap(kind, model, OPTIMIZERS["momentum"](model.parameters()))
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    for _ in range(3):
        for _ in range(2):
            x, y = model.batch(generator)
            F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wrapped


@row()
def test_two_forward_passes_before_two_backward_passes(kind):
    """DDP sends in the first backward pass only."""
    model = build("Attention")
    torch.manual_seed(3)  # dropout
    wrapped, _ = wrap(kind, model, OPTIMIZERS["sgd"](model.parameters()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = [F.cross_entropy(wrapped(x), y) for x, y in (model.batch(generator) for _ in range(2))]
    for loss in losses:
        loss.backward()
    return wrapped, [p.grad for p in model.parameters()]


@row()
def test_evaluation_and_checkpoints_see_the_update(kind):
    seen = []
    model = build("Convolutional")
    wrapped, optimizer = wrap(kind, model, OPTIMIZERS["adam"](model.parameters()))
    x, _ = model.batch(torch.Generator().manual_seed(0))
    for i in range(4):
        train(wrapped, optimizer, 1, seed=i)
        wrapped.eval()
        with torch.no_grad():
            seen.append(model(x).clone())
        wrapped.train()
        train(wrapped, optimizer, 1, seed=10 + i)
        seen.append(model.head.weight.detach().clone())
        train(wrapped, optimizer, 1, seed=20 + i)
        state = optimizer.state_dict()["state"]
        seen += [state[i]["exp_avg"].clone() for i in sorted(state)]
        train(wrapped, optimizer, 1, seed=30 + i)
        seen += [copy.deepcopy(model).stem.weight, torch.nn.utils.parameters_to_vector(model.parameters())]
    return wrapped, seen


@row()
def test_lbfgs(kind):
    model = build("Partial").body
    model.batch = lambda g: (torch.randn(4, 12, generator=g), torch.randint(0, 12, (4,), generator=g))
    wrapped, optimizer = wrap(kind, model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x, y = model.batch(generator)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return wrapped


# ---- plans that change -------------------------------------------------------------


@row()
def test_another_plan_every_two_steps(kind):
    model = build("Convolutional")
    wrapped, optimizer = wrap(kind, model, OPTIMIZERS["adam"](model.parameters()))
    for i in range(4):
        train(wrapped, optimizer, 2, seed=i)
        if kind == "legato":
            attachment(wrapped).adopt(random_plan(model, 50 + i, forward_overlap=i % 2 == 0))
    return wrapped


@row()
@pytest.mark.parametrize("views", [False, True])
def test_another_plan_while_one_rank_runs_ddps_second_forward_pass_alone(kind, views):
    """DDP rebuilds its buckets there, and waits for the other ranks."""
    with first_passes(2):
        model = build("Checkpointed")
        optimizer = OPTIMIZERS["adam"](model.parameters())
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
        if kind == "legato":
            attach(ddp, optimizer, random_plan(model, 3))
        train(ddp, optimizer, 1)
        if dist.get_rank() == 0:
            ddp(model.batch(torch.Generator())[0])
        if kind == "legato":
            attachment(ddp).adopt(random_plan(model, 4))
        return train(ddp, optimizer, 6)


@row()
@pytest.mark.parametrize("views", some([False, True], [False]))
@pytest.mark.parametrize("what", ["whole", "halves", "optimizer", "gradients"])
def test_passes_become_ddps_and_legatos_again(kind, what, views):
    """Passes are DDP's in two steps of every four, under a plan of whole messages, halves, or shards."""
    model, ours = build("Convolutional"), []
    optimizer = OPTIMIZERS["adam"](model.parameters())
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
    if kind == "legato":
        plan = random_plan(model, 3)
        if what != "whole":
            plan = sharded_plan(plan, random.Random(2), "none" if what == "halves" else what)
        attach(ddp, optimizer, plan)
    for i in range(12):
        if kind == "legato" and i and i % 2 == 0:
            ddps = msgspec.structs.replace(default_buckets(ddp), scheduler="ddp", carrier="ddp")
            attachment(ddp).adopt(plan if i % 4 == 0 else ddps)
        train(ddp, optimizer, 1, seed=i)
        ours.append(kind == "legato" and attachment(ddp).reducer is not None)
    assert sum(ours) == (6 if kind == "legato" else 0)
    return ddp


@row()
def test_the_first_passes_of_a_static_graph_that_are_ddps_again_send_nothing(kind):
    model = build("Convolutional")
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    ddp = nn.parallel.DistributedDataParallel(model, static_graph=True)
    if kind == "legato":
        attach(ddp, optimizer, random_plan(model, 3))
    train(ddp, optimizer, 4)
    if kind == "legato":
        attachment(ddp).adopt(msgspec.structs.replace(default_buckets(ddp), scheduler="ddp", carrier="ddp"))
    with ddp.no_sync():
        train(ddp, optimizer, 2)
    return train(ddp, optimizer, 4)


@on_ranks(2)
@pytest.mark.parametrize("modes", [[], *([mode] for mode in SHARDED)])
def test_a_change_of_plan_frees_the_buckets(modes):
    """Without garbage collection, after one change and more."""
    in_mode(modes, change_plans)


def change_plans():
    model = build("Attention")
    wrapped, optimizer = wrap("legato", model, OPTIMIZERS["sgd"](model.parameters()))
    before = []
    gc.collect()
    gc.disable()
    try:
        for seed in range(3):
            train(wrapped, optimizer, 3)
            buckets = attachment(wrapped).reducer.buckets
            before += [StorageWeakRef(bucket.buffer.untyped_storage()) for bucket in buckets]
            attachment(wrapped).adopt(random_plan(model, seed))
            train(wrapped, optimizer, 1)  # the channel keeps its last message
            assert all(reference.expired() for reference in before)
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
@on_ranks(2)
def test_a_change_of_plan_returns_freed_memory_to_the_system():
    """Freed pieces of 64 KB below a piece that stays, which glibc would keep."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    model = build("Attention")
    wrapped, optimizer = wrap("legato", model, OPTIMIZERS["sgd"](model.parameters()))
    train(wrapped, optimizer, 3)
    pieces = [torch.ones(2**14) for _ in range(2**10)]
    del pieces[:-1]
    held = resident()
    attachment(wrapped).adopt(random_plan(model, 0))
    assert resident() < held - 2**25  # half of it


@pytest.mark.slow
@on_ranks(2)
def test_models_that_are_gone_leave_no_groups_and_no_threads():
    """None but what the first one of four has left behind."""
    counts = []
    for _ in range(4):
        model = build("Attention")
        attachment(train(*wrap("legato", model, OPTIMIZERS["sgd"](model.parameters())), 2)).flush()
        del model
        gc.collect()
        until = time.monotonic() + PATIENCE_S
        while counts and len(os.listdir("/proc/self/task")) > counts[0][1] and time.monotonic() < until:
            time.sleep(0.05)  # a thread looks up twice a second
        dist.barrier()
        counts.append((len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task"))))
    (groups, threads), (groups_after, threads_after) = counts[0], counts[-1]
    assert groups_after == groups and threads_after <= threads


@on_ranks(2)
def test_an_optimizer_of_another_model_keeps_its_class():
    model, other = build("Convolutional"), build("Attention")
    _, optimizer = wrap("legato", model, OPTIMIZERS["sgd"](other.parameters()))
    assert type(optimizer) is torch.optim.SGD


# ---- rounding ----------------------------------------------------------------------


@on_ranks(3)
@pytest.mark.parametrize("seed", seeds(3, quick=1))
def test_gradient_within_the_rounding_bound(seed):
    model = build("Convolutional")
    assert rounding_error(model, random_plan(model, seed)) <= 1


@on_ranks(3)
def test_many_steps_within_the_noise_of_ddp():
    """DDP with tiny buckets is as far from DDP as a random plan is."""
    ddp, tiny, legato = (
        trained(kind, "Attention", "momentum", steps=10, **options)
        for kind, options in (("ddp", {}), ("ddp", {"options": {"bucket_cap_mb": 0.001}}), ("legato", {}))
    )
    assert distance(ddp, legato) <= 10 * distance(ddp, tiny) + 1e-6


# ---- updates that wait -------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("mode", [(), ("views",)])
def test_updates_wait_until_they_are_read(mode):
    def wait():
        model = build("Convolutional")
        before = model.head.weight.detach().clone()
        train(*wrap("legato", model, OPTIMIZERS["sgd"](model.parameters())), 3)
        assert all(type(p) is GatedParameter for p in model.parameters())
        assert model.head.weight.shape == (10, 256) and type(model.head.weight) is GatedParameter
        assert not torch.equal(model.head.weight, before) and type(model.head.weight) is nn.Parameter

    in_mode(mode, wait)


class Many(nn.Module):
    """A hundred tiny parameters."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(4) for _ in range(100))

    def forward(self):
        return torch.stack([(p * p).sum() for p in self.parts]).sum()


@on_ranks(2)
def test_a_message_for_each_parameter_takes_few_calls():
    """legato's functions are called at most 75 times for each parameter in a step, if all messages have arrived."""
    model, calls = Many(), []
    plan = Plan("each", tuple(Message((Slice(name, 0, 16),)) for name, _ in model.named_parameters()), True)
    wrapped, optimizer = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)

    def count(frame, event, _):
        if event == "call" and "/legato/pytorch/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_qualname)

    for _ in range(4):
        calls.clear()
        sys.setprofile(count)
        optimizer.zero_grad()
        wrapped().backward()
        sys.setprofile(None)
        while not all(bucket.has_arrived for bucket in attachment(wrapped).reducer.buckets):
            time.sleep(0.001)
        sys.setprofile(count)
        optimizer.step()
        sys.setprofile(None)
    assert len(calls) <= 7500, Counter(calls).most_common(5)


def leave(rank, directory):
    """Rank 1 ends as soon as its last step has returned; rank 0 reads what came of it later."""
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(6)))
    plan = msgspec.structs.replace(default_buckets(model), forward_overlap=True)
    wrapped, optimizer = attach(model, torch.optim.SGD(model.parameters(), 1e-4), plan)
    for _ in range(5):
        optimizer.zero_grad()
        wrapped(torch.full((2, 1000), rank + 1.0)).sum().backward()
        optimizer.step()
    if rank == 0:
        time.sleep(0.5)
        torch.save(model.state_dict(), f"{directory}/model")


@pytest.mark.slow
def test_what_a_rank_sends_last_arrives_where_it_ends_at_once(tmp_path):
    context = multiprocessing.get_context("forkserver")  # its processes end by `os._exit()`
    ranks = [context.Process(target=leave, args=(rank, str(tmp_path))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE_S)
    assert [rank.exitcode for rank in ranks] == [0, 0] and (tmp_path / "model").exists()


@on_ranks(2)
def test_gradients_that_are_sent_in_halves_wait():
    """The second halves are sent in the forward pass."""
    model = build("Convolutional")
    slices = tuple(Slice(n, 0, p.numel() * p.element_size()) for n, p in reversed(trained_parameters(model).items()))
    plan = Plan("halves", (Message(slices, "reduce_scatter"), Message(slices, "all_gather")), forward_overlap=True)

    def look(*_):
        assert all(type(p) is GatedParameter for p in model.parameters())

    train(*attach(model, OPTIMIZERS["sgd"](model.parameters()), plan), 3, inner=look)


@on_ranks(2)
def test_a_plan_without_overlap_leaves_nothing_pending():
    model = build("Convolutional")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train(*attach(model, optimizer, random_plan(model, 1, forward_overlap=False)), 1)
    assert all(type(p) is nn.Parameter for p in model.parameters())


@on_ranks(2)
def test_copies_and_pickles():
    """A model copied or saved while updates are pending is of plain parameters, up to date."""
    model = build("Convolutional")
    wrapped, optimizer = wrap("legato", model, OPTIMIZERS["adam"](model.parameters()))
    train(wrapped, optimizer, 3)
    copied = copy.deepcopy(model)
    train(wrapped, optimizer, 1)
    saved = []
    for what in (model, optimizer):
        torch.save(what, buffer := io.BytesIO())
        buffer.seek(0)
        saved.append(torch.load(buffer, weights_only=False))
    assert all(type(p) is nn.Parameter for m in (copied, saved[0]) for p in m.parameters())
    assert distance(model, saved[0]) == 0.0 < distance(model, copied)
    assert type(saved[1]) is torch.optim.Adam


@on_ranks(2)
def test_measured_timelines():
    model = build("Convolutional")
    wrapped, optimizer = wrap("legato", model, OPTIMIZERS["sgd"](model.parameters()))
    with attachment(wrapped).trace() as timelines:
        train(wrapped, optimizer, 5)
    assert len(timelines) == 4 and all(t.iteration_s > 0 for t in timelines)
    spans = [s for t in timelines for s in t.spans]
    assert all(s.end_s > s.start_s for s in spans)  # what ends as an iteration begins is not in it
    planned = len(attachment(wrapped).plan.messages)
    assert all(sum(s.kind == "message" for s in t.spans) >= planned for t in timelines)
    assert {s.kind for s in spans} == {"backward", "forward", "message", "optimizer"}


# ---- what must fail ----------------------------------------------------------------


def other_model_on_rank_1():
    model = build("Convolutional")
    if dist.get_rank() == 1:
        model.left = nn.Conv2d(8, 4, 1)
    wrap("legato", model, OPTIMIZERS["sgd"](model.parameters()))


def other_plan_on_rank_1():
    model = build("Convolutional")
    wrap("legato", model, OPTIMIZERS["sgd"](model.parameters()), seed=dist.get_rank())


def plan_of_another_model():
    model = build("Convolutional")
    attach(model, OPTIMIZERS["sgd"](model.parameters()), random_plan(build("Attention"), 0))


def plan_that_cuts_an_element():
    model = nn.Linear(1, 1, bias=False)
    plan = Plan("odd", (Message((Slice("weight", 0, 3),)), Message((Slice("weight", 3, 4),))))
    attach(model, OPTIMIZERS["sgd"](model.parameters()), plan)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (other_plan_on_rank_1, "RankError: rank 1: plan: random"),
        (plan_of_another_model, "PlanError: the plan is for another model"),
        (plan_that_cuts_an_element, "PlanError: messages[0]: 'weight' is split inside an element of 4 bytes"),
        (other_model_on_rank_1, "RankError: rank 1: parameter 'left.weight': (4, 8, 1, 1)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refusals_reach_every_rank(case, expected):
    ranks = Ranks(2)  # of their own: a failed backward pass leaves them out of step
    try:
        for error in ranks.errors(case):
            assert expected in error
    finally:
        ranks.close()
