"""Rows of the equality matrix: what DDP does, and legato leaves to it or follows. Everything here runs on the ranks."""

import copy
import gc
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call
from torch.nn import functional as F

from legato.pytorch import attach, attachment
from support.matrix_rows import STEPS, Dense, adam, compared, sgd
from support.matrix_steps import Mixed
from support.training import OPTIONS, build, distance, first_passes, random_plan, train, under_both, wrap


@under_both
def accumulating(kind, around):
    """Three micro-batches a step; `no_sync()` is around both passes of two of them, or around one pass only."""
    model = build("Convolutional")
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for i in range(3):
            x, y = model.batch(generator)
            with wrapped.no_sync() if i < 2 and around != "backward" else torch.enable_grad():
                loss = F.cross_entropy(wrapped(x), y)
                if around == "both":
                    loss.backward()
            with wrapped.no_sync() if i < 2 and around == "backward" else torch.enable_grad():
                if around != "both":
                    loss.backward()
        optimizer.step()
    return wrapped


def no_sync():
    return max(map(accumulating, ("both", "forward", "backward")))


@under_both
def adversaries(kind):
    """Two forward passes before one backward pass, with batch norm."""
    model = build("Convolutional")
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def loss_of(x, y):
        return F.cross_entropy(wrapped(x), y) + wrapped(torch.ones_like(x)).square().mean()

    return train(wrapped, optimizer, STEPS, loss_of=loss_of)


@under_both
def common_parameters(kind):
    """Two optimizers with common parameters, of which one zeroes its gradients while the other's updates wait."""
    model = Dense()
    first = torch.optim.SGD([model.first.weight], lr=0.05)
    wrapped, second = wrap(kind, model, sgd(model.parameters()))
    if kind == "legato":
        attachment(wrapped).manage(first)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for i in range(STEPS):
        x, y = model.batch(generator)
        if i % 3 == 0:
            second.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        second.step()
        first.zero_grad()
    return wrapped


@under_both
def kept_gradients(kind):
    """Gradients that are views, kept by the user, while plans change."""
    model, seen = Dense(), []
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()), gradient_as_bucket_view=True)
    for i in range(6):
        train(wrapped, optimizer, 2, seed=i, set_to_none=False)
        kept = [p.grad for p in model.parameters()]
        if kind == "legato":
            attachment(wrapped).adopt(random_plan(model, i))
        assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
        seen += [g.clone() for g in kept]
    return wrapped, seen


class Special(nn.Parameter):
    """A parameter of the user's own class, which has no gate."""


@under_both
def scaled_gradients(kind):
    """Gradients that are changed in place after the backward pass, one of them a subclass's."""
    model = Dense()
    model.second.weight = Special(model.second.weight.detach())
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))

    def scale(wrapped, *_):
        for i, p in enumerate(wrapped.parameters()):
            p.grad.mul_(1 + i + dist.get_rank()).square_()
            p.grad.data = p.grad.data * 0.5

    return train(wrapped, optimizer, STEPS, inner=scale)


def adafactor_of_several_dtypes():
    """Adafactor takes its epsilon from the dtype of a group's first parameter."""
    return compared(Mixed, lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2))


@under_both
def post_hooks(kind):
    """A user's own hook on `step()` sees the new weights."""
    model, seen = Dense(), []
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    optimizer.register_step_post_hook(lambda *_: seen.append(model.first.weight.sum()))
    train(wrapped, optimizer, STEPS)
    return wrapped, torch.stack(seen)


@under_both
def one_optimizer_over_two_models(kind):
    models = Dense(), Dense()
    optimizer = adam([p for model in models for p in model.parameters()])
    first, second = (wrap(kind, model, optimizer, seed)[0] for seed, model in enumerate(models))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x, y = models[0].batch(generator)
        optimizer.zero_grad()
        (F.cross_entropy(first(x), y) + F.cross_entropy(second(x), y)).backward()
        optimizer.step()
    return nn.ModuleList([first.module, second.module])


