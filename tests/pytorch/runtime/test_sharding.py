"""Sharded optimizers and gradients: weights are DDP's bit for bit on two ranks, or there is one clear line.

Trainings of other files run sharded, too, as modes of their rows.
"""

import copy
import io
import json
import random
import re
from datetime import timedelta
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks, on_ranks
from support.rows import SHARDED, in_mode, row
from support.training import (
    OPTIMIZERS,
    STEPS,
    Dense,
    Mixed,
    adam,
    distance,
    random_plan,
    same,
    sgd,
    train,
    trained,
    under_both,
    wrap,
)
from torch import nn
from torch.nn import functional as F

from legato.core.errors import InputError, RankError
from legato.core.plan import Message, Plan, Slice
from legato.pytorch import GradScaler, attach, attachment
from legato.pytorch.parameters import trained_parameters
from legato.pytorch.runtime.attached.attach import attachment_of
from legato.pytorch.runtime.waiting import gate

pytestmark = pytest.mark.slow

SHARDS = pytest.mark.parametrize("shard", SHARDED)


def per_tensor(model):
    """A message for each tensor, and another one for the rest of a large one."""
    slices = []
    for name, p in trained_parameters(model).items():
        cut = 1000 if p.nbytes > 8192 else p.nbytes
        slices += [Slice(name, a, b) for a, b in ((0, cut), (cut, p.nbytes)) if a < b]
    return Plan("per tensor", tuple(Message((s,)) for s in reversed(slices)))


# ---- what is trained ---------------------------------------------------------------


@row("four ranks")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@SHARDS
def test_random_trainings(kind, seed, shard):
    """A random plan, optimizer and model, and random calls in between."""
    rng = random.Random(seed)
    name, zero = rng.choice(sorted(OPTIMIZERS)), rng.choice(["before", "after"])
    torch.manual_seed(seed)
    model = Mixed()
    wrapped, optimizer = in_mode([shard], wrap, kind, model, OPTIMIZERS[name](model.parameters()), seed)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(12):
        if zero == "before":
            optimizer.zero_grad()
        times = rng.randint(1, 3)
        for i in range(times):
            x, y = model.batch(generator)
            wrapped.require_backward_grad_sync = i == times - 1
            F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        if rng.random() < 0.3:
            with torch.no_grad():
                wrapped(x)
                model.head.bias.clamp_(-0.5, 0.5)
        if zero == "after":
            optimizer.zero_grad()
    return wrapped


