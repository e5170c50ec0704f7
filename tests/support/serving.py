"""A model, its training, and parameter servers for it, for the ranks of a test."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from legato.lab.servers import parameter_servers
from support import PATIENCE_S

STEPS = 5
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
}
#: The servers' own patience where ranks wait until it ends, because another one has failed and not said so.
SHORT_S = 60.0

serve = functools.partial(parameter_servers, patience_s=PATIENCE_S)


class Net(nn.Module):
    """A convolution, attention whose weights no module reads by itself, and a parameter used every other time."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.sometimes = nn.Linear(8, 8)
        self.out = nn.Linear(8, 5)
        self.calls = 0

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x)[0]
        self.calls += 1
        if self.calls % 2:
            x = x + self.sometimes(x)
        return self.out(x.mean(1))


def build(optimizer="momentum", make=Net):
    """A model and its optimizer, which is made by a function of parameters or of that name."""
    torch.manual_seed(7)
    model = make()
    return model, OPTIMIZERS.get(optimizer, optimizer)(model.parameters())


def batch(step, part=0, parts=1, size=12):
    random = torch.Generator().manual_seed(100 + step)
    images = torch.randn(size, 3, 5, 5, generator=random)
    labels = torch.randint(0, 5, (size,), generator=random)
    return images.chunk(parts)[part], labels.chunk(parts)[part]


def backward(model, step, parts=1, part=0):
    images, labels = batch(step, part, parts)
    F.cross_entropy(model(images), labels).backward()


def loop(model, optimizer, parts=1, part=0, steps=STEPS, first=0):
    """Train on one of the parts of every batch."""
    for step in range(first, first + steps):
        images, labels = batch(step, part, parts)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def values(model):
    return {k.removeprefix("module."): v.detach().clone() for k, v in model.state_dict().items()}


def distance(one, other):
    return max(float((one[k] - other[k]).abs().max()) for k in one)


def from_ddp(optimizer="momentum", run=loop, make=Net, find_unused_parameters=True, **options):
    """How far the values are that `run` gives two workers with servers from those under DDP; 0.0 on servers."""
    group, theirs = dist.new_group(range(2)), None
    if dist.get_rank() < 2:
        model, chosen = build(optimizer, make)
        ddp = nn.parallel.DistributedDataParallel(
            model, process_group=group, find_unused_parameters=find_unused_parameters
        )
        run(ddp, chosen, 2, dist.get_rank())
        theirs = values(ddp)

    def train(model, optimizer):
        run(model, optimizer, 2, model.worker)
        return values(model)

    ours = serve(*build(optimizer, make), train, servers=dist.get_world_size() - 2, **options)
    return 0.0 if ours is None else distance(theirs, ours)
