"""What tests/pytorch/runtime/test_runtime.py runs on the ranks."""

import copy
import gc
import os
import random
import time

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from legato.auto import default_buckets
from legato.core.plan import Message, Plan, Slice
from legato.pytorch import attach, attachment
from legato.pytorch.parameters import trained_parameters
from legato.pytorch.runtime.waiting.gate import GatedParameter
from support import PATIENCE_S
from support.training import OPTIMIZERS, build, distance, random_plan, sharded_plan, train, under_both, wrap


@under_both
def both(kind, model_name, optimizer_name, steps=8, seed=0, find_unused_parameters=False, **training):
    """Train a model under DDP and under a random plan; returns the distance of their weights."""
    model = build(model_name)
    options = {"find_unused_parameters": True} if kind == "ddp" and find_unused_parameters else {}
    wrapped, optimizer = wrap(kind, model, OPTIMIZERS[optimizer_name](model.parameters()), seed, **options)
    return train(wrapped, optimizer, steps, **training)


def equality(model_name, optimizer_name, seed=0, find_unused_parameters=False):
    return both(model_name, optimizer_name, seed=seed, find_unused_parameters=find_unused_parameters)


def equality_zeroing(zero, set_to_none):
    return both("Convolutional", "momentum", zero=zero, set_to_none=set_to_none)


def equality_clipping():
    def clip(model, optimizer, i):
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    return both("Attention", "adam", inner=clip)


def equality_value_clipping():
    return both("Attention", "adam", inner=lambda m, o, i: nn.utils.clip_grad_value_(m.parameters(), 1e-3))


def equality_gradients_changed():
    def change(model, optimizer, i):
        for p in list(model.parameters())[:2]:
            p.grad.mul_(0.5)
            p.grad = p.grad + 0.01 * p.detach()

    return both("Convolutional", "momentum", inner=change)


def equality_skipped_steps():
    """As GradScaler does: now and then the gradients are thrown away."""
    return both("Convolutional", "adam", step=lambda o, i: None if i % 3 == 1 else o.step(), zero="after")


def equality_own_hooks():
    """Hooks of the user's own that read gradients inside the backward pass."""
    norms, trained = {"ddp": [], "legato": []}, []
    for kind in norms:
        model = build("Convolutional")
        wrapped, optimizer = wrap(kind, model, OPTIMIZERS["momentum"](model.parameters()))
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p, seen=norms[kind]: seen.append(p.grad.norm().item()))
        trained.append(train(wrapped, optimizer, 4))
    return distance(*trained) if norms["ddp"] == norms["legato"] else norms


def equality_two_steps():
    """`step()` twice on the same gradients."""
    return both("Convolutional", "momentum", step=lambda o, i: (o.step(), o.step()))


def equality_hooked_optimizer():
    calls = []
    trained = []
    for kind in ("ddp", "legato"):
        model = build("Convolutional")
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        trained.append(train(*wrap(kind, model, optimizer), 4))
    return distance(*trained), len(calls)


def equality_schedule():
    """A learning-rate scheduler, made before or after `distribute`."""
    worst = 0.0
    for early in (False, True):
        trained = []
        for kind in ("ddp", "legato"):
            model = build("Convolutional")
            optimizer = OPTIMIZERS["adam"](model.parameters())
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7) if early else None
            wrapped, optimizer = wrap(kind, model, optimizer)
            schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
            trained.append(train(wrapped, optimizer, 6, step=lambda o, i, s=schedule: (o.step(), s.step())))
        worst = max(worst, distance(*trained))
    return worst


def equality_groups():
    """Parameter groups of their own, one of them with parameters the model does not have."""
    trained, strangers = [], []
    for kind in ("ddp", "legato"):
        model = build("Attention")
        stranger = nn.Parameter(torch.ones(3))
        named = dict(model.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if "norm" in n], "weight_decay": 0.0},
            {"params": [p for n, p in named.items() if "norm" not in n], "lr": 3e-3, "betas": (0.8, 0.9)},
            {"params": [stranger], "lr": 1.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)

        def pull(model, optimizer, i, stranger=stranger):
            stranger.grad = stranger.detach().clone()

        trained.append(train(*wrap(kind, model, optimizer), 6, inner=pull))
        strangers.append(stranger)
    return distance(*trained), torch.equal(*strangers)


@under_both
def equality_accumulation(kind):
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


@under_both
def equality_synced_accumulation(kind):
    """Two sending backward passes before one step: the second adds to the average of the first."""
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


