"""What models do in their passes, and models that change."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.rows import SHARDED, row
from support.training import Dense, adam, build, sgd, train, trained, wrap
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# ---- passes ----------------------------------------------------------------------------


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


@row()
@pytest.mark.parametrize("which", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
def test_reentrant_checkpointing(kind, which):
    return trained(kind, Reentrant(which), sgd)


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


@row("views", "four ranks", *SHARDED)
def test_another_way_in_every_iteration(kind):
    return trained(kind, Wandering(), adam, options={"find_unused_parameters": True})


class Branching(Dense):
    """Control flow that dynamo compiles, sparse tensors, and a copy of a module, all in the forward pass."""

    def forward(self, x):
        copy.deepcopy(self.second)
        x = torch.cond(x.sum() > 0, lambda x: F.gelu(self.first(x)), lambda x: torch.sin(self.first(x)), (x,))
        x = torch.sparse.mm(torch.eye(len(x)).to_sparse(), self.second(x))
        return self.third(torch.eye(len(x)).to_sparse_csr() @ F.gelu(x))


@row("views", "four ranks", *SHARDED)
def test_control_flow(kind):
    return trained(kind, Branching(), adam)


@row("views", "four ranks", *SHARDED)
def test_a_compiled_function_takes_parameters_that_wait(kind):
    torch._dynamo.reset()
    model = Dense()
    run = torch.compile(lambda x, w: F.gelu(x @ w.T), backend="aot_eager")
    model.forward = lambda x: model.third(run(run(x, model.first.weight), model.second.weight))
    return trained(kind, model, sgd)


# ---- models that change ----------------------------------------------------------------


@row("views", "four ranks", *SHARDED)
def test_parameters_are_unfrozen_frozen_and_unfrozen_again(kind):
    """DDP does not know those that were frozen at first."""
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


@row("views", "four ranks", *SHARDED)
def test_a_module_that_is_added_later_is_each_ranks_own(kind):
    """As under DDP."""
    model = build("Partial")
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()), find_unused_parameters=True)
    train(wrapped, optimizer, 5)
    torch.manual_seed(100 + dist.get_rank())
    model.frozen = nn.Sequential(model.frozen, nn.Linear(12, 12))
    optimizer.add_param_group({"params": model.frozen[1].parameters(), "lr": 0.02})
    return train(wrapped, optimizer, 10)


@row("views", "four ranks")
def test_a_layer_that_replaces_another_is_unknown_to_ddp(kind):
    model = Dense()
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()), find_unused_parameters=True)
    train(wrapped, optimizer, 4)
    model.third = nn.Linear(16, 10, bias=False)
    return train(wrapped, optimizer, 3)


@row("views", "four ranks", *SHARDED)
@pytest.mark.parametrize("forget", [False, True])
def test_a_second_phase_of_training(kind, forget):
    """The same module is wrapped again, with or without `del` of the first wrapper."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    train(wrapped, optimizer, 5)
    if forget:
        del wrapped, optimizer
    again, second = wrap(kind, model, sgd(model.parameters()), seed=5)
    return train(again, second, 5, seed=3)


# ---- models that fail ------------------------------------------------------------------


class Failing(Dense):
    """Raises in some forward passes."""

    fails = False

    def forward(self, x):
        if self.fails:
            raise MemoryError("no more")
        return super().forward(x)


@row("views", "four ranks")
def test_every_third_forward_pass_fails_on_all_ranks(kind):
    """They go on."""
    model = Failing()
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for i in range(12):
        x, y = model.batch(generator)
        model.fails = i % 3 == 2
        optimizer.zero_grad()
        try:
            F.cross_entropy(wrapped(x), y).backward()
        except MemoryError:
            continue
        optimizer.step()
    return wrapped
