"""Rows of the equality matrix: failures, checkpoints, refusals. Everything here runs on the ranks."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from legato.pytorch import attach
from support.matrix_rows import STEPS, Dense, adam, sgd
from support.training import build, distance, random_plan, train, under_both, wrap

# ---- failures ------------------------------------------------------------------------


class Failing(Dense):
    """Raises in its forward or its backward pass, on some ranks, in some calls."""

    def __init__(self):
        super().__init__()
        self.fails = None

    def forward(self, x):
        if self.fails == "forward":
            raise MemoryError("no more")
        x = F.gelu(self.second(F.gelu(self.first(x))))
        if self.fails == "backward":

            def fail(grad):
                raise MemoryError("no more")

            x.register_hook(fail)
        return self.third(x)


@under_both
def caught(kind):
    """Every third forward pass fails on all ranks, which go on."""
    model = Failing()
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for i in range(12):
        x, y = model.batch(generator)
        model.fails = "forward" if i % 3 == 2 else None
        optimizer.zero_grad()
        try:
            F.cross_entropy(wrapped(x), y).backward()
        except MemoryError:
            continue
        optimizer.step()
    return wrapped


# ---- checkpoints --------------------------------------------------------------------------


def first_half(path):
    """Train ten steps under legato and save; rank 0's checkpoint is everybody's."""
    torch.manual_seed(7)
    model = Dense()
    wrapped, optimizer = wrap("legato", model, adam(model.parameters()))
    train(wrapped, optimizer, 10)
    if dist.get_rank() == 0:
        torch.save({"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()


def hooks_after_loading():
    """Hooks on an optimizer that has loaded a state run once a step."""
    model, calls = Dense(), []
    wrapped, optimizer = wrap("legato", model, adam(model.parameters()))
    train(wrapped, optimizer, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(wrapped, optimizer, 3)
    return len(calls)


@under_both
def second_half(kind, path):
    """Resume on these ranks, under DDP and under legato; the distance of the two."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()), seed=dist.get_world_size())
    state = torch.load(path)
    wrapped.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return train(wrapped, optimizer, 10, seed=50)


def whole_batch(optimizer_name):
    """Distance from one process that trains on all ranks' batches together."""
    n = dist.get_world_size()
    torch.manual_seed(7)
    model, single = Dense(torch.float64), None
    single = copy.deepcopy(model)
    make = {"sgd": sgd, "adam": adam}[optimizer_name]
    wrapped, optimizer = wrap("legato", model, make(model.parameters()))
    alone = make(single.parameters())
    generators = [torch.Generator().manual_seed(r) for r in range(n)]
    for _ in range(STEPS):
        batches = [model.batch(g) for g in generators]
        x, y = batches[dist.get_rank()]
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        alone.zero_grad()
        F.cross_entropy(single(torch.cat([b[0] for b in batches])), torch.cat([b[1] for b in batches])).backward()
        alone.step()
    return distance(model, single)


# ---- what must be refused -------------------------------------------------------------------


@under_both
def replaced(kind):
    """A layer is replaced after the model was wrapped: DDP does not know the new one."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()), find_unused_parameters=True)
    train(wrapped, optimizer, 4)
    model.third = nn.Linear(16, 10, bias=False)
    return train(wrapped, optimizer, 3)


def step_inside_the_backward_pass():
    model = Dense()
    wrapped, optimizer = wrap("legato", model, sgd(model.parameters()))
    model.first.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    train(wrapped, optimizer, 1)


def caught_in_the_backward_pass():
    model = Failing()
    wrapped, _ = wrap("legato", model, sgd(model.parameters()))
    x, y = model.batch(torch.Generator())
    model.fails = "backward"
    try:
        F.cross_entropy(wrapped(x), y).backward()
    except MemoryError:
        wrapped(x)


def synchronized_batch_norm():
    """Torch's own refusal on the CPU, the same under both."""
    texts = []
    for kind in ("ddp", "legato"):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(build("Convolutional"))
        try:
            train(*wrap(kind, model, sgd(model.parameters())), 1)
        except ValueError as error:
            texts.append(str(error))
    raise ValueError(texts[0] if len(set(texts)) == 1 else texts)


def other_settings(what):
    """Rank 1 has another setting of torch, another learning rate, or another optimizer."""
    model = Dense()
    mine = dist.get_rank() == 1
    lr = 0.2 if mine and what == "lr" else 0.1
    optimizer = adam(model.parameters()) if mine and what == "optimizer" else torch.optim.SGD(model.parameters(), lr=lr)
    if mine and what == "dtype":
        model.third.double()
    if mine and what == "frozen":
        model.third.requires_grad_(False)
    if mine and what == "torch":
        torch.use_deterministic_algorithms(True)
    try:
        attach(model, optimizer, random_plan(Dense(), 0))
    finally:
        torch.use_deterministic_algorithms(False)
