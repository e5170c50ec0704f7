"""Captures one real, unmodified training iteration as a `Workload`.

[Note: correction of times] The recorder times each op alone. The recorder does not see what Python and autograd do
between two ops, and a busy machine delays some ops. So steps with and without the recorder alternate, and op times are
corrected to match the untraced steps. The accuracy of the correction was measured on ResNet-50, Inception-v3, GPT-2, an
LSTM sequence-to-sequence model and a chain of very small layers (CPU, 1 and 2 threads, shared machine): the time at
which each gradient is complete according to the corrected ops was compared with hooks in untraced steps. The mean
errors, in per cent of the iteration, were (in brackets: GPT-2 small with 2 threads, the noisiest case):

    one factor for all ops           0.3 to 5.7  (4.7)
    the same seconds added to each   1.1 to 4.9  (3.7)
    a factor for each phase          0.03 to 1.1 (0.6)

Hence legato uses one factor for each phase. Minima of ops and minima of steps agree with each other, but medians do
not, because noise of the machine only adds time. (The median untraced step took up to 2.5 times as long as the fastest
one, and every repetition had another median.)

On a GPU (H200, float32 parameters, timed by events), GPT-2 under autocast with 8 x 512 tokens took 40.9 ms in the
captured workload, and 41.4 and 41.9 ms by events before and after the capture. ResNet-50 with 64 images took 32.1 ms in
the captured workload, and 32.2 and 34.2 ms by events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import NamedTuple

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from legato.core.errors import CaptureError
from legato.core.text import count
from legato.core.workload import Op, Phase, Tensor, Workload
from legato.pytorch.compiled.compiler import GraphCompiler
from legato.pytorch.device import DeviceClock, HostClock, clock_for
from legato.pytorch.parameters import trained_parameters
from legato.pytorch.private.dynamo import compiles_with, is_compiled
from legato.pytorch.recording.load import blame, check_loss, check_training, load_training
from legato.pytorch.recording.modules import ModuleObserver
from legato.pytorch.recording.recorder import RecordedStep, Recorder
from legato.pytorch.recording.snapshot import Snapshot

__all__ = ["PhaseTimes", "at_pace", "capture", "load_training", "to_workload"]

_log = logging.getLogger("legato")


class PhaseTimes(NamedTuple):
    """The seconds that each phase of an untraced step takes."""

    forward: float
    backward: float
    optimizer: float


def capture(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[], torch.Tensor],
    *,
    name: str | None = None,
    batch_size: int = 1,
    runs: int = 5,
    warmup: int = 2,
    progress: Callable[[int, int], object] | None = None,
) -> Workload:
    """Run some training steps, and return one iteration as a `Workload`.

    Each step calls `loss()`, runs the backward pass, and calls `optimizer.step()` and `optimizer.zero_grad()`. First,
    `warmup` steps run untimed; the last of them is used to observe the modules. Then `runs` untraced steps alternate
    with `runs` recorded steps.

    A compiled model is compiled again. The ops of a compiled model are the nodes of the graphs that AOTAutograd makes,
    each with the time that it takes alone, and the workload does not describe the model's modules.

    Afterwards the model, the optimizer and the random generators are restored bit for bit (see
    `legato.pytorch.recording.snapshot.Snapshot`). Other effects of `loss()`, such as its position in a data set, are
    not undone.

    Args:
        model: a `torch.nn.Module` on the CPU or on one accelerator.
        optimizer: a `torch.optim.Optimizer` with parameters of the model.
        loss: a function that runs the forward pass and returns the scalar loss.
        name: the workload's name; with None, the name of the model's class.
        batch_size: the number of samples in a step, for the workload's description.
        runs: the number of untraced steps, and of recorded steps.
        warmup: the number of untimed steps before them.
        progress: called as `progress(done, total)` after each step.

    Raises:
        CaptureError: the step cannot be captured, or is not the same every time.
    """
    check_training(model, optimizer)
    for what, value in (("batch_size", batch_size), ("runs", runs), ("warmup", warmup)):
        if value < 1:
            raise CaptureError(f"{what}: {value} (expected at least 1)")
    recorder = Recorder(model, optimizer)
    trained = trained_parameters(model).values()
    device = next(iter(trained)).device
    clock = clock_for(device)
    untraced: list[PhaseTimes] = []
    steps: list[RecordedStep] = []
    observer = ModuleObserver(model)
    work: list[Callable[[], object]] = [lambda: _untraced_step(clock, optimizer, loss)] * warmup
    if not any(map(is_compiled, model.modules())):  # in a compiled model, hooks do not see the calls of modules
        work[-1] = lambda: _observed_step(observer, clock, optimizer, loss)
    for _ in range(runs):
        work.append(lambda: untraced.append(_untraced_step(clock, optimizer, loss)))
        work.append(lambda: steps.append(_recorded_step(recorder, optimizer, loss)))
    with Snapshot(model, optimizer), torch.enable_grad(), _recordable(model):
        for done, run in enumerate(work, 1):
            run()
            if progress is not None:
                progress(done, len(work))
    label = name or type(model).__name__
    _log_parameters(label, model, steps[0])
    workload = to_workload(steps, name=label, batch_size=batch_size, device=device.type, untraced=untraced)
    itemsize = max(trained, key=torch.Tensor.numel).element_size()
    return msgspec.structs.replace(workload, modules=observer.modules(), itemsize=itemsize)


@contextmanager
def _recordable(model: nn.Module) -> Iterator[None]:
    """Recompile the compiled parts so that a recorder sees their ops; raise `CaptureError` if a backend hides ops."""
    if not any(map(is_compiled, model.modules())):
        yield
        return
    compiler = GraphCompiler()
    torch.compiler.reset()
    try:
        with compiles_with(compiler):
            yield
    finally:  # otherwise training, which sends gradients, would use the code compiled here
        torch.compiler.reset()
    if compiler.others:
        names = ", ".join(sorted(compiler.others))
        raise CaptureError(f"the model is compiled by the backend {names} (expected inductor or aot_eager)")


def _untraced_step(
    clock: HostClock | DeviceClock, optimizer: Optimizer, loss: Callable[[], torch.Tensor]
) -> PhaseTimes:
    marks = [clock.now()]
    clock.seconds(marks[0], marks[0])  # waits until the device is idle
    with blame("loss()"):
        value = check_loss(loss())
    marks.append(clock.now())
    with blame("the backward pass"):
        value.backward()
    marks.append(clock.now())
    with blame("the optimizer's step"):
        optimizer.step()
        optimizer.zero_grad()
    marks.append(clock.now())
    return PhaseTimes(*(clock.seconds(a, b) for a, b in pairwise(marks)))


def _observed_step(
    observer: ModuleObserver, clock: HostClock | DeviceClock, optimizer: Optimizer, loss: Callable[[], torch.Tensor]
) -> None:
    with observer.watch():
        _untraced_step(clock, optimizer, loss)


def _recorded_step(recorder: Recorder, optimizer: Optimizer, loss: Callable[[], torch.Tensor]) -> RecordedStep:
    try:
        with blame("loss()"), recorder.phase("forward"):
            value = check_loss(loss())
        with blame("the backward pass"), recorder.phase("backward"):
            value.backward()
        with blame("the optimizer's step"), recorder.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return recorder.finish()
    finally:
        recorder.abandon()


def to_workload(
    steps: Sequence[RecordedStep], *, name: str, batch_size: int, device: str, untraced: Sequence[PhaseTimes] = ()
) -> Workload:
    """Merge recorded steps, which must all be the same, into one iteration.

    The duration of an op is its minimum over all steps. If there are `untraced` steps, all durations of one phase are
    then multiplied by the same factor. After this, the times of the phases are proportional to each phase's shortest
    untraced time, and all ops together add up to the fastest untraced step (see [Note: correction of times]). Each
    updated parameter gets one optimizer op. Raises `CaptureError` if two steps differ.
    """
    first = steps[0]
    for step in steps[1:]:
        _check_same(first, step)
    deps = _transitive_reduction(_with_whole_graphs([Op(op.name, op.phase, 0.0, op.deps) for op in first.ops]))
    ops = [
        Op(op.name, op.phase, min(step.ops[i].duration_s for step in steps), deps[i]) for i, op in enumerate(first.ops)
    ]
    ready_after = {tensor.name: tensor.ready_after for tensor in first.tensors}
    updated_by: dict[str, int] = {}
    for i, (parameter, _) in enumerate(first.updates):
        updated_by[parameter] = len(ops)
        duration = min(step.updates[i][1] for step in steps)
        ops.append(Op(f"optimizer/{parameter}", "optimizer", duration, (ready_after[parameter],)))
    tensors = tuple(
        Tensor(t.name, t.nbytes, t.ready_after, (*t.readers, updated_by[t.name]) if t.name in updated_by else t.readers)
        for t in first.tensors
    )
    untraced_s, scale = None, 1.0
    if untraced:
        untraced_s = min(map(sum, untraced))
        measured = sum(op.duration_s for op in ops)
        scale = untraced_s / measured
        ops = _scaled(ops, untraced)
        _log.info(
            "%s: the ops add up to %.3f of an untraced iteration of %.4g s; scaled by %.3f to fit",
            name, 1 / scale, untraced_s, scale,
        )  # fmt: skip
    return Workload(
        name=name,
        ops=tuple(ops),
        tensors=tensors,
        batch_size=batch_size,
        device=device,
        untraced_s=untraced_s,
        time_scale=scale,
    )


def at_pace(workload: Workload, passes_s: float) -> Workload:
    """Scale the workload so that its forward and backward pass together take `passes_s` seconds."""
    captured_s = sum(op.duration_s for op in workload.ops if op.phase != "optimizer")
    if not captured_s or passes_s <= 0:
        return workload
    pace = passes_s / captured_s
    return msgspec.structs.replace(
        workload,
        ops=tuple(Op(op.name, op.phase, op.duration_s * pace, op.deps) for op in workload.ops),
        time_scale=workload.time_scale * pace,
    )


def _scaled(ops: Sequence[Op], untraced: Sequence[PhaseTimes]) -> list[Op]:
    fastest = {phase: min(getattr(times, phase) for times in untraced) for phase in PhaseTimes._fields}
    measured = dict.fromkeys(fastest, 0.0)
    for op in ops:
        measured[op.phase] += op.duration_s
    sum_s = sum(fastest[phase] for phase in fastest if measured[phase])
    fit = min(map(sum, untraced)) / sum_s
    factor = {phase: fit * fastest[phase] / measured[phase] for phase in fastest if measured[phase]}
    return [Op(op.name, op.phase, op.duration_s * factor.get(op.phase, 1.0), op.deps) for op in ops]


def _with_whole_graphs(ops: Sequence[Op]) -> list[tuple[int, ...]]:
    """Return the dependencies of each op, extended so that each compiled graph runs without interruption.

    A graph waits for all ops before it, and all ops after it wait for the graph.
    """
    deps = [set(op.deps) for op in ops]
    stretches = [list(same) for _, same in groupby(range(len(ops)), key=lambda i: (ops[i].phase, ops[i].graph))]
    for before, after in pairwise(stretches):
        if ops[before[0]].phase == ops[after[0]].phase:
            needed = set().union(*(deps[i] for i in before))
            last, inside = [i for i in before if i not in needed], set(after)
            for i in after:
                if not deps[i] & inside:
                    deps[i].update(last)
    return [tuple(sorted(found)) for found in deps]


def _transitive_reduction(deps: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the dependencies without those that other dependencies imply."""
    before: list[int] = []  # for each op, the set of all ops that it depends on, one bit each
    kept: list[tuple[int, ...]] = []
    for direct in deps:
        known, needed = 0, []
        for dep in reversed(direct):
            if not known >> dep & 1:
                needed.append(dep)
                known |= before[dep] | 1 << dep
        before.append(known)
        kept.append(tuple(reversed(needed)))
    return kept


