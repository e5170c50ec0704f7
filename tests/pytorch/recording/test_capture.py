import logging
import random

import pytest
import torch
from support import captured
from support.captured import TRAININGS, record, record_with, workload_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from legato.pytorch.recording.capture import capture
from legato.pytorch.recording.operators import operator_of, tensors
from legato.pytorch.recording.recorder import Recorder

every_training = pytest.mark.parametrize("training", TRAININGS, ids=lambda t: t.__name__)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@every_training
def test_every_trained_parameter_is_one_tensor(training):
    model, optimizer, loss = training()
    workload = capture(model, optimizer, loss, runs=2)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sorted(t.name for t in workload.tensors) == sorted(trained)
    assert {t.name: t.nbytes for t in workload.tensors} == {n: 4 * p.numel() for n, p in trained.items()}
    order = [t.ready_after for t in workload.tensors]
    assert order == sorted(order)


@every_training
def test_tensors_stand_in_the_order_of_an_untraced_run(training):
    model, optimizer, loss = training()
    workload = capture(model, optimizer, loss, runs=1)
    fired = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    loss().backward()
    last = [name for i, name in enumerate(fired) if name not in fired[i + 1 :]]
    tensors = [t.name for t in workload.tensors]
    assert tensors[: len(last)] == last
    silent = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert sorted(tensors[len(last) :]) == sorted(silent)


class Place:
    """Where a tensor was: a storage, and the tensor's shape in it."""

    def __init__(self, tensor, key):
        self.key, self.dtype = key, tensor.dtype
        self.geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())

    def look(self, memory):
        return torch.empty(0, dtype=self.dtype).set_(memory[self.key], *self.geometry)


class Tape(TorchDispatchMode):
    """Inside a recorder's phases: keeps the calls that became ops, and what was in memory before them; no tensors."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder
        self.calls = []
        self.held = {}
        self.before = {}
        self.generator = torch.get_rng_state()

    def random_state(self):
        with _disable_current_modes():  # it makes tensors
            return torch.get_rng_state()

    def place(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.held:
            self.held[storage._cdata] = StorageWeakRef(storage)
        return Place(tensor, storage._cdata)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        places = tree_map_only(torch.Tensor, self.place, (args, kwargs))
        with _disable_current_modes():
            for tensor in tensors((args, kwargs)):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.before:
                    self.before[storage._cdata] = storage.clone()
        count = len(self.recorder._ops)
        random = self.random_state() if operator_of(func).random else None
        jump = None if random is None or random.tolist() == self.generator.tolist() else random
        out = func(*args, **kwargs)
        if random is not None:
            self.generator = self.random_state()
        made = [self.place(tensor) for tensor in tensors(out)]
        for place in made:
            self.before.setdefault(place.key, None)  # made here: nothing was there before
        if len(self.recorder._ops) > count:
            self.calls.append((func, places, made, torch.is_grad_enabled(), jump))
        return out

    def replay(self, order):
        """Run the ops in this order; return a function that reads a tensor's place afterwards."""
        memory = {key: storage.clone() for key, storage in self.before.items() if storage is not None}
        for i in order:
            func, places, made, grad_enabled, jump = self.calls[i]
            if jump is not None:  # something has set the generator, as recomputation does
                torch.set_rng_state(jump)
            args, kwargs = tree_map_only(Place, lambda place: place.look(memory), places)
            with torch.set_grad_enabled(grad_enabled):  # some kernels ask whether they will be differentiated
                out = func(*args, **kwargs)
            for place, tensor in zip(made, tensors(out), strict=True):
                memory.setdefault(place.key, tensor.untyped_storage())
        return lambda tensor: self.place(tensor).look(memory)


def shuffled(ops, generator):
    """A random order in which every op stands after those that it depends on."""
    missing = [len(op.deps) for op in ops]
    needed_by = [[] for _ in ops]
    for i, op in enumerate(ops):
        for dep in op.deps:
            needed_by[dep].append(i)
    free = [i for i, count in enumerate(missing) if count == 0]
    order = []
    while free:
        i = free.pop(generator.randrange(len(free)))
        order.append(i)
        for after in needed_by[i]:
            missing[after] -= 1
            if missing[after] == 0:
                free.append(after)
    return order