def equality_evaluation():
    """Evaluation and checkpoints between steps see the updated weights."""
    seen = {"ddp": [], "legato": []}
    for kind in seen:
        model = build("Convolutional")
        wrapped, optimizer = wrap(kind, model, OPTIMIZERS["adam"](model.parameters()))
        x, _ = model.batch(torch.Generator().manual_seed(0))
        for i in range(4):
            train(wrapped, optimizer, 1, seed=i)
            wrapped.eval()
            with torch.no_grad():
                seen[kind].append(model(x).clone())
            wrapped.train()
            train(wrapped, optimizer, 1, seed=10 + i)
            seen[kind].append(model.head.weight.detach().clone())
            train(wrapped, optimizer, 1, seed=20 + i)
            state = optimizer.state_dict()["state"]
            seen[kind] += [state[i]["exp_avg"].clone() for i in sorted(state)]
            train(wrapped, optimizer, 1, seed=30 + i)
            seen[kind] += [copy.deepcopy(model).stem.weight, torch.nn.utils.parameters_to_vector(model.parameters())]
    return all(torch.equal(a, b) for a, b in zip(seen["ddp"], seen["legato"], strict=True))


@under_both
def equality_lbfgs(kind):
    model = build("Partial").body
    model.batch = lambda g: (torch.randn(4, 12, generator=g), torch.randint(0, 12, (4,), generator=g))
    wrapped, optimizer = wrap(kind, model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x, y = model.batch(generator)

        def closure(x=x, y=y, wrapped=wrapped, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return wrapped


def reduced_gradient(seed):
    """Worst error of one averaged gradient against the exact average, in units of its bound.

    Each of n numbers is first multiplied by 1/n (rounded: relative error eps
    for 1/n itself and eps for the product), then n - 1 additions in any order
    add at most (n - 1) eps times the sum of absolute values; to first order the
    error is below (n + 1) eps * sum|g| / n.
    """
    n = dist.get_world_size()
    model = build("Convolutional")
    wrapped, optimizer = wrap("legato", model, OPTIMIZERS["sgd"](model.parameters()), seed)
    x, y = model.batch(torch.Generator().manual_seed(dist.get_rank()))
    with wrapped.no_sync():
        F.cross_entropy(wrapped(x), y).backward()
    local = {name: p.grad.double() for name, p in model.named_parameters()}
    model.load_state_dict(build("Convolutional").state_dict())
    optimizer.zero_grad()
    F.cross_entropy(wrapped(x), y).backward()
    worst = 0.0
    for name, p in model.named_parameters():
        total, absolute = local[name].clone(), local[name].abs()
        dist.all_reduce(total)
        dist.all_reduce(absolute)
        bound = (n + 1) * torch.finfo(torch.float32).eps * absolute / n + 1e-30
        worst = max(worst, ((p.grad.double() - total / n).abs() / bound).max().item())
    return worst


def own_distance(model_name, optimizer_name):
    """Distance of DDP from itself with tiny buckets, and of a random plan from DDP."""
    trained = {}
    for kind, options in (("ddp", {}), ("tiny", {"bucket_cap_mb": 0.001}), ("legato", {})):
        model = build(model_name)
        wrapped, optimizer = wrap(
            "legato" if kind == "legato" else "ddp", model, OPTIMIZERS[optimizer_name](model.parameters()), **options
        )
        trained[kind] = train(wrapped, optimizer, 10)
    return distance(trained["ddp"], trained["tiny"]), distance(trained["ddp"], trained["legato"])


def deferral():
    """What is pending after `step()`, and what reading does to it."""
    model = build("Convolutional")
    before = model.head.weight.detach().clone()
    wrapped, optimizer = wrap("legato", model, OPTIMIZERS["sgd"](model.parameters()))
    train(wrapped, optimizer, 3)
    gated = [type(p) is GatedParameter for p in model.parameters()]
    shape = model.head.weight.shape
    still = type(model.head.weight) is GatedParameter
    moved = not torch.equal(model.head.weight, before)
    return all(gated), tuple(shape), still, type(model.head.weight) is nn.Parameter, moved


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


def waiting_in_halves():
    """Whether gradients that are sent in halves, the second ones in the forward pass, wait for `step()`."""
    model = build("Convolutional")
    slices = tuple(Slice(n, 0, p.numel() * p.element_size()) for n, p in reversed(trained_parameters(model).items()))
    plan = Plan("halves", (Message(slices, "reduce_scatter"), Message(slices, "all_gather")), forward_overlap=True)
    wrapped, optimizer = attach(model, OPTIMIZERS["sgd"](model.parameters()), plan)
    waiting = []
    train(
        wrapped,
        optimizer,
        3,
        inner=lambda *_: waiting.append(all(type(p) is GatedParameter for p in model.parameters())),
    )
    return waiting


def whole_without_overlap():
    model = build("Convolutional")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    wrapped, optimizer = attach(model, optimizer, random_plan(model, 1, forward_overlap=False))
    train(wrapped, optimizer, 1)
    return all(type(p) is nn.Parameter for p in model.parameters())


def copies():
    """A model copied or saved while updates are pending is of plain parameters, up to date."""
    import io

    model = build("Convolutional")
    wrapped, optimizer = wrap("legato", model, OPTIMIZERS["adam"](model.parameters()))
    train(wrapped, optimizer, 3)
    copied = copy.deepcopy(model)
    train(wrapped, optimizer, 1)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    torch.save(optimizer, buffer2 := io.BytesIO())
    buffer.seek(0)
    buffer2.seek(0)
    saved = torch.load(buffer, weights_only=False)
    kind = type(torch.load(buffer2, weights_only=False))
    plain = all(type(p) is nn.Parameter for m in (copied, saved) for p in m.parameters())
    return plain, distance(model, saved), distance(model, copied) > 0, kind is torch.optim.Adam


@under_both
def adopting(kind):
    """Another plan every two steps: the weights are DDP's all the same."""
    model = build("Convolutional")
    wrapped, optimizer = wrap(kind, model, OPTIMIZERS["adam"](model.parameters()))
    for i in range(4):
        train(wrapped, optimizer, 2, seed=i)
        if kind == "legato":
            attachment(wrapped).adopt(random_plan(model, 50 + i, forward_overlap=i % 2 == 0))
    return wrapped


def to_and_fro(what, views):
    """Passes are DDP's in two steps of every four, under a plan of whole messages, halves, or shards."""
    trained, ours = [], []
    for kind in ("ddp", "legato"):
        model = build("Convolutional")
        optimizer = OPTIMIZERS["adam"](model.parameters())
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
        if kind == "legato":
            plan = random_plan(model, 3)
            if what != "whole":
                plan = sharded_plan(plan, random.Random(2), "none" if what == "halves" else what)
            attach(ddp, optimizer, plan)
        for i in range(12):
            if kind == "legato" and i and i % 2 == 0:
                attachment(ddp).adopt(
                    plan if i % 4 == 0 else msgspec.structs.replace(default_buckets(ddp), scheduler="ddp")
                )
            train(ddp, optimizer, 1, seed=i)
            ours.append(kind == "legato" and attachment(ddp).reducer is not None)
        trained.append(ddp)
    return distance(*trained), sum(ours)


def tracing():
    model = build("Convolutional")
    wrapped, optimizer = wrap("legato", model, OPTIMIZERS["sgd"](model.parameters()))
    with attachment(wrapped).trace() as timelines:
        train(wrapped, optimizer, 5)
    messages = [sum(s.kind == "message" for s in t.spans) for t in timelines]
    kinds = {s.kind for t in timelines for s in t.spans}
    return (
        len(timelines),
        messages,
        len(attachment(wrapped).plan.messages),
        sorted(kinds),
        [t.iteration_s for t in timelines],
        min(s.end_s - s.start_s for t in timelines for s in t.spans),
    )


def freed():
    """How many buckets outlive a change of plan, without garbage collection, after one change and more."""
    from torch.multiprocessing.reductions import StorageWeakRef

    model = build("Attention")
    wrapped, optimizer = wrap("legato", model, OPTIMIZERS["sgd"](model.parameters()))
    before, left = [], []
    gc.collect()
    gc.disable()
    try:
        for seed in range(3):
            train(wrapped, optimizer, 3)
            buckets = attachment(wrapped).reducer.buckets
            before.append([StorageWeakRef(bucket.buffer.untyped_storage()) for bucket in buckets])
            attachment(wrapped).adopt(random_plan(model, seed))
            train(wrapped, optimizer, 1)  # the channel keeps its last message
            left.append([reference.expired() for references in before for reference in references].count(False))
    finally:
        gc.enable()
    return left


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


def sending_twice():
    """Two forward passes, then two backward passes, of which DDP sends in the first only; how far off gradients are."""
    found = []
    for kind in ("ddp", "legato"):
        model = build("Attention")
        torch.manual_seed(3)  # dropout
        wrapped, _ = wrap(kind, model, OPTIMIZERS["sgd"](model.parameters()))
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses = [F.cross_entropy(wrapped(x), y) for x, y in (model.batch(generator) for _ in range(2))]
        for loss in losses:
            loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))


def left_behind():
    """Process groups and threads that three models leave behind when they are gone, beside those of the first."""
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
    return [a - b for a, b in zip(counts[-1], counts[0], strict=True)]


def foreign_optimizer():
    """An optimizer of other parameters than the model's keeps its class."""
    model, other = build("Convolutional"), build("Attention")
    _, optimizer = wrap("legato", model, OPTIMIZERS["sgd"](other.parameters()))
    return type(optimizer) is torch.optim.SGD
