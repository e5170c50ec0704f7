"""A capture leaves model, optimizer and random generators as it found them."""

import random

import numpy
import pytest
import torch
from support import captured
from support.captured import TRAININGS, record
from torch import nn
from torch.nn.modules import module as module_globals

from legato.core.errors import CaptureError
from legato.pytorch.recording.capture import capture
from legato.pytorch.recording.snapshot import Snapshot

every_training = pytest.mark.parametrize("training", TRAININGS, ids=lambda t: t.__name__)


def everything(model, optimizer):
    """All state that a step changes, as bytes and plain values."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    bits = {name: (id(t), t.detach().numpy().tobytes()) for name, t in tensors.items()}
    grads = {
        n: p.grad if p.grad is None else (id(p.grad), p.grad.numpy().tobytes()) for n, p in model.named_parameters()
    }
    state = [
        {k: v.numpy().tobytes() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[p].items()}
        for p in model.parameters()
        if p in optimizer.state
    ]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    flags = [(m.training, sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    required = [(p.requires_grad, len(p._post_accumulate_grad_hooks or ())) for p in model.parameters()]
    everywhere = (len(module_globals._global_forward_hooks), len(module_globals._global_forward_pre_hooks))
    generators = (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().numpy().tobytes())
    return bits, grads, state, groups, flags, required, everywhere, generators, sorted(vars(optimizer))


@every_training
@pytest.mark.parametrize("trained", [False, True])
def test_nothing_is_changed(training, trained):
    model, optimizer, loss = training()
    if trained:
        for _ in range(2):
            loss().backward()
            optimizer.step()
    before = everything(model, optimizer)
    capture(model, optimizer, lambda: (random.random(), numpy.random.rand(), loss())[2], runs=2)
    assert everything(model, optimizer) == before


def test_nothing_is_changed_when_a_step_fails():
    model, optimizer, loss = captured.branches()
    loss().backward()
    calls = []

    def fails_in_the_recorded_step():
        calls.append(1)
        value = loss()
        if len(calls) == 4:
            raise RuntimeError("no more data")
        return value

    before = everything(model, optimizer)
    with pytest.raises(
        CaptureError, match=r"loss\(\) raised RuntimeError: no more data \(.*test_capture_state.py:\d+\)"
    ):
        capture(model, optimizer, fails_in_the_recorded_step)
    assert everything(model, optimizer) == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@every_training
def test_training_goes_on_as_if_it_had_not_been_captured(training):
    def train(interrupted):
        torch.manual_seed(3)
        model, optimizer, loss = training()
        for i in range(4):
            if interrupted and i == 2:
                capture(model, optimizer, loss, runs=1)
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    left, right = train(False), train(True)
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_recording_does_not_change_what_a_step_computes():
    def train(recorded):
        torch.manual_seed(3)
        model, optimizer, loss = captured.branches()
        for _ in range(3):
            if recorded:
                record(model, optimizer, loss)
            else:
                loss().backward()
                optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    left, right = train(False), train(True)
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_snapshot_puts_back_what_steps_do_not_change():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model.register_buffer("positions", torch.arange(3).expand(2, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    with Snapshot(model, optimizer):
        model[1].eval()
        model[0].bias.requires_grad_(False)
        model[0].cache = torch.ones(1)
        optimizer.param_groups[0]["lr"].fill_(7)
        optimizer.param_groups[0]["extra"] = 1
        optimizer.steps = 3
    assert model[1].training and model[0].bias.requires_grad and not hasattr(model[0], "cache")
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.1)
    assert "extra" not in optimizer.param_groups[0] and not hasattr(optimizer, "steps")
