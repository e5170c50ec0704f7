"""What is refused in one clear line, on every rank, and what is left to DDP."""

import gc
import re

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from support.training import Dense, adam, build, first_passes, random_plan, sgd, train, wrap
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from legato.core.errors import RankError
from legato.pytorch import attach, attachment


@on_ranks(2)
@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("lr", "rank 1: group 0 of the optimizer: 3 parameters"),
        ("optimizer", "rank 1: optimizer: Adam here, SGD on rank 0"),
        ("dtype", "rank 1: parameter 'third.weight': (10, 16) torch.float64 on cpu here"),
        ("frozen", "rank 1: parameter 'third.weight': "),
        ("torch", "rank 1: torch.are_deterministic_algorithms_enabled(): True here"),
    ],
)
def test_one_rank_differs(what, line):
    """In a setting of torch, a learning rate, the optimizer, or the model."""
    model = Dense()
    differs = what if dist.get_rank() == 1 else None
    lr = 0.2 if differs == "lr" else 0.1
    optimizer = adam(model.parameters()) if differs == "optimizer" else torch.optim.SGD(model.parameters(), lr=lr)
    if differs == "dtype":
        model.third.double()
    if differs == "frozen":
        model.third.requires_grad_(False)
    torch.use_deterministic_algorithms(differs == "torch")
    try:
        with pytest.raises(RankError, match=re.escape(line)):
            attach(model, optimizer, random_plan(Dense(), 0))
    finally:
        torch.use_deterministic_algorithms(False)


@on_ranks(2)
def test_a_step_inside_the_backward_pass():
    model = Dense()
    wrapped, optimizer = wrap("legato", model, sgd(model.parameters()))
    model.first.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with pytest.raises(RankError, match=r"optimizer.step\(\) inside a backward pass"):
        train(wrapped, optimizer, 1)


@on_ranks(2)
def test_going_on_after_a_backward_pass_that_failed():
    model = Dense()
    wrapped, _ = wrap("legato", model, sgd(model.parameters()))

    def fail(*_):
        raise MemoryError("no more")

    model.second.register_full_backward_hook(fail)
    x, y = model.batch(torch.Generator())
    with pytest.raises(MemoryError):
        F.cross_entropy(wrapped(x), y).backward()
    with pytest.raises(RankError, match="the last backward pass did not finish"):
        wrapped(x)


@on_ranks(2)
def test_synchronized_batch_norm():
    """Torch's own refusal on the CPU, the same under both."""
    said = []
    for kind in ("ddp", "legato"):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(build("Convolutional"))
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules") as error:
            train(*wrap(kind, model, sgd(model.parameters())), 1)
        said.append(str(error.value))
    assert said[0] == said[1]


# ---- what is left to DDP ---------------------------------------------------------------


@on_ranks(2)
def test_models_with_a_common_parameter():
    with first_passes(2):
        model, other = Dense(), Dense()
        ddp = DistributedDataParallel(model)
        other.first = model.first
        wrapped = DistributedDataParallel(other)
        attach(wrapped, sgd(other.parameters()), random_plan(other, 1))
        attach(ddp, sgd(model.parameters()), random_plan(model, 0))
    for _ in range(4):
        ddp(torch.ones(2, 12)).sum().backward()
    assert attachment(ddp).reason == "it has a parameter of another model"


@on_ranks(2)
def test_backward_passes_inside_forward_passes():
    with first_passes(2):
        model = Dense()
        ddp, _ = wrap("legato", model, sgd(model.parameters()))
    plain = model.forward

    def forward(x):
        model.first(x).sum().backward()
        return plain(x)

    model.forward = forward
    for _ in range(4):
        ddp(torch.ones(2, 12)).sum().backward()
    assert attachment(ddp).reason == "backward passes run inside forward passes"


@on_ranks(2)
def test_models_that_are_garbage_on_one_rank_only():
    """They had a parameter of this one: in the end they are garbage still on one rank, and gone on the other."""
    model = Dense()
    gc.disable()
    try:
        with first_passes(2):
            for _ in range(3):
                other = Dense()
                other.first = model.first
                attach(DistributedDataParallel(other), sgd(other.parameters()), random_plan(other, 1))
                del other
                if dist.get_rank() == 1:
                    gc.collect()
        wrapped, optimizer = wrap("legato", model, sgd(model.parameters()))
        train(wrapped, optimizer, 3)
        assert attachment(wrapped).reason == ""
    finally:
        gc.enable()
