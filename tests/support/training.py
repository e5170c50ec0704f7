"""Small models, random plans and training loops, for the ranks of a test."""

import copy
import functools
import random
from contextlib import contextmanager

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import legato
from legato.core.plan import Message, Plan, Slice
from legato.pytorch import attach
from legato.pytorch.parameters import trained_parameters
from legato.pytorch.runtime.attached import attachment as runtime

#: The cases are about legato's passes, and most have few steps: here the first passes, too, are legato's.
runtime.FIRST_PASSES = 0

STEPS = 10


@contextmanager
def first_passes(count):
    """The first `count` passes of models that are wrapped inside are DDP's."""
    runtime.FIRST_PASSES = count
    try:
        yield
    finally:
        runtime.FIRST_PASSES = 0


class Dense(nn.Module):
    """Matrices only, as Muon wants them."""

    def __init__(self, dtype=None):
        super().__init__()
        self.first, self.second = nn.Linear(12, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.third = nn.Linear(16, 10, bias=False)
        self.to(dtype or torch.get_default_dtype())

    def forward(self, x):
        return self.third(F.gelu(self.second(F.gelu(self.first(x.to(self.first.weight.dtype))))))

    def batch(self, generator):
        return torch.randn(4, 12, generator=generator), torch.randint(0, 10, (4,), generator=generator)


class Convolutional(nn.Module):
    """Branches and batch norm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = torch.cat([self.left(x), self.right(x)], 1)
        return self.head(F.adaptive_avg_pool2d(F.relu(x), 4).flatten(1))

    def batch(self, generator):
        return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)


class Attention(nn.Module):
    """`nn.MultiheadAttention` reads its parameters functionally; embeddings tied; dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x)[:, -1]

    def batch(self, generator):
        return torch.randint(0, 20, (4, 6), generator=generator), torch.randint(0, 20, (4,), generator=generator)


class Recurrent(nn.Module):
    """An LSTM, run twice in one forward pass (a module called twice)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, x):
        x, state = self.lstm(self.embed(x))
        x, _ = self.lstm(x, state)
        return self.head(x[:, -1])

    batch = Attention.batch


class Partial(nn.Module):
    """A frozen parameter, one that is never used, and one that only even ranks use."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(12, 12)
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.never = nn.Linear(12, 12)
        self.sometimes = nn.Linear(12, 12)
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        x = self.frozen(F.relu(self.body(x)))
        if dist.get_rank() % 2 == 0:
            x = x + self.sometimes(x)
        return self.head(x)

    batch = Dense.batch


class Checkpointed(nn.Module):
    """The forward pass of the middle is run again inside the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 10)

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = self.first(x)
        return self.last(checkpoint(lambda y: F.gelu(self.middle(F.gelu(y))), x, use_reentrant=False))

    batch = Dense.batch


class Mixed(nn.Module):
    """Weights of both memory formats, one number, and one that is large."""

    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(12, 300), nn.Parameter(torch.tensor(1.0))
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(180, 10)

    def forward(self, x):
        x = x.to(self.scale.dtype)
        return self.head(F.gelu(self.conv(self.body(x * self.scale).view(-1, 3, 10, 10)[:, :, :8, :8])).flatten(1))

    batch = Dense.batch


MODELS = {m.__name__: m for m in (Convolutional, Attention, Recurrent, Partial, Checkpointed)}

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, amsgrad=True),
    "rmsprop-foreach": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, foreach=True),
    "adam-fused": lambda ps: torch.optim.Adam(ps, lr=1e-2, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def build(name):
    torch.manual_seed(7)
    return MODELS[name]()


def random_plan(model, seed, forward_overlap=True):
    """Cuts tensors anywhere, merges neighbours in a random order."""
    rng = random.Random(seed)
    pieces = []
    for name, p in trained_parameters(model).items():
        size, at = p.numel(), 0
        while at < size:
            stop = size if rng.random() < 0.6 else rng.randint(at + 1, size)
            pieces.append(Slice(name, at * p.element_size(), stop * p.element_size()))
            at = stop
    rng.shuffle(pieces)
    messages = []
    while pieces:
        count = min(len(pieces), rng.choice([1, 1, 2, 3, 8]))
        messages.append(Message(tuple(pieces[:count])))
        pieces = pieces[count:]
    plan = Plan("random", tuple(messages), forward_overlap=forward_overlap)
    return sharded_plan(plan, rng, SHARD[-1]) if SHARD else plan


def sharded_plan(plan, rng, shard):
    """A plan with halves in place of all-reduces; all-gathers come anywhere behind their reduce-scatters."""
    halves = [msgspec.structs.replace(message, kind="reduce_scatter") for message in plan.messages]
    early = rng.random() < 0.5
    for message in plan.messages:
        second = msgspec.structs.replace(message, kind="all_gather")
        at = next(i for i, first in enumerate(halves) if first.slices == message.slices)
        halves.insert(rng.randint(at + 1 if early else len(plan.messages), len(halves)), second)
    return msgspec.structs.replace(plan, messages=tuple(halves), shard=shard)


#: More for `legato.distribute` in every case.
OPTIONS = {}
#: What random plans shard.
SHARD = []
#: Not empty if plans are legato's own (`automatic.hasty`).
AUTOMATIC = []
#: The arguments of `model.compile()` in every case, if models are to be compiled.
COMPILED = {}


def wrap(kind, model, optimizer, seed=0, **options):
    """The model under DDP (`ddp`) or under a random plan (`legato`), and its optimizer."""
    if COMPILED:
        torch._dynamo.reset()
        model.compile(**COMPILED)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, **options), optimizer
    if AUTOMATIC:
        return legato.distribute(model, optimizer, **options, **OPTIONS)
    return attach(model, optimizer, random_plan(model, seed), **options, **OPTIONS)


def lent(case, *arguments):
    """A case with gradients that are views of the messages."""
    OPTIONS["gradient_as_bucket_view"] = True
    try:
        return case(*arguments)
    finally:
        OPTIONS.clear()


def sharded(shard, case, *arguments):
    """A case whose random plans are sharded."""
    SHARD.append(shard)
    try:
        return case(*arguments)
    finally:
        SHARD.clear()


def compiled(case, *arguments):
    """A case with models that are compiled in place."""
    COMPILED["backend"] = "aot_eager"
    try:
        return case(*arguments)
    finally:
        COMPILED.clear()


def in_double(case, *arguments):
    """A case in float64, where many ranks' orders of addition make next to no difference."""
    torch.set_default_dtype(torch.float64)
    try:
        return case(*arguments)
    finally:
        torch.set_default_dtype(torch.float32)