@row()
@pytest.mark.parametrize(("name", "dtype"), [("adam-fused", torch.float32), ("momentum", torch.bfloat16)])
def test_tensors_are_cut_where_vectors_end(kind, name, dtype):
    """An optimizer whose vectorized update rounds what does not fill a vector differently."""
    model = Mixed().to(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    if kind == "ddp":
        return train(nn.parallel.DistributedDataParallel(model), optimizer, STEPS)
    return train(*attach(model, optimizer, per_tensor(model), shard="optimizer"), STEPS)


@row()
def test_gradients_that_are_views_leave_their_parameters_when_they_are_packed():
    return in_mode(["sharded optimizer", "views"], under_both(trained), "Attention", "adam")


@row(*SHARDED)
def test_several_optimizers(kind):
    """Two of different kinds; the second steps in every other iteration only."""
    model = Mixed()
    first = adam([*model.body.parameters(), model.scale])
    second = sgd([*model.conv.parameters(), *model.head.parameters()])
    wrapped, first = wrap(kind, model, first)
    if kind == "legato":
        attachment(wrapped).manage(second)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for i in range(STEPS):
        x, y = model.batch(generator)
        F.cross_entropy(wrapped(x), y).backward()
        for optimizer in (second, first) if i % 2 else (first,):
            optimizer.step()
        first.zero_grad()
        second.zero_grad()
    return wrapped


def all_but_the_first(parameters):
    return adam(list(parameters)[2:])


@row(*SHARDED)
def test_parameters_that_no_optimizer_has_need_no_zero_grad(kind):
    return trained(kind, Dense(), all_but_the_first)


@row()
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_parameters_that_no_optimizer_has_can_come_last(kind, shard):
    """Their gradients go out after the all-gathers of the others."""
    model = nn.Sequential(Dense(), nn.Linear(10, 100_000), nn.Linear(100_000, 10))
    model.batch = model[0].batch
    optimizer = adam(model[0].parameters())
    if kind == "ddp":
        return train(nn.parallel.DistributedDataParallel(model), optimizer, 4)
    whole = [Message((Slice(name, 0, p.nbytes),)) for name, p in model.named_parameters()]
    halves = [msgspec.structs.replace(m, kind=kind) for m in whole for kind in ("reduce_scatter", "all_gather")]
    plan = Plan("in turns", tuple(halves), forward_overlap=True, shard=shard)
    return train(*attach(model, optimizer, plan), 4)


@row("compiled")
@SHARDS
def test_evaluation_of_a_model_with_parameters_that_no_optimizer_has(kind, shard):
    """Between the steps; when it is compiled, it is compiled again."""
    model = Dense()
    wrapped, optimizer = in_mode([shard], wrap, kind, model, all_but_the_first(model.parameters()))

    def step(optimizer, i):
        optimizer.step()
        if i > 1:
            with torch.no_grad():
                wrapped.eval()(torch.ones(i, 12))
            wrapped.train()

    return train(wrapped, optimizer, STEPS, step=step)


@row(*SHARDED)
def test_parameters_that_the_optimizer_gets_in_the_middle(kind):
    """They have a state that it had before."""
    model = Dense()
    first, *others = model.parameters()
    wrapped, optimizer = wrap(kind, model, adam(others))
    train(wrapped, optimizer, 3)
    wrapped.zero_grad()
    optimizer.add_param_group({"params": [first], "lr": 5e-3})
    train(wrapped, optimizer, 3)
    saved = optimizer.state_dict()
    resumed, optimizer = wrap(kind, wrapped.module, adam(others))
    resumed.zero_grad()
    optimizer.add_param_group({"params": [first], "lr": 5e-3})
    optimizer.load_state_dict(saved)
    return train(resumed, optimizer, 3)


@row(*SHARDED)
def test_copies_between_the_backward_pass_and_the_step(kind):
    """They are copies of the weights."""

    def look(wrapped, optimizer, i):
        file = io.BytesIO()
        torch.save(wrapped.module, file)
        file.seek(0)
        for copied in (copy.deepcopy(wrapped.module), torch.load(file, weights_only=False)):
            for a, b in zip(copied.parameters(), wrapped.module.parameters(), strict=True):
                assert type(a) is nn.Parameter and not vars(a) and a.grad is None and torch.equal(a, b.detach())

    return trained(kind, Dense(), adam, inner=look)


@row("views")
@SHARDS
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("sharded", [(True,), (False, True)], ids=len)
def test_plans_that_come_between_a_step_and_zero_grad(kind, sharded, set_to_none, shard):
    """Sharded, or only every other one."""
    model = Dense()
    wrapped, optimizer = in_mode([shard], wrap, kind, model, adam(model.parameters()))

    def step(optimizer, i):
        optimizer.step()
        if kind == "legato":
            mode = [shard] if sharded[i % len(sharded)] else []
            attachment(wrapped).adopt(in_mode(mode, random_plan, model, i))

    return train(wrapped, optimizer, STEPS, step=step, set_to_none=set_to_none)


# ---- clipping ----------------------------------------------------------------------


def clip_norm(model, *options):
    if (attached := attachment_of(model)) is not None:
        return attached.clip_grad_norm_(*options)
    return nn.utils.clip_grad_norm_(model.parameters(), *options)


def clip_value(model, value):
    if (attached := attachment_of(model)) is not None:
        attached.clip_grad_value_(value)
    else:
        nn.utils.clip_grad_value_(model.parameters(), value)


@row(*SHARDED)
def test_clipping_by_value(kind):
    return trained(kind, Dense(), adam, inner=lambda m, o, i: clip_value(m, 0.01))


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_by_norm(norm_type):
    norms = []

    def clipped(kind):
        return trained(kind, Dense(), adam, inner=lambda m, o, i: norms.append(clip_norm(m, 0.01, norm_type)))

    # The norm of all gradients is added up in another order, and so may differ in its last bits.
    assert in_mode(["sharded optimizer"], under_both(clipped)) < 1e-4
    expected, ours = norms[:STEPS], norms[STEPS:]
    assert all(torch.isclose(a, b, rtol=1e-5) for a, b in zip(expected, ours, strict=True)), (expected, ours)
    assert all(norm > 0.01 for norm in expected)


@on_ranks(2)
@SHARDS
def test_parameters_that_no_optimizer_has_take_part_in_the_norm(shard):
    norms = []

    def clipped(kind):
        torch.manual_seed(7)
        trained(kind, Dense(), all_but_the_first, 1, inner=lambda m, o, i: norms.append(clip_norm(m, 1e9)))

    clipped("ddp")
    in_mode([shard], clipped, "legato")
    assert torch.isclose(*norms, rtol=1e-6), norms


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_nan_of_one_rank_is_in_the_norm_of_all(norm_type):
    """There is a NaN in the gradients of the last shard only."""
    model = Dense()
    wrapped, _ = attach(model, sgd(model.parameters()), per_tensor(model), shard="optimizer")
    model.third.weight.register_hook(lambda grad: torch.cat([grad[:-1], grad[-1:] * float("nan")]))
    x, y = model.batch(torch.Generator().manual_seed(0))
    F.cross_entropy(wrapped(x), y).backward()
    assert attachment(wrapped).clip_grad_norm_(1.0, norm_type).isnan()


@row(*SHARDED)
def test_gradient_scaling(kind):
    """fp16 autocast, and clipping by value; now and then the gradients of one rank overflow."""
    model = Mixed()
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    scaler = (torch.amp.GradScaler if kind == "ddp" else GradScaler)("cpu", init_scale=2.0**10, growth_interval=4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for i in range(STEPS):
        x, y = model.batch(generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(wrapped(x), y)
        if i % 5 == 2 and dist.get_rank() == 1:
            loss = loss + model.head.bias.sum() * float("inf")  # in the shards of one rank
        scaler.scale(loss).backward()
        if i % 2:
            scaler.unscale_(optimizer)
            clip_value(wrapped, 0.01)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() != 2.0**10
    return wrapped, [torch.tensor(scaler.get_scale())]


# ---- states and memory -------------------------------------------------------------


def elements(states):
    return sum(v.numel() for entries in states.values() for v in entries.values() if v.dim())


@row()
@pytest.mark.slow
@SHARDS
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "momentum", "adagrad", "rmsprop-foreach"])
def test_states_go_from_sharded_to_whole_and_back(optimizer, shard):
    """Sharded and unsharded plans in turns, and states that are saved from one kind of optimizer into the other."""
    models, states = [], []
    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = Mixed()
        wrapped, ours = wrap(kind, model, OPTIMIZERS[optimizer](model.parameters()))
        for i in range(6):
            train(wrapped, ours, 2, seed=i)
            sharded = kind == "legato" and i % 2 == 0
            if kind == "legato":
                attachment(wrapped).adopt(in_mode([shard] if sharded else [], random_plan, model, i))
            again = OPTIMIZERS[optimizer](model.parameters())
            again.load_state_dict(ours.state_dict())
            kept = elements(ours.state)
            assert not sharded or kept < 0.75 * elements(again.state)
            ours.load_state_dict(again.state_dict())
            assert elements(ours.state) == kept
        models.append(wrapped)
        states.append(again.state_dict()["state"])
    assert same(*states)
    return distance(*models)


@on_ranks(2)
def test_sharded_gradients_have_no_memory_of_their_own():
    """Neither messages nor gradients have any after a backward pass, or after a step."""

    def with_memory():
        model = Dense()
        wrapped, optimizer = wrap("legato", model, adam(model.parameters()))
        train(wrapped, optimizer, 3)

        def look():
            attached = attachment(wrapped)
            attached.flush()
            messages = sum(bucket.buffer.untyped_storage().nbytes() > 0 for bucket in attached.reducer.buckets)
            with gate.invisible():
                return messages, sum(not slot.is_spent for slot in attached.reducer.slots)

        x, y = model.batch(torch.Generator().manual_seed(0))
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        attachment(wrapped).clip_grad_value_(1.0)
        after_backward = look()
        optimizer.step()
        return after_backward, look()

    (messages, _), _ = in_mode(["sharded optimizer"], with_memory)
    assert messages > 0
    assert in_mode(["sharded gradients"], with_memory) == ((0, 0), (0, 0))


@on_ranks(2)
def test_few_gradients_have_memory_beside_the_messages_into_which_they_are_packed(tmp_path):
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12)))
    wrapped, optimizer = attach(model, sgd(model.parameters()), per_tensor(model), shard="optimizer")
    x = torch.randn(4, 128)

    def step():
        optimizer.zero_grad()
        wrapped(x).sum().backward()
        optimizer.step()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    path = tmp_path / f"memory of rank {dist.get_rank()}"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    more = max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")
    assert more < sum(p.nbytes for p in model.parameters()) / 2