def _check_same(first: RecordedStep, other: RecordedStep) -> None:
    def differ(what: str) -> CaptureError:
        return CaptureError(f"the step is not the same every time: {what} (expected the same ops in every run)")

    def what(phase: Phase, op: str) -> str:
        return f"{op!r} in the {phase} pass"

    for i, (a, b) in enumerate(zip(first.ops, other.ops, strict=False)):
        if (a.name, a.phase) != (b.name, b.phase):
            raise differ(f"op {i} was {what(a.phase, a.name)}, then {what(b.phase, b.name)}")
        if a.deps != b.deps:
            raise differ(f"op {i}, {what(a.phase, a.name)}, needed ops {a.deps}, then {b.deps}")
    if len(first.ops) != len(other.ops):
        shorter, longer = sorted((first.ops, other.ops), key=len)
        extra = longer[len(shorter)]
        raise differ(f"{count(len(shorter), 'op')} in one run, in another also {what(extra.phase, extra.name)}")
    for a_tensor, b_tensor in zip(first.tensors, other.tensors, strict=True):
        if a_tensor != b_tensor:
            raise differ(
                f"the gradient of {a_tensor.name!r} was complete first, then the gradient of {b_tensor.name!r}"
            )
    if [p for p, _ in first.updates] != [p for p, _ in other.updates]:
        raise differ("the optimizer updated different parameters")


def _log_parameters(name: str, model: nn.Module, step: RecordedStep) -> None:
    frozen = sum(not p.requires_grad for p in model.parameters())
    updated = {parameter for parameter, _ in step.updates}
    kept = [t.name for t in step.tensors if t.name not in updated and t.name not in step.unused]
    _log.info(
        "%s: %d ops, %d tensors (%d without gradient, %d not in the optimizer), %d frozen parameters",
        name, len(step.ops) + len(step.updates), len(step.tensors), len(step.unused), len(kept), frozen,
    )  # fmt: skip
