"""The emulated accelerator, on a clock of its own: what happens when, in the device's seconds."""

import time

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given
from support.strategies import examples, workloads

from legato.core.errors import InputError
from legato.core.workload import Op, Tensor, Workload
from legato.lab.testbed import accelerator
from legato.lab.testbed.accelerator import Clock, EmulatedModel, EmulatedOptimizer

NAMES = ("embed.weight", "head/bias", "embed")  # one of them the beginning of another, with a dot and a slash
WORKLOAD = Workload(
    "small",
    (
        Op("f0", "forward", 1.0),
        Op("f1", "forward", 2.0, (0,)),
        Op("b1", "backward", 4.0, (1,)),
        Op("b0", "backward", 8.0, (2,)),
        Op("b-", "backward", 16.0, (3,)),
        Op("prepare", "optimizer", 32.0),
        Op("update embed", "optimizer", 64.0, (5,)),
        Op("update head", "optimizer", 128.0),
    ),
    (
        Tensor(NAMES[1], 8, 2, (1, 7)),
        Tensor(NAMES[0], 40, 3, (0, 6)),
        Tensor(NAMES[2], 6, 3, (0, 6)),
    ),
)


class DeviceClock:
    """Only the device's work makes it go on."""

    def __init__(self):
        self.now = 0.0

    def run(self, seconds):
        self.now += seconds

    def ask(self):
        pass

    meet = begin = ask


def even(workload):
    """With sizes that a gradient can have."""
    tensors = tuple(Tensor(t.name, 2 * t.nbytes, t.ready_after, t.readers) for t in workload.tensors)
    return Workload(workload.name, workload.ops, tensors)


def watch(model):
    """Lists of (device's time, tensor's name), filled when gradients appear."""
    seen = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append((model.clock.now, name)))
    return seen


def test_gradients_appear_where_the_workload_has_them():
    model = EmulatedModel(WORKLOAD, clock=DeviceClock())
    seen = watch(model)
    loss = model()
    assert model.clock.now == 3.0
    loss.backward()
    assert sorted(seen) == [(3.0 + 4, NAMES[1]), (3.0 + 4 + 8, NAMES[2]), (3.0 + 4 + 8, NAMES[0])]
    assert model.clock.now == 3.0 + 28


@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_an_iteration_takes_its_computation_and_gradients_come_in_order(workload):
    workload = even(workload)
    model = EmulatedModel(workload, clock=DeviceClock())
    optimizer, seen = EmulatedOptimizer(model), watch(model)
    model().backward()
    forward = sum(op.duration_s for op in workload.ops if op.phase == "forward")
    until, ends = forward, {}
    for i in workload.phase_ops("backward"):
        ends[i] = until = until + workload.ops[i].duration_s
    assert {name: at for at, name in seen} == {t.name: ends[t.ready_after] for t in workload.tensors}
    optimizer.step()
    read = {r for t in workload.tensors for r in t.readers}
    updates = workload.phase_ops("optimizer")
    if not updates or set(updates) & read:
        assert model.clock.now == workload.compute_s


def test_an_update_takes_its_time_when_the_last_of_its_parameters_is_stepped():
    model = EmulatedModel(WORKLOAD, clock=DeviceClock())
    optimizer = EmulatedOptimizer(model)
    model().backward()
    parameters, took = dict(model.named_parameters()), []
    for name in (NAMES[0], NAMES[1], NAMES[2]):
        optimizer.param_groups[0]["params"] = [parameters[name]]
        before = model.clock.now
        optimizer.step()
        took.append(model.clock.now - before)
    assert took == [0.0, 128.0, 32.0 + 64.0]


