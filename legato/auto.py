"""`legato.distribute`: with `plan="auto"` the plan is made from the first steps of the training itself.

[Note: auto] The first steps run under torch's default buckets, without forward
overlap. Two of them warm up; then steps that are only timed alternate with
steps that are recorded op by op. None is lost or run twice. After the last one
all ranks calibrate together, rank 0 plans from what it recorded and measured,
and all go over to its plan before the next step. If rank 0 could not record
(steps that differ from one another, say), everybody stays with the buckets,
and rank 0 logs why.

[Note: replan] The runtime compares the pace of training with that of the plan's
first steps (`legato.pytorch.runtime.drift`). With `replan="auto"` a lasting change makes
all ranks begin as above once more, before the same step.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from legato.core import files
from legato.core.errors import CaptureError, InputError, LegatoError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Workload
from legato.pytorch.network.agreement import broadcast_bytes
from legato.pytorch.network.calibrate import calibrate
from legato.pytorch.parameters import trained_parameters
from legato.pytorch.recording.capture import PhaseTimes, to_workload
from legato.pytorch.recording.recorder import RecordedStep, Recorder
from legato.pytorch.runtime.model import DistributedModel, wrap_model
from legato.pytorch.runtime.tracing import Tracer
from legato.schedule.compare import best, compare
from legato.schedule.published.ddp import BUCKET_BYTES, FIRST_BUCKET_BYTES

__all__ = ["distribute"]

WARMUP_STEPS = 2
RECORDED_STEPS = 5

_log = logging.getLogger("legato")


def distribute(
    model: Any,
    optimizer: Any,
    plan: Plan | str | os.PathLike[str] = "auto",
    *,
    process_group: Any = None,
    broadcast_buffers: bool = True,
    gradient_as_bucket_view: bool = False,
    replan: str | None = None,
    debug: bool | str | None = None,
    flight_dir: str | os.PathLike[str] | None = None,
) -> tuple[DistributedModel, Any]:
    """Train `model` on all ranks, its gradients averaged as in `DistributedDataParallel`, sent as planned.

    `plan` is `"auto"` (see the note in `legato.auto`), a `Plan`, or the path of
    a plan file. Returns the wrapped model and the same optimizer object; use
    both as before. Start the script with torchrun and call
    `torch.distributed.init_process_group` first. `broadcast_buffers` and
    `gradient_as_bucket_view` are DDP's. When computation or communication goes
    at another pace than in the first steps under the plan, rank 0 logs it, and
    with `replan="auto"` all ranks plan anew. `debug` asks for checks at run
    time (`legato.pytorch.runtime.debug`); `flight_dir` is where the record of the last
    messages goes when something fails (`legato.pytorch.network.watchdog`).

    Raises `InputError` (`PlanError` for a plan of another model), and
    `RankError`, on every rank, when the ranks do not have the same model and
    plan.
    """
    if replan not in (None, "auto"):
        raise InputError(f"replan: {replan!r} (expected 'auto' or None)")
    automatic = plan == "auto"
    wrapped, optimizer = wrap_model(
        model,
        optimizer,
        default_buckets(model) if automatic else plan,
        process_group=process_group,
        broadcast_buffers=broadcast_buffers,
        gradient_as_bucket_view=gradient_as_bucket_view,
        debug=debug,
        flight_dir=flight_dir,
    )
    if automatic:
        _Observer(wrapped, optimizer, wrapped.plan).attach()
    if replan:
        _replan(wrapped, optimizer)
    return wrapped, optimizer


def _replan(model: DistributedModel, optimizer: Any) -> None:
    """Plan anew whenever the pace changes."""

    def begin_anew(change: str) -> None:
        if model.process_group.rank() == 0:
            _log.warning("since the first passes under the plan %s, %s; planning anew", model.plan.scheduler, change)
        before = model.plan
        model.adopt(default_buckets(model.module))
        _Observer(model, optimizer, before).attach()

    model.on_drift = begin_anew


def default_buckets(model: Any) -> Plan:
    """Torch's buckets before any gradient was seen: parameters in reverse order, 1 MiB and then 25 MiB."""
    messages: list[Message] = []
    slices: list[Slice] = []
    filled = 0
    for name, p in reversed(trained_parameters(model).items()):
        nbytes = p.numel() * p.element_size()
        slices.append(Slice(name, 0, nbytes))
        filled += nbytes
        if filled >= (BUCKET_BYTES if messages else FIRST_BUCKET_BYTES):
            messages.append(Message(tuple(slices)))
            slices, filled = [], 0
    if slices:
        messages.append(Message(tuple(slices)))
    return Plan("default-buckets", tuple(messages))


