"""What `capture` says of a model's modules, for `fully_shard`."""

import pytest
import torch
from support import captured
from support.captured import TRAININGS
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from legato.pytorch.recording.capture import capture


def modules_of(model, x):
    workload = capture(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: model(x).sum(), runs=1, warmup=1)
    return {module.path: module for module in workload.modules}


@pytest.mark.parametrize("training", TRAININGS, ids=lambda t: t.__name__)
def test_every_parameter_is_listed_once(training):
    model, optimizer, loss = training()
    listed = [p for m in capture(model, optimizer, loss, runs=1).modules for p in m.parameters]
    expected = {(n, p.nbytes, p.shape[0] if p.ndim else 1, p.requires_grad) for n, p in model.named_parameters()}
    assert {(p.name, p.nbytes, p.rows, p.trained) for p in listed} == expected
    assert len(listed) == len(expected)


def test_modules_stand_in_the_order_of_their_first_calls():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.b, self.a, self.idle = (nn.Linear(4, 4) for _ in range(3))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.b(F.relu(self.b(self.a(x)))) * self.scale

    modules = modules_of(Backwards(), torch.ones(2, 4))
    assert [(m.path, m.calls, m.named) for m in modules.values()] == [("", 1, 0), ("a", 1, 2), ("b", 2, 1)]
    assert [p.name for p in modules[""].parameters] == ["scale", "idle.weight", "idle.bias"]  # idle is not called


def test_parameters_of_modules_that_are_not_called_belong_to_the_caller():
    modules = modules_of(captured.attention()[0], torch.randint(11, (3, 5)))
    assert "attention.out_proj" not in modules
    assert "attention.out_proj.weight" in {p.name for p in modules["attention"].parameters}


def test_tied_parameters_name_each_other():
    modules = modules_of(captured.tied()[0], torch.randint(11, (3, 5)))
    assert (modules["embed"].tied, modules["head"].tied, modules["body"].tied) == (("head",), ("embed",), ())
    assert (len(modules["embed"].parameters), len(modules["head"].parameters)) == (1, 0)
    assert modules["embed"].read_in_backward  # as the head
    assert [p.trained for p in modules["frozen"].parameters] == [False, False]


class Text(nn.Module):
    """An embedding, positions that are added, a layer, a head, and a layer of which the loss knows nothing."""

    def __init__(self, wrapped=lambda layer, x: layer(x)):
        super().__init__()
        self.embed, self.layer, self.head, self.probe = (
            nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4),
        )  # fmt: skip
        self.wrapped = wrapped

    def forward(self, x):
        h = self.wrapped(self.layer, self.wrapped(self.embed, x))
        self.probed = self.probe(h)
        return self.head(h)


def rechecked(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def cast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).float()


@pytest.mark.parametrize(
    ("wrapped", "read"),
    [
        (lambda layer, x: layer(x), {"", "layer", "head"}),
        (rechecked, {"", "embed", "layer", "head"}),  # the embedding runs again in the backward pass
        (cast, {"", "layer", "head"}),  # the backward pass reads a copy of the layer's weight
    ],
)
def test_what_the_backward_pass_needs(wrapped, read):
    modules = modules_of(Text(wrapped), torch.randint(11, (3, 5)))
    assert {m.path for m in modules.values() if m.read_in_backward} == read
    assert {m.path for m in modules.values() if m.input_needs_gradient} == {"layer", "head", "probe"}
    assert {m.path for m in modules.values() if not m.reaches_loss} == {"probe"}


def test_frozen_modules_before_the_first_trained_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    first = modules_of(model, torch.ones(2, 4))["0"]
    assert (first.reaches_loss, first.read_in_backward, first.input_needs_gradient) == (True, False, False)


def test_the_modules_of_a_compiled_model_are_not_known():
    model = torch.compile(nn.Linear(4, 4).double(), backend="aot_eager")
    workload = capture(model, torch.optim.SGD(model.parameters()), lambda: model(torch.ones(2, 4).double()).sum())
    assert (workload.modules, workload.itemsize) == ((), 8)


def test_no_hooks_are_left():
    model = Text()
    modules_of(model, torch.randint(11, (3, 5)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
