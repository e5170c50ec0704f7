"""Gradients that are accumulated, held, changed or missing."""

import pytest
import torch
import torch.distributed as dist
from support.rows import AUTO, SHARDED, row
from support.training import STEPS, Dense, adam, build, random_plan, sgd, train, trained, wrap
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from legato.pytorch import attachment

# ---- several passes before a step ------------------------------------------------------


@row("views", "four ranks")
@pytest.mark.parametrize("around", ["both", "forward", "backward"])
def test_no_sync_around_one_pass_or_both(kind, around):
    """Three micro-batches a step, of which the last is sent."""
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


@row("views", "four ranks")
def test_a_local_backward_pass_after_one_that_was_sent(kind):
    """Its gradients are added to the average."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        (x, y), (u, v) = model.batch(generator), model.batch(generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(x), y)
        with wrapped.no_sync():
            other = F.cross_entropy(wrapped(u), v)
        loss.backward()
        with wrapped.no_sync():
            other.backward()
        optimizer.step()
    return wrapped


@row("views", "four ranks")
def test_two_forward_passes_before_one_backward_pass(kind):
    """With batch norm."""
    model = build("Convolutional")
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def loss_of(x, y):
        return F.cross_entropy(wrapped(x), y) + wrapped(torch.ones_like(x)).square().mean()

    return train(wrapped, optimizer, STEPS, loss_of=loss_of)


@row("views", "four ranks")
def test_a_model_that_is_called_with_other_weights(kind):
    """Every third step; their gradients are not averaged."""
    model, seen = Dense(), []
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    for i in range(STEPS):
        train(wrapped, optimizer, 1, seed=i)
        if i % 3 == 1:
            others = {name: torch.ones_like(p, requires_grad=True) for name, p in wrapped.named_parameters()}
            x, _ = model.batch(torch.Generator().manual_seed(i))
            with wrapped.no_sync():
                functional_call(wrapped, others, (x,)).sum().backward()
            seen += [p.grad.sum() for p in others.values()]
    return wrapped, seen


# ---- held and changed ------------------------------------------------------------------


@row("four ranks")
def test_gradients_that_are_held(kind):
    """`[p.grad ...]`, kept from one step to the next, shows averages as soon as `backward()` returns."""
    model, seen = Dense(), []
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    held = [p.grad for p in model.parameters()]
    memory = [g.view(-1) for g in held]
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def look(*_):
        seen.extend(g.clone() for g in (*held, *memory))

    return train(wrapped, optimizer, STEPS, inner=look, set_to_none=False), seen


@row("four ranks")
def test_gradients_that_are_views_and_held_while_plans_change(kind):
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


@row("four ranks")
def test_gradients_that_are_changed_in_place(kind):
    """After the backward pass, one of them a subclass's."""
    model = Dense()
    model.second.weight = Special(model.second.weight.detach())

    def scale(wrapped, *_):
        for i, p in enumerate(wrapped.parameters()):
            p.grad.mul_(1 + i + dist.get_rank()).square_()
            p.grad.data = p.grad.data * 0.5

    return trained(kind, model, adam, inner=scale)


class Uneven(Dense):
    """The middle is used on rank 0 only."""

    def forward(self, x):
        x = F.gelu(self.first(x))
        return self.third(F.gelu(self.second(x)) if dist.get_rank() == 0 else x)


@row("views", "four ranks", *SHARDED)
def test_gradients_that_are_zeroed_before_the_step(kind):
    """It then goes by its momentum; one rank has none of some."""

    def step(optimizer, i):
        if i % 2:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    return trained(kind, Uneven(), sgd, options={"find_unused_parameters": True}, step=step)


# ---- missing ---------------------------------------------------------------------------


class Silent(torch.autograd.Function):
    """Gives None for its gradient if it is told to."""

    @staticmethod
    def forward(ctx, weight, silent):
        ctx.silent = silent
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        return None if ctx.silent else grad, None


class Silenced(Dense):
    """A gradient that is None in some calls, on one rank or on both."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.before = nn.Parameter(torch.randn(12, 12) / 4)

    def forward(self, x):
        self.calls += 1
        silent = self.calls % 3 == 0 or (self.calls % 3 == 1 and dist.get_rank() == 1)
        return super().forward(F.linear(x, Silent.apply(self.before, silent)))


@row("views", "four ranks", *SHARDED)
@pytest.mark.parametrize("find_unused", [False, True])
def test_a_custom_function_that_gives_no_gradient(kind, find_unused):
    model = Silenced()
    return train(*wrap(kind, model, sgd(model.parameters()), find_unused_parameters=find_unused), STEPS)


# ---- hooks -----------------------------------------------------------------------------


@row("views", "four ranks")
@pytest.mark.parametrize("seed", range(3))
def test_everything_is_brought_up_to_date_in_the_backward_pass(kind, seed):
    """Some gradients have been sent by then, others have not, and those of unused parameters never come."""
    model = build("Partial")
    options = {"find_unused_parameters": True} if kind == "ddp" else {}
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()), seed, **options)
    if kind == "legato":
        model.body.weight.register_post_accumulate_grad_hook(lambda _: attachment(wrapped).flush())
    return train(wrapped, optimizer, STEPS)


@row("views", *AUTO)
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_that_are_used_up_in_the_backward_pass(kind, find_unused, set_to_none):
    """Hooks step optimizers of single parameters before DDP sees the gradients."""
    model, seen = Dense(), []
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()), find_unused_parameters=find_unused)
    optimizers = {p: adam([p]) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad(set_to_none)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)

    def inner(model, *_):
        seen.extend(torch.empty(0) if p.grad is None else p.grad.clone() for p in model.parameters())

    return train(wrapped, optimizer, 2 * STEPS, inner=inner), seen


@row("views", "four ranks", "compiled", *SHARDED)
def test_own_hooks(kind):
    """On parameters, modules, and whole backward passes, that look and that change."""
    model, seen = Dense(), []
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    model.first.weight.register_hook(lambda g: g * 0.5)
    model.first.register_forward_pre_hook(lambda m, x: (x[0] * 1.01,))
    model.second.register_forward_hook(lambda m, x, y: seen.append(m.weight.norm().item()))
    model.second.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.9,))
    model.third.register_full_backward_pre_hook(lambda m, go: (go[0] * 1.1,))
    wrapped.register_forward_hook(lambda m, x, y: seen.append(y.sum().item()))
    return train(wrapped, optimizer, STEPS), [torch.tensor(seen)]


@row("views", "four ranks", "compiled", *SHARDED)
def test_hooks_that_come_last_and_change_what_is_sent(kind):
    model = Dense()
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))

    def clamp(p):
        p.grad.clamp_(-0.01, 0.02)

    def scale(p):
        p.grad = p.grad * 1.5

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clamp)
        p.register_post_accumulate_grad_hook(scale)
    return train(wrapped, optimizer, STEPS)