@every_training
def test_the_recorded_ops_give_the_same_gradients_in_any_order(training):
    model, optimizer, loss = training()
    buffers = {}
    state = torch.get_rng_state()
    optimizer.step = lambda: buffers.update({n: b.clone() for n, b in model.named_buffers()})
    step, tape = record(model, optimizer, loss, tape=Tape)
    workload = workload_of(step)
    ops = workload.ops[: len(step.ops)]
    assert len(ops) == len(tape.calls)
    generator = random.Random(1)
    for order in [range(len(ops)), *(shuffled(ops, generator) for _ in range(5))]:
        torch.set_rng_state(state)
        read = tape.replay(order)
        for name, p in model.named_parameters():
            assert p.grad is None or torch.equal(read(p.grad), p.grad), name
        for name, buffer in model.named_buffers():
            assert torch.equal(read(buffer), buffers[name]), name


@every_training
def test_gradient_comes_from_the_op_that_wrote_it_last(training):
    model, optimizer, loss = training()
    optimizer.step = lambda: None
    step, tape = record(model, optimizer, loss, tape=Tape)
    parameters = dict(model.named_parameters())
    for tensor in step.tensors:
        if (grad := parameters[tensor.name].grad) is not None:
            key = tape.place(grad).key
            wrote = [i for i, (_, _, made, *_) in enumerate(tape.calls) if key in {place.key for place in made}]
            assert tensor.ready_after >= wrote[-1]
            assert step.ops[wrote[-1]].phase == "backward"
    exact = [t.ready_after for t in step.tensors]
    assert exact == sorted(exact)


@every_training
def test_structure_is_the_same_in_two_captures(training):
    first, second = (workload_of(record(*training())[0]) for _ in range(2))
    assert [(op.name, op.phase, op.deps) for op in first.ops] == [(op.name, op.phase, op.deps) for op in second.ops]
    assert first.tensors == second.tensors


@every_training
def test_one_update_for_each_tensor_with_a_gradient(training):
    model, optimizer, loss = training()
    for _ in range(2):
        optimizer.zero_grad()
        step, _ = record(model, optimizer, loss)
    workload = workload_of(step)
    by_name = {tensor.name: tensor for tensor in workload.tensors}
    updates = {op.name: (i, op) for i, op in enumerate(workload.ops) if op.phase == "optimizer"}
    assert set(updates) == {f"optimizer/{name}" for name in by_name if name not in step.unused}
    for name, tensor in by_name.items():
        if name in step.unused:
            assert all(workload.ops[r].phase == "forward" for r in tensor.readers)
        else:
            i, op = updates[f"optimizer/{name}"]
            assert op.deps == (tensor.ready_after,) and op.duration_s > 0
            assert i == tensor.readers[-1]
            assert all(workload.ops[r].phase == "forward" for r in tensor.readers[:-1])


def test_readers_are_what_reads_a_parameter():
    workload = capture(*captured.tied(), runs=1)
    readers = {t.name: [workload.ops[r].name for r in t.readers] for t in workload.tensors}
    assert readers["embed.weight"] == ["embed/embedding", "head/mm", "optimizer/embed.weight"]
    assert readers["body.weight"] == ["body/addmm", "optimizer/body.weight"]
    assert readers["cut"] == ["forward/mul"]  # and no gradient
    assert readers["idle.weight"] == []
    last = workload.phase_ops("backward")[-1]
    silent = [t for t in workload.tensors if t.name in {"cut", "idle.weight", "idle.bias"}]
    assert workload.tensors[-3:] == tuple(silent) and all(t.ready_after == last for t in silent)


def test_parameters_in_one_storage_are_told_apart():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            memory = torch.randn(12)
            self.a, self.b = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])

        def forward(self):
            return self.a.square().sum() + self.b.exp().sum()

    model = Flat()
    workload = capture(model, torch.optim.SGD(model.parameters(), lr=0.1), model, runs=1)
    readers = {t.name: [workload.ops[r].name for r in t.readers if r < 4] for t in workload.tensors}
    assert readers == {"a": ["forward/pow"], "b": ["forward/exp"]}


