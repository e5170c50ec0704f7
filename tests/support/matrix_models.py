"""Rows of the equality matrix: what models do, and what is done with them. Everything here runs on the ranks."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from legato.pytorch.runtime.waiting.gate import GatedParameter
from legato.pytorch.runtime.waiting.readers import WATCHED
from support.matrix_rows import STEPS, Dense, adam, apart, compared, sgd
from support.training import build, distance, train, under_both, wrap


class Reentrant(nn.Module):
    """Re-entrant checkpointing; the first gradient comes from a backward pass inside the backward pass."""

    def __init__(self, which):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.which = which

    def forward(self, x):
        x.requires_grad_()
        for i, layer in enumerate(self.layers):
            x = F.gelu(checkpoint(layer, x, use_reentrant=True) if i in self.which else layer(x))
        return x[:, :10]

    batch = Dense.batch


class Wandering(nn.Module):
    """Takes another way in every iteration and on every rank."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 10)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        first = (self.calls + dist.get_rank()) % 4
        for way in range(first, 4, 1 + self.calls % 2):
            x = F.gelu(self.ways[way](x))
        return self.head(x)

    batch = Dense.batch


def reentrant(which):
    return compared(lambda: Reentrant(which), sgd)


def wandering():
    return compared(Wandering, adam, ddp={"find_unused_parameters": True})


@under_both
def unfrozen(kind):
    """Parameters that are unfrozen, frozen and unfrozen again; DDP does not know those that were frozen at first."""
    model = build("Partial")
    model.never.requires_grad_(False)
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()), find_unused_parameters=True)
    train(wrapped, optimizer, 10)
    for thawed in (model.frozen, model.never, model.body):
        thawed.requires_grad_(True)
        train(wrapped, optimizer, 10, seed=12)
        model.body.requires_grad_(False)
        train(wrapped, optimizer, 5, seed=13)
    return wrapped


@under_both
def added(kind):
    """A module that is added after the model was distributed is each rank's own, as under DDP."""
    model = build("Partial")
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()), find_unused_parameters=True)
    train(wrapped, optimizer, 5)
    torch.manual_seed(100 + dist.get_rank())
    model.frozen = nn.Sequential(model.frozen, nn.Linear(12, 12))
    optimizer.add_param_group({"params": model.frozen[1].parameters(), "lr": 0.02})
    return train(wrapped, optimizer, 10)


@under_both
def compiled_function(kind):
    """A compiled function that takes parameters while they wait for their update."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    model = Dense()
    run = torch.compile(lambda x, w: F.gelu(x @ w.T), backend="aot_eager")
    model.forward = lambda x: model.third(run(run(x, model.first.weight), model.second.weight))
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    return train(wrapped, optimizer, 8)


def own_hooks():
    """Hooks on parameters, modules, and whole backward passes, that look and that change."""
    seen = {"ddp": [], "legato": []}

    def hooked(kind, wrapped, optimizer):
        model, log = wrapped.module, seen[kind]
        model.first.weight.register_hook(lambda g: g * 0.5)
        model.first.register_forward_pre_hook(lambda m, x: (x[0] * 1.01,))
        model.second.register_forward_hook(lambda m, x, y: log.append(m.weight.norm().item()))
        model.second.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.9,))
        model.third.register_full_backward_pre_hook(lambda m, go: (go[0] * 1.1,))
        wrapped.register_forward_hook(lambda m, x, y: log.append(y.sum().item()))

    found = compared(Dense, adam, after=hooked)
    return max(found, apart(*seen.values()))


def late_hooks():
    """Hooks on gradients that are registered last of all, and change what is sent."""

    def hooked(kind, wrapped, optimizer):
        def clamp(p):
            p.grad.clamp_(-0.01, 0.02)

        def scale(p):
            p.grad = p.grad * 1.5

        for p in wrapped.module.parameters():
            p.register_post_accumulate_grad_hook(clamp)
            p.register_post_accumulate_grad_hook(scale)

    return compared(Dense, adam, after=hooked)


class Uneven(Dense):
    """The middle is used on rank 0 only."""

    def forward(self, x):
        x = F.gelu(self.first(x))
        return self.third(F.gelu(self.second(x)) if dist.get_rank() == 0 else x)


def zeroed_after_backward():
    """Gradients that are set to zero before the step, which then goes by its momentum; one rank has none of some."""

    def step(optimizer, i):
        if i % 2:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    return compared(Uneven, sgd, ddp={"find_unused_parameters": True}, step=step)


class Turning(nn.Module):
    """A complex weight that only rank 0 uses."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(12, dtype=torch.complex64))
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        return self.head((x * self.turn).abs() if dist.get_rank() == 0 else x)

    batch = Dense.batch