def train(model, optimizer, steps, seed=11, inner=None, step=None, zero="before", set_to_none=True, loss_of=None):
    """Steps of training on this rank's own data; `inner` is called between backward and step."""
    loss_of = loss_of or (lambda x, y: F.cross_entropy(model(x), y))
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    torch.manual_seed(seed)
    for i in range(steps):
        x, y = model.module.batch(generator)
        if zero == "before":
            optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(x, y)
        if zero == "between":
            optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        if inner:
            inner(model, optimizer, i)
        (step or (lambda o, i: o.step()))(optimizer, i)
        if zero == "after":
            optimizer.zero_grad(set_to_none=set_to_none)
    return model


def trained(kind, model, optimizer, steps=STEPS, seed=0, options=None, **training):
    """A model after `steps` under DDP or a random plan; `options` are more for DDP.

    `model` is one or the name of one, and `optimizer` a function of parameters or its name.
    """
    model = build(model) if isinstance(model, str) else model
    optimizer = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    options = {"find_unused_parameters": isinstance(model, Partial), **(options or {})} if kind == "ddp" else {}
    return train(*wrap(kind, model, optimizer(model.parameters()), seed, **options), steps, **training)


def under_both(row):
    """Make of `row(kind, ...)`, which trains a model under DDP or legato and returns it, the distance of the two.

    It may also return tensors, which have to be equal; on more than two ranks, but for the order of additions.
    """

    @functools.wraps(row)
    def compared(*arguments, **options):
        models, seen = [], []
        for kind in ("ddp", "legato"):
            torch.manual_seed(7)
            found = row(kind, *arguments, **options)
            model, values = found if isinstance(found, tuple) else (found, [])
            models.append(model)
            seen.append(list(values))
        same = len(seen[0]) == len(seen[1]) and all(map(alike, *seen))
        return distance(*models) if same else float("inf")

    return compared


def alike(a, b):
    """Equal, or all but equal numbers of float64 where more than two ranks may add up in other orders."""
    return torch.equal(a, b) or (dist.get_world_size() > 2 and torch.allclose(a, b, rtol=1e-9, atol=1e-12))


def distance(a, b):
    """Largest difference between two state dicts, relative to the largest value; NaN if there is one in it."""
    a, b = a.state_dict(), b.state_dict()
    assert list(a) == list(b)
    found = []
    for key in a:
        x, y = (state[key].to(torch.promote_types(state[key].dtype, torch.float64)) for state in (a, b))
        found.append((x - y).abs().max() / x.abs().max().clamp(min=1e-12))
    return torch.stack(found).max().item()


def same(a, b):
    """Whether two states are equal bit for bit, in everything."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    return a == b


def rounding_error(model, plan):
    """Worst error of one averaged gradient against the exact average, in units of its bound.

    Each of n numbers is first multiplied by 1/n (rounded: relative error eps
    for 1/n itself and eps for the product), then n - 1 additions in any order
    add at most (n - 1) eps times the sum of absolute values; to first order the
    error is below (n + 1) eps * sum|g| / n.
    """
    n, untrained = dist.get_world_size(), copy.deepcopy(model.state_dict())
    wrapped, optimizer = attach(model, OPTIMIZERS["sgd"](model.parameters()), plan)
    x, y = model.batch(torch.Generator().manual_seed(dist.get_rank()))
    with wrapped.no_sync():
        F.cross_entropy(wrapped(x), y).backward()
    local = {name: p.grad.double() for name, p in model.named_parameters()}
    model.load_state_dict(untrained)
    optimizer.zero_grad()
    F.cross_entropy(wrapped(x), y).backward()
    errors = []
    for name, p in model.named_parameters():
        total, absolute = local[name].clone(), local[name].abs()
        dist.all_reduce(total)
        dist.all_reduce(absolute)
        bound = (n + 1) * torch.finfo(torch.float32).eps * absolute / n + 1e-30
        errors.append(((p.grad.double() - total / n).abs() / bound).max())
    return torch.stack(errors).max().item()