@pytest.mark.parametrize("training", [captured.checkpointed, captured.checkpointed_reentrant])
def test_recomputation_is_backward_and_reads_nothing(training):
    workload = capture(*training(), runs=1)
    inside = [op for op in workload.ops if op.name.startswith("blocks.1.0/")]
    assert [op.phase for op in inside if op.name.endswith("/addmm")] == ["forward", "backward"]
    (tensor,) = (t for t in workload.tensors if t.name == "blocks.1.0.weight")
    assert [workload.ops[r].name for r in tensor.readers] == ["blocks.1.0/addmm", "optimizer/blocks.1.0.weight"]


def test_ops_are_named_after_their_modules():
    workload = capture(*captured.branches(), runs=1)
    names = {phase: [workload.ops[i].name for i in workload.phase_ops(phase)] for phase in ("forward", "backward")}
    assert "wide.2/convolution" in names["forward"] and "wide.2/convolution_backward" in names["backward"]
    assert names["forward"][0] == "stem.0/convolution" and names["backward"][-1] == "stem.0/convolution_backward"
    assert names["forward"][-1] == "forward/nll_loss_forward" and names["backward"][0] == "backward/ones_like"
    assert "head/addmm" in names["forward"] and "head/mm" in names["backward"]


def test_branches_do_not_wait_for_each_other():
    workload = capture(*captured.branches(), runs=1)
    before = []
    for i, op in enumerate(workload.ops):
        before.append({i}.union(*(before[dep] for dep in op.deps)))
    (narrow,) = (i for i, op in enumerate(workload.ops) if op.name == "narrow/convolution")
    (wide,) = (i for i, op in enumerate(workload.ops) if op.name == "wide.2/convolution")
    (cat,) = (i for i, op in enumerate(workload.ops) if op.name == "forward/cat")
    assert narrow not in before[wide] and wide not in before[narrow]
    assert {narrow, wide} <= before[cat]


def test_views_are_not_ops_but_pass_dependencies_on():
    weight = nn.Linear(4, 4, bias=False)
    x = torch.randn(2, 4)
    loss = lambda: weight(x).view(4, 2).t()[1:].exp().sum()  # noqa: E731
    workload = capture(weight, torch.optim.SGD(weight.parameters(), lr=0.1), loss, runs=1)
    forward = [workload.ops[i] for i in workload.phase_ops("forward")]
    assert [(op.name, op.deps) for op in forward] == [
        ("forward/mm", ()),
        ("forward/exp", (0,)),
        ("forward/sum", (1,)),
    ]


def test_a_value_that_python_has_seen_holds_back_what_follows():
    workload = capture(*captured.watched(), runs=1)
    (seen,) = (i for i, op in enumerate(workload.ops) if op.name == "forward/_local_scalar_dense")
    assert workload.ops[seen + 1].deps == (seen,)


def test_deps_are_direct_and_few():
    for training in TRAININGS:
        ops = capture(*training(), runs=1).ops
        before = []
        for op in ops:
            assert list(op.deps) == sorted(set(op.deps))
            for dep in op.deps:
                assert not any(dep in before[other] for other in op.deps)
            before.append(set(op.deps).union(*(before[dep] for dep in op.deps)))


def test_gradient_accumulated_into_a_buffer_of_the_user():
    model = nn.Linear(3, 1)
    x = torch.randn(2, 3)

    class KeepsGradients(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none=False)

    workload = capture(model, KeepsGradients(model.parameters(), lr=0.1), lambda: model(x).sum(), runs=2, warmup=2)
    assert {workload.ops[t.ready_after].name for t in workload.tensors} == {"backward/add_"}


def test_recorder_records_one_step_after_another():
    model, optimizer, loss = captured.tied()
    recorder = Recorder(model, optimizer)
    steps = []
    for _ in range(3):
        optimizer.zero_grad()
        steps.append(record_with(recorder, optimizer, loss))
    assert workload_of(*steps).tensors == workload_of(steps[0]).tensors


def test_progress_and_log(caplog):
    seen = []
    with caplog.at_level(logging.INFO, logger="legato"):
        capture(
            *captured.tied(), name="tied", runs=2, warmup=1, progress=lambda done, total: seen.append((done, total))
        )
    assert seen == [(i, 5) for i in range(1, 6)]
    assert "6 tensors (3 without gradient, 0 not in the optimizer), 2 frozen" in caplog.text
    assert "of an untraced iteration" in caplog.text
