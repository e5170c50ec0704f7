"""Autocast and loss scaling, parameters of other dtypes and of several, and numbers that are not finite."""

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from support.rows import SHARDED, in_mode, row
from support.training import STEPS, Dense, adam, build, sgd, train, trained, wrap
from torch import nn
from torch.nn import functional as F

from legato.core.errors import RankError


@row("compiled")
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adafactor", "Muon"])
def test_autocast(kind, name):
    """The forward pass under autocast; updates, which run inside it, do not."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, getattr(torch.optim, name)(model.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x, y = model.batch(generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
    return wrapped


def scaled(kind, fused=False):
    model = Dense()
    wrapped, optimizer = wrap(kind, model, torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for i in range(STEPS):
        x, y = model.batch(generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(wrapped(x), y)
        if i % 5 == 2 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if i % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() != 2.0**10
    return wrapped, [torch.tensor(scaler.get_scale())]


@row("views", "four ranks", "compiled")
@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling(kind, fused):
    """fp16 autocast with GradScaler and clipping; now and then the gradients of one rank overflow."""
    return scaled(kind, fused)


@on_ranks(2)
def test_torchs_scaler_is_refused_where_gradients_are_sharded():
    with pytest.raises(RankError, match="sharded"):
        in_mode(["sharded optimizer"], scaled, "legato")


@row()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(kind, dtype):
    """Parameters and gradients of one dtype, cast before the model is distributed."""
    return trained(kind, Dense(dtype), adam if dtype == torch.float64 else sgd)


class Mixed(Dense):
    """Layers of three dtypes, with biases."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 16, dtype=torch.bfloat16), nn.Linear(16, 16, dtype=torch.float64)
        self.third = nn.Linear(16, 10)

    def forward(self, x):
        x = F.gelu(self.first(x.bfloat16()))
        return self.third(F.gelu(self.second(x.double())).float())


@row("views")
def test_several_dtypes(kind):
    return trained(kind, Mixed(), sgd)


@row("views")
def test_adafactor_of_several_dtypes(kind):
    """It takes its epsilon from the dtype of a group's first parameter."""
    return trained(kind, Mixed(), lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2))


class Complex(Dense):
    """A complex weight."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(16, 16, dtype=torch.complex64)

    def forward(self, x):
        return self.third(self.second(self.first(x).to(torch.complex64)).abs())


@row("views", *SHARDED)
def test_complex_weights(kind):
    return trained(kind, Complex(), sgd)


class Turning(nn.Module):
    """A complex weight that only rank 0 uses."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(12, dtype=torch.complex64))
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        return self.head((x * self.turn).abs() if dist.get_rank() == 0 else x)

    batch = Dense.batch


@row("views", "four ranks")
def test_a_complex_gradient_that_one_rank_has_alone(kind):
    return trained(kind, Turning(), sgd, options={"find_unused_parameters": True})


@on_ranks(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite(value):
    """On one rank, from step 5 on: all ranks get the same weights as under DDP."""
    models = []
    for kind in ("ddp", "legato"):
        model = build("Convolutional")
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
        train(wrapped, optimizer, 5)
        if dist.get_rank() == 1:
            model.head.weight.register_hook(lambda g: torch.full_like(g, value))
        models.append(train(wrapped, optimizer, 3))
    ddp, ours = ([p.detach() for p in model.parameters()] for model in models)
    torch.testing.assert_close(ours, ddp, rtol=0, atol=0, equal_nan=True)
    assert not all(p.isfinite().all() for p in ours)