def test_updates_of_shards_take_their_share_of_the_time():
    model = EmulatedModel(WORKLOAD, clock=DeviceClock())
    whole = EmulatedOptimizer(model)
    flats = []
    for parameter in model.parameters():
        size = parameter.numel()
        for start, stop in ((0, size // 3), (size // 3, size)):
            flat = torch.nn.Parameter(parameter.detach()[start:stop])
            flat.shard_of, flat.grad = parameter, torch.ones_like(flat)
            flats.append(flat)
    whole.param_groups[0]["params"] = flats
    before = model.clock.now
    whole.step()
    assert model.clock.now - before == pytest.approx(128.0 + 32.0 + 64.0)


def test_another_order_of_ops():
    model = EmulatedModel(WORKLOAD, clock=DeviceClock())
    model.follow((4, 2, 3, 5, 6, 0, 7, 1))
    seen = watch(model)
    model().backward()
    assert sorted(seen) == [(3.0 + 16 + 4, NAMES[1]), (3.0 + 28, NAMES[2]), (3.0 + 28, NAMES[0])]


def test_gradients_are_the_sizes_they_should_be_and_nobody_copied_them():
    model = EmulatedModel(WORKLOAD, clock=DeviceClock(), seed=3)
    model().backward()
    for tensor, parameter, gradient in zip(WORKLOAD.tensors, model.ordered, model.gradients, strict=True):
        assert parameter.grad.nbytes == tensor.nbytes
        assert parameter.grad.data_ptr() == gradient.data_ptr()
        assert (parameter.grad == 1 + 3 / 8).all()
    assert [p.dtype for p in model.ordered] == [torch.float32, torch.float32, torch.float16]


def test_models_that_share_memory_have_gradients_of_their_own():
    one = EmulatedModel(WORKLOAD, clock=DeviceClock())
    other = EmulatedModel(WORKLOAD, clock=one.clock, shared=one)
    other().backward()
    assert all(p.grad is None for p in one.ordered)
    assert [p.data_ptr() for p in one.ordered] == [p.data_ptr() for p in other.ordered]


def test_without_gradients_only_the_forward_pass_runs():
    model = EmulatedModel(WORKLOAD, clock=DeviceClock())
    with torch.no_grad():
        assert not model().requires_grad
    assert model.clock.now == 3.0


def test_a_number_cannot_be_cut():
    odd = Workload("odd", WORKLOAD.ops, (Tensor("w", 7, 2, (1,)),))
    with pytest.raises(InputError, match=r"'w': 7 bytes \(expected an even number"):
        EmulatedModel(odd, clock=DeviceClock())


@pytest.fixture
def host(monkeypatch):
    """A host whose time goes on only when it sleeps, or is told to be late."""

    class Host:
        now = 100.0

        def sleep(self, seconds):
            assert seconds > 0
            self.now += seconds

    host = Host()
    monkeypatch.setattr(accelerator.time, "perf_counter", lambda: host.now)
    monkeypatch.setattr(accelerator.time, "sleep", host.sleep)
    return host


def test_a_late_host_does_not_delay_the_device(host):
    clock = Clock()
    clock.run(1.0)
    assert host.now == 101.0
    host.now += 0.25  # packing a message
    clock.run(1.0)
    assert host.now == 102.0
    host.now += 5.0  # ... longer than the next op takes
    clock.run(1.0)
    assert host.now == 107.0
    clock.run(6.0)
    assert host.now == 109.0


def test_the_device_waits_for_the_network(host):
    clock = Clock()
    clock.run(1.0)
    clock.ask()
    host.now += 0.5
    clock.meet()
    clock.run(1.0)
    assert host.now == 102.5


def test_what_is_there_already_costs_nothing(host):
    clock = Clock()
    clock.run(1.0)
    host.now += 0.5  # the host was busy before it asked
    clock.ask()
    host.now += 0.0001
    clock.meet()
    clock.run(1.0)
    assert host.now == 102.0


def test_the_device_never_runs_ahead_of_real_time():
    start = time.perf_counter()
    clock = Clock()
    for _ in range(20):
        clock.run(0.001)
    assert time.perf_counter() - start >= 0.02


@examples(30, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(), st.randoms(use_true_random=False))
def test_every_order_takes_as_long(workload, random):
    workload = even(workload)
    order = list(workload.phase_ops("backward"))
    random.shuffle(order)
    forward = workload.phase_ops("forward")
    random.shuffle(forward)
    model = EmulatedModel(workload, clock=DeviceClock())
    model.follow((*order, *workload.phase_ops("optimizer"), *forward))
    model().backward()
    assert model.clock.now == sum(op.duration_s for op in workload.ops if op.phase != "optimizer")
    assert all(p.grad is not None for p in model.ordered)