def copied_and_trained():
    """Copies and pickles of the wrapped model are plain DDPs, which train on."""
    worst = 0.0
    for how in (copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))):
        trained = []
        for kind in ("ddp", "legato"):
            torch.manual_seed(7)
            model = Dense()
            wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
            train(wrapped, optimizer, 5)
            other = how(wrapped)
            assert type(other) is nn.parallel.DistributedDataParallel
            trained.append(train(other, sgd(other.parameters()), 5))
        worst = max(worst, distance(*trained))
    return worst


@under_both
def other_weights(kind):
    """Every third step calls the model with other weights, whose gradients are not averaged."""
    model, losses = Dense(), []
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    for i in range(STEPS):
        train(wrapped, optimizer, 1, seed=i)
        if i % 3 == 1:
            others = {name: torch.ones_like(p, requires_grad=True) for name, p in wrapped.named_parameters()}
            x, _ = model.batch(torch.Generator().manual_seed(i))
            with wrapped.no_sync():
                functional_call(wrapped, others, (x,)).sum().backward()
            losses += [p.grad.sum() for p in others.values()]
    return wrapped, torch.stack(losses)


@under_both
def meshed(kind):
    """`device_mesh=` in place of a process group."""
    model, mesh = Dense(), init_device_mesh("cpu", (dist.get_world_size(),))
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()), device_mesh=mesh)
    return train(wrapped, optimizer, STEPS)


def ignored_of_other_shapes():
    """Ranks have parameters of different shapes that DDP was told to ignore."""

    def make():
        model = Dense()
        model.own = nn.Linear(4, 4 + dist.get_rank())
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, ["own.weight", "own.bias"]
        )
        return model

    return compared(make, sgd)


def stale():
    """A backward pass from values that were read, unseen by any gate, before their update: one clear error."""
    torch.manual_seed(7)
    model = Dense()
    wrapped, optimizer = wrap("legato", model, sgd(model.parameters()))
    train(wrapped, optimizer, 6)
    x, y = model.batch(torch.Generator())
    with torch._C.DisableTorchFunctionSubclass():
        loss = F.cross_entropy((x @ model.first.weight.T)[:, :10], y)
    attachment(wrapped).reducer.armed = True  # as after a forward pass
    loss.backward()


def left_to_ddp(what):
    """Why passes stay DDP's."""
    torch.manual_seed(7)
    with first_passes(2):
        model = Dense()
        ddp = nn.parallel.DistributedDataParallel(model)
        if what == "parameters of two models":
            other = Dense()
            other.first = model.first
            wrapped = nn.parallel.DistributedDataParallel(other)
            attach(wrapped, sgd(other.parameters()), random_plan(other, 1))
        attach(ddp, sgd(model.parameters()), random_plan(model, 0), **OPTIONS)
    if what == "backward passes in forward passes":
        ddp.require_backward_grad_sync, plain = True, model.forward

        def forward(x):
            model.first(x).sum().backward()
            return plain(x)

        model.forward = forward
    for _ in range(4):
        ddp(torch.ones(2, 12)).sum().backward()
    return attachment(ddp).reason


def wrapped_before():
    """Why passes stay DDP's, if models with a parameter of this one were wrapped and then dropped: in the end they
    are garbage still on one rank, and gone on the other."""
    torch.manual_seed(7)
    model = Dense()
    gc.disable()
    try:
        with first_passes(2):
            for _ in range(3):
                other = Dense()
                other.first = model.first
                attach(nn.parallel.DistributedDataParallel(other), sgd(other.parameters()), random_plan(other, 1))
                del other
                if dist.get_rank() == 1:
                    gc.collect()
        wrapped, optimizer = wrap("legato", model, sgd(model.parameters()))
        train(wrapped, optimizer, 3)
    finally:
        gc.enable()
    return attachment(wrapped).reason


ROWS = [
    no_sync, adversaries, common_parameters, kept_gradients, post_hooks, one_optimizer_over_two_models,
    copied_and_trained, scaled_gradients, adafactor_of_several_dtypes, other_weights, meshed, ignored_of_other_shapes,
]  # fmt: skip
