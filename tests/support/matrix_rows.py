"""What the rows of the equality matrix have in common; everything here runs on the ranks.

A row returns how far its weights are from DDP's (0.0: bit for bit).
"""

import torch
from torch import nn
from torch.nn import functional as F

from support.training import train, under_both, wrap

STEPS = 10


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


@under_both
def compared(kind, make, optimizer_of, steps=STEPS, ddp=None, after=None, **training):
    """Train what `make` makes, with DDP and with legato; returns the distance of the weights.

    `after(kind, wrapped, optimizer)` runs once the model is wrapped, and may return what `train` needs.
    """
    model = make()
    wrapped, optimizer = wrap(kind, model, optimizer_of(model.parameters()), **(ddp or {} if kind == "ddp" else {}))
    extra = (after(kind, wrapped, optimizer) or {}) if after else {}
    return train(wrapped, optimizer, steps, **training, **extra)


def apart(expected, found):
    """How far two lists of numbers are from each other."""
    return max(abs(a - b) for a, b in zip(expected, found, strict=True))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)
