"""Steps that are observed from outside, by a clock that the tests set."""

import pytest
import torch
from torch import nn

from legato.core.errors import CaptureError
from legato.pytorch.recording.observed import StepObserver


class Clock:
    time_s = 0.0

    def now(self):
        return self.time_s

    def settle(self):
        pass

    def seconds(self, start, stop):
        return stop - start


class Model(nn.Module):
    """The last parameter is read by the model itself, and one is never used."""

    def __init__(self, clock):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.unused = nn.Linear(2, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(4))
        for module, seconds in ((self.first, 1.0), (self.second, 2.0)):
            module.register_forward_hook(lambda *_, s=seconds: setattr(clock, "time_s", clock.time_s + s))

    def forward(self, x):
        return self.second(self.first(x)) * self.scale


def observed(ready, steps=3, compiled=False, backward=None, slow=()):
    """A workload of steps whose gradients are complete in the order of `ready(i)`: names and seconds."""
    clock = Clock()
    model = Model(clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = StepObserver(model, dict(model.named_parameters()), compiled)
    observer._clock = clock
    for i in range(steps):
        clock.time_s += 100.0  # not of the step
        observer.forward_begins()
        model(torch.ones(1, 2))
        observer.forward_ended()
        clock.time_s += 0.5  # the loss
        observer.backward_begins()
        for name, seconds in ready(i):
            clock.time_s += seconds * (10 if i in slow else 1)
            observer.ready(name)
        clock.time_s += 7.0  # until DDP has averaged them
        observer.updates_begin()
        clock.time_s += 4.0
        observer.updates_end()
    observer.forward_begins()
    observer.forward_ended()
    return observer.workload("model", [optimizer], 0)


READY = (("scale", 1.0), ("second.weight", 2.0), ("first.weight", 3.0))


def test_an_op_is_a_stretch_between_two_moments():
    found = observed(lambda i: READY, slow=(1,))  # the median of three counts
    assert [(op.phase, op.duration_s, op.deps) for op in found.ops[:5]] == [
        ("forward", 1.0, ()), ("forward", 2.5, (0,)),
        ("backward", 1.0, (1,)), ("backward", 2.0, (2,)), ("backward", 3.0, (3,)),
    ]  # fmt: skip
    names = [tensor.name for tensor in found.tensors]
    assert names == ["scale", "second.weight", "first.weight", "unused.weight"]
    assert [tensor.ready_after for tensor in found.tensors] == [2, 3, 4, 4]
    assert [min(tensor.readers) for tensor in found.tensors] == [0, 1, 0, 0]
    updates = {op.name: (op.duration_s, op.deps) for op in found.ops[5:]}
    assert updates == {  # the seconds of the optimizer, by bytes
        "optimizer/first.weight": (1.0, (4,)), "optimizer/second.weight": (2.0, (3,)), "optimizer/scale": (1.0, (2,)),
    }  # fmt: skip


def test_calls_of_modules_leave_no_hooks():
    before = len(torch.nn.modules.module._global_forward_pre_hooks)
    observed(lambda i: READY)
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == before


def test_steps_that_do_not_agree_do_not_count_or_are_refused():
    found = observed(lambda i: READY if i else READY[::-1])
    assert [tensor.name for tensor in found.tensors[:3]] == [name for name, _ in READY]
    with pytest.raises(CaptureError, match="gradients are complete in another order each time"):
        observed(lambda i: READY[i:] + READY[:i])
    with pytest.raises(CaptureError, match="no step was observed"):
        observed(lambda i: ())


def test_gradients_that_a_compiled_graph_returns_at_once_are_spread_by_their_bytes():
    at_once = (("scale", 8.0), ("second.weight", 0.01), ("first.weight", 0.0))
    found = observed(lambda i: at_once, compiled=True)
    ends = [sum(op.duration_s for op in found.ops[1 : t.ready_after + 1]) for t in found.tensors[:3]]
    assert ends == pytest.approx([8.01 / 4, 8.01 * 3 / 4, 8.01])
    assert all(t.readers[0] == 0 for t in found.tensors)  # calls of modules were not seen