# ---- what must be refused ----------------------------------------------------------


def read(job):
    job.backward()
    job.model.first.weight.grad.norm()


def hold(job):
    kept = []
    job.model.third.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    job.backward()


def go_backward_twice(job):
    job.backward()
    job.backward()


def step_twice(job):
    job.backward()
    job.optimizer.step()
    job.optimizer.step()


def step_without_sync(job):
    with job.wrapped.no_sync():
        job.backward()
    job.optimizer.step()


def clear_nothing(job):
    job.backward()
    job.optimizer.step()
    job.backward()


def adopt_a_sharded_plan(job):
    job.backward()
    job.optimizer.step()
    attachment(job.wrapped).adopt(in_mode([job.shard], random_plan, job.model, 1))
    job.backward()


def adopt_a_plan(job, leave_out=False):
    job.backward()
    job.optimizer.step()
    attachment(job.wrapped).adopt(random_plan(job.model, 1))
    if leave_out:
        job.model.first.weight.grad = job.model.third.weight.grad = None
        job.model.second.forward = lambda x: x
    job.backward()


def adopt_a_plan_and_leave_out_a_layer(job):
    adopt_a_plan(job, leave_out=True)


def detach_before_the_step(job):
    job.backward()
    attachment(job.wrapped).detach()


def add_parameters_before_the_step(job):
    job.backward()
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    job.optimizer.step()