class _Observer:
    """Watches the first steps through the model's and the optimizer's own hooks, and takes them away again.

    Where that fails, `otherwise` is the plan.
    """

    def __init__(self, model: DistributedModel, optimizer: Any, otherwise: Plan) -> None:
        self._model = model
        self._optimizer = optimizer
        self._otherwise = otherwise
        self._done = 0
        self._steps: list[RecordedStep] = []
        self._untraced: list[PhaseTimes] = []
        self._tracer: Tracer | None = None
        self._recorder: Recorder | None = None
        self._problem = ""

    def attach(self) -> None:
        self._hooks = [
            self._model.register_forward_pre_hook(self._forward_begins),
            self._optimizer.register_step_pre_hook(self._step_begins),
            self._optimizer.register_step_post_hook(self._step_ended),
        ]

    @property
    def _recording(self) -> bool:
        return self._done >= WARMUP_STEPS and (self._done - WARMUP_STEPS) % 2 == 1

    def _forward_begins(self, *_: Any) -> None:
        """Of several forward passes before a step, the last one is recorded."""
        if not self._model.module.training:  # frameworks switch the module, not its wrapper
            return
        self._abandon()
        if self._recording and not self._problem:
            try:
                self._recorder = Recorder(self._model.module, self._optimizer)
                self._recorder.begin("forward", follow=True)
            except LegatoError as error:
                self._problem = str(error)
        elif self._done >= WARMUP_STEPS:
            self._tracer = Tracer()
            self._model.set_tracer(self._tracer)

    def _step_begins(self, _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """With a closure the forward and the backward pass are still to come, inside the step."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._updates_begin()
            return None

        def watched() -> Any:
            loss = closure()
            self._updates_begin()
            return loss

        return args[:1], {**kwargs, "closure": watched}

    def _updates_begin(self) -> None:
        if self._recorder is not None:
            self._recorder.begin("optimizer")
        elif self._tracer is not None:
            self._tracer.switch("optimizer")

    def _step_ended(self, *_: Any) -> None:
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            try:
                self._steps.append(recorder.finish())
            except LegatoError as error:
                self._problem = str(error)
        elif self._tracer is not None:
            tracer, self._tracer = self._tracer, None
            self._model.set_tracer(None)
            tracer.switch(None)
            self._untraced.append(
                PhaseTimes(tracer.seconds("forward"), tracer.seconds("backward"), tracer.seconds("optimizer"))
            )
        self._done += 1
        if len(self._steps) == RECORDED_STEPS or self._done >= WARMUP_STEPS + 2 * RECORDED_STEPS:
            self._decide()

    def _abandon(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.abandon()

    def _decide(self) -> None:
        for hook in self._hooks:
            hook.remove()
        group = self._model.process_group
        cluster = calibrate(group).cluster
        chosen = self._otherwise
        if group.rank() == 0:
            try:
                chosen = best(compare(self._workload(), cluster)).plan
            except LegatoError as error:
                _log.warning("legato stays with the plan %s: %s", chosen.scheduler, self._problem or error)
        plan = files.decode(broadcast_bytes(files.encode(chosen), group), Plan, "the plan of rank 0")
        if plan != self._model.plan:
            self._model.adopt(plan)
            _log.info("legato goes over to the plan %s", self._model.plan.scheduler)

    def _workload(self) -> Workload:
        if not self._steps:
            raise CaptureError(self._problem or "no step was recorded")
        device = next(iter(trained_parameters(self._model.module).values())).device.type
        name = type(self._model.module).__name__
        return to_workload(self._steps, name=name, batch_size=1, device=device, untraced=self._untraced)