def complex_on_one_rank():
    """A complex gradient that one rank does not have."""
    return compared(Turning, sgd, ddp={"find_unused_parameters": True})


def missing_gradient():
    """A custom function that gives None for its gradient, on one rank and on both."""

    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, silent):
            ctx.silent = silent
            return weight.clone()

        @staticmethod
        def backward(ctx, grad):
            return None if ctx.silent else grad, None

    class Model(Dense):
        calls = 0

        def forward(self, x):
            self.calls += 1
            silent = self.calls % 3 == 0 or (self.calls % 3 == 1 and dist.get_rank() == 1)
            return super().forward(F.linear(x, Silent.apply(self.before, silent)))

        def __init__(self):
            super().__init__()
            self.before = nn.Parameter(torch.randn(12, 12) / 4)

    return compared(Model, sgd, ddp={"find_unused_parameters": True})


@under_both
def local_after_sending(kind):
    """A backward pass that is not sent, after one that was, and before the step: added to the average."""
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


def averaged():
    """Averages of the weights over time: of the model, and of the wrapped model."""
    averages = {}
    for kind in ("ddp", "legato"):
        model = build("Convolutional")
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
        swa = torch.optim.swa_utils
        ema = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
        outer = swa.AveragedModel(wrapped, use_buffers=True)
        shadow = copy.deepcopy(wrapped)
        x, _ = model.batch(torch.Generator().manual_seed(3))
        for i in range(6):
            train(wrapped, optimizer, 2, seed=i)
            ema.update_parameters(model)
            outer.update_parameters(wrapped)
        shadow.eval()
        averages[kind] = [*ema.parameters(), *outer.parameters(), *outer.buffers(), shadow(x)]
        assert list(wrapped.state_dict()) == list(shadow.state_dict())
    return max((a - b).abs().max().item() for a, b in zip(*averages.values(), strict=True))


def inference():
    """Evaluation in inference mode right after a step, whose updates are then still to come."""
    trained = []
    for kind in ("ddp", "legato"):
        model = build("Attention")
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
        x, _ = model.batch(torch.Generator().manual_seed(0))
        outputs = []
        for i in range(4):
            train(wrapped, optimizer, 1 + i % 2, seed=i)
            with torch.inference_mode(), torch.random.fork_rng():
                outputs.append(wrapped(x).sum().item())
        trained.append((wrapped, outputs))
    (ddp, expected), (ours, found) = trained
    return max(distance(ddp, ours), apart(expected, found))


def closures():
    """`step(closure)` of an optimizer that is not LBFGS, as Lightning calls it: updates wait all the same."""
    trained, waits = [], []
    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = Dense()
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(STEPS):
            x, y = model.batch(generator)

            def closure(x=x, y=y, wrapped=wrapped, optimizer=optimizer):
                loss = F.cross_entropy(wrapped(x), y)
                optimizer.zero_grad()
                loss.backward()
                return loss

            with torch.no_grad():
                assert optimizer.step(closure) > 0
            waits.append(type(model.third.weight) is GatedParameter)
        trained.append(wrapped)
    return distance(*trained) if waits == [False] * (STEPS + WATCHED - 1) + [True] * (STEPS - WATCHED + 1) else waits


@under_both
def uneven_inputs(kind):
    """`join()`: rank 1 has fewer batches than the others, which go on."""
    model = build("Convolutional")
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    with wrapped.join():
        train(wrapped, optimizer, 4 if dist.get_rank() == 1 else 9)
    return wrapped