def clip_by_norm_of_order_0(job):
    job.backward()
    attachment(job.wrapped).clip_grad_norm_(1.0, 0.0)


def clip_nothing(job):
    attachment(job.wrapped).clip_grad_norm_(1.0)


def manage_a_parameter_twice(job):
    attachment(job.wrapped).manage(sgd([job.model.first.weight]))


def step_on_one_rank(job):
    job.backward()
    if dist.get_rank() == 0:
        job.optimizer.step()
    job.optimizer.zero_grad()
    job.backward()


USED_UP = "step() has used its gradient up, and nothing can be added to it: call zero_grad()"


@on_ranks(2)
@SHARDS
@pytest.mark.parametrize(
    ("act", "line"),
    [
        (read, "first.weight: the average of its gradient is sharded, and no rank has all of it: clip with"),
        (hold, "third.weight: the average of its gradient is sharded"),
        (
            go_backward_twice,
            "a second backward pass before step() or zero_grad(): the average of its gradient is",
        ),
        (step_twice, "step() without an averaged gradient"),
        (step_without_sync, "step() without an averaged gradient: the last backward pass ran under no_sync()"),
        (clear_nothing, USED_UP),
        (adopt_a_sharded_plan, USED_UP),
        (adopt_a_plan, USED_UP),
        (adopt_a_plan_and_leave_out_a_layer, f"second.weight: {USED_UP}"),
        (detach_before_the_step, "only step() can use it: call step() or zero_grad() before the plan changes"),
        (add_parameters_before_the_step, "step() of a sharded optimizer that got other parameters since the backward"),
        (clip_by_norm_of_order_0, "norm_type: 0 with a sharded plan (expected a positive number)"),
        (clip_nothing, "no averaged gradients: a backward pass has to come first"),
        (manage_a_parameter_twice, "optimizer: SGD has a parameter of another optimizer, and is sharded (expected one"),
        (step_on_one_rank, "ranks [0] have called step(), and ranks [1] have not"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_done_is_said(act, line, shard):
    model = Dense()
    wrapped, optimizer = in_mode([shard], wrap, "legato", model, adam(model.parameters()))
    train(wrapped, optimizer, 2)
    x, y = model.batch(torch.Generator().manual_seed(0))
    optimizer.zero_grad()
    job = SimpleNamespace(model=model, wrapped=wrapped, optimizer=optimizer, shard=shard)
    job.backward = lambda: F.cross_entropy(wrapped(x), y).backward()
    try:
        with pytest.raises((RankError, InputError), match=re.escape(line)):
            act(job)
    finally:
        attachment(wrapped).reducer.close()


def clip_alone():
    """What a rank says where rank 0 alone clips by norm, and the others go on."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    model = Dense()
    plan = random_plan(model, 0)
    wrapped, optimizer = attach(model, adam(model.parameters()), plan, process_group=group, shard="optimizer")
    train(wrapped, optimizer, 2)
    x, y = model.batch(torch.Generator().manual_seed(0))
    optimizer.zero_grad()
    F.cross_entropy(wrapped(x), y).backward()
    with pytest.raises(RankError) as said:
        if dist.get_rank() == 0:
            attachment(wrapped).clip_grad_norm_(1.0)
        optimizer.step()
        attachment(wrapped).flush()
    return str(said.value)


@pytest.mark.slow
def test_a_rank_that_clips_alone_says_so():
    ranks = Ranks(2)  # of their own, out of step afterwards
    try:
        clips, goes_on = ranks.run(clip_alone)
    finally:
        ranks.close(force=True)
    assert "rank 0: clipping gradients by their norm after backward pass 3: " in clips
    assert "of backward pass 3 failed" in goes_on


class Sparse(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(5, 12, sparse=True), Dense())


@on_ranks(2)
@pytest.mark.parametrize(
    ("model", "optimizer", "shard", "line"),
    [
        (
            Dense,
            "LBFGS",
            "none",
            "optimizer: LBFGS cannot be sharded (expected one that treats every element alone: S",
        ),
        (Dense, "Adafactor", "none", "optimizer: Adafactor cannot be sharded"),
        (Sparse, "SGD", "none", "has sparse gradients"),
        (Dense, "SGD", "gradients", "shard: 'gradients', but the plan has 'optimizer'"),
        (Dense, "SGD", "everything", "unknown shard 'everything'"),
    ],
)
def test_what_cannot_be_sharded_is_refused(model, optimizer, shard, line):
    model = model()
    plan = in_mode(["sharded optimizer"], random_plan, model, 0)
    with pytest.raises(InputError, match=re.escape(line)):
        attach(model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.1), plan, shard=shard)


@on_ranks(2)
def test_a_sharded_plan_is_refused_for_an_optimizer_that_was_managed_before():
    model = Dense()
    wrapped, _ = attach(model, torch.optim.LBFGS(model.parameters()), random_plan(model, 0))
    with pytest.raises(InputError, match="optimizer: LBFGS cannot be sharded"):
        attachment(wrapped).adopt(in_mode(["sharded optimizer"], random_plan, model, 0))
