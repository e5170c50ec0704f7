import pytest
import torch
from support import captured
from support.captured import record_with, workload_of
from torch import nn

from legato.pytorch.recording.capture import PhaseTimes, capture
from legato.pytorch.recording.recorder import Recorder


def test_times_add_up_to_an_untraced_iteration():
    workload = capture(*captured.branches(), name="small", batch_size=4)
    assert workload.compute_s == pytest.approx(workload.untraced_s)
    assert (workload.name, workload.batch_size, workload.device) == ("small", 4, "cpu")
    assert all(op.duration_s > 0 for op in workload.ops)


class Ticks:
    """A clock on which every op takes the next of some durations."""

    def __init__(self, *durations):
        self.durations, self.time, self.calls = durations, 0.0, 0

    def now(self):
        if self.calls % 2:
            self.time += self.durations[min(self.calls // 2, len(self.durations) - 1)]
        self.calls += 1
        return self.time

    def settle(self):
        pass

    def seconds(self, start, stop):
        return stop - start


def ticking_step(model, optimizer, loss, *durations):
    optimizer.zero_grad()
    recorder = Recorder(model, optimizer)
    recorder._clock = Ticks(*durations)
    return record_with(recorder, optimizer, loss)


def test_each_op_takes_the_least_of_its_times():
    model = nn.Linear(1, 1, bias=False)
    training = (model, torch.optim.SGD(model.parameters(), lr=0.0), lambda: model.weight.exp().sum())
    steps = [ticking_step(*training, 5.0, 0.0, 1.0, 4.0), ticking_step(*training, 2.0, 0.0, 3.0, 4.0)]
    workload = workload_of(*steps)
    assert [op.duration_s for op in workload.ops[:3]] == [2.0, 1.0, 4.0]
    assert workload.untraced_s is None and workload.time_scale == 1.0


def test_phases_keep_the_proportions_of_untraced_steps():
    model = nn.Linear(1, 1, bias=False)
    training = (model, torch.optim.SGD(model.parameters(), lr=0.0), lambda: model.weight.exp().sum())
    workload = workload_of(ticking_step(*training, 1.0), untraced=[PhaseTimes(8, 5, 4), PhaseTimes(7, 6, 3)])
    spent = {p: sum(workload.ops[i].duration_s for i in workload.phase_ops(p)) for p in PhaseTimes._fields}
    assert spent["forward"] / spent["backward"] == pytest.approx(7 / 5)
    assert spent["optimizer"] / spent["backward"] == pytest.approx(3 / 5)
    assert workload.untraced_s == 16 and workload.compute_s == pytest.approx(16)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_time_of_list_operators_is_split_by_elements(kind, foreach):
    model = nn.ParameterDict({"big": torch.randn(300), "small": torch.randn(100)})
    optimizer = kind(model.parameters(), lr=0.1, foreach=foreach)
    for _ in range(2):
        optimizer.zero_grad()
        step = ticking_step(model, optimizer, lambda: sum(p.square().sum() for p in model.values()), 1.0)
    updates = dict(step.updates)
    assert list(updates) == ["big", "small"]
    assert sum(updates.values()) == int(sum(updates.values()) + 0.5)
    if foreach and kind is torch.optim.SGD:
        assert updates["big"] == pytest.approx(3 * updates["small"])
    elif not foreach:  # the same ops for each; only what belongs to neither is shared by bytes
        assert updates["small"] < updates["big"] < 2 * updates["small"]
