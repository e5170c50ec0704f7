"""Small models, random plans and training loops, for the ranks of a test."""

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


@contextmanager
def first_passes(count):
    """The first `count` passes of models that are wrapped inside are DDP's."""
    runtime.FIRST_PASSES = count
    try:
        yield
    finally:
        runtime.FIRST_PASSES = 0


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

    def batch(self, generator):
        return torch.randn(4, 12, generator=generator), torch.randint(0, 10, (4,), generator=generator)


class Checkpointed(nn.Module):
    """The forward pass of the middle is run again inside the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 10)

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = self.first(x)
        return self.last(checkpoint(lambda y: F.gelu(self.middle(F.gelu(y))), x, use_reentrant=False))

    batch = Partial.batch


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


def under_both(row):
    """Make of `row(kind, ...)`, which trains a model under DDP or legato and returns it, the distance of the two.

    It may also return tensors, which have to be equal.
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
        same = len(seen[0]) == len(seen[1]) and all(map(torch.equal, *seen))
        return distance(*models) if same else "not what DDP shows"

    return compared


def distance(a, b):
    """Largest difference between two state dicts, relative to the largest value."""
    a, b = a.state_dict(), b.state_dict()
    assert list(a) == list(b)
    worst = 0.0
    for key in a:
        x, y = a[key].double(), b[key].double()
        worst = max(worst, ((x - y).abs().max() / x.abs().max().clamp(min=1e-12)).item())
    return worst
