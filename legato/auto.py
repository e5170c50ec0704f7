"""`legato.distribute`: trains by a given plan, or makes the plan from the first steps of training.

[Note: auto] With `plan="auto"` the first steps run under torch's default
buckets, without forward overlap. Two steps warm up. Then steps in which only the
phases are timed alternate with steps that are recorded op by op. No step is lost
or run twice. After the last one all ranks calibrate together, rank 0 plans from
its recorded steps and the measured costs, and all ranks switch to its plan
before the next step. If rank 0 could not record (for instance, because the steps
differ from one another), all ranks stay with the buckets, and rank 0 logs why.

[Note: replan] The runtime compares the pace of training with that of the first
steps under the plan (`legato.pytorch.runtime.drift`). With `replan="auto"` a
lasting change makes all ranks start again as above, before the same step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from legato.core import files
from legato.core.errors import CaptureError, InputError, LegatoError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Workload
from legato.pytorch._private import without_dispatch_modes
from legato.pytorch.network.agreement import broadcast_bytes
from legato.pytorch.network.calibrate import calibrate, sizes_up_to
from legato.pytorch.parameters import trained_parameters
from legato.pytorch.recording.capture import PhaseTimes, to_workload
from legato.pytorch.recording.recorder import RecordedStep, Recorder
from legato.pytorch.runtime.comm_hook import can_be_hooked
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
    replan: str | None = None,
    debug: bool | str | None = None,
    flight_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> tuple[DistributedModel, Any]:
    """Train a model on all ranks as `DistributedDataParallel` does, with its gradients sent as planned.

    Call it on every rank, in a script that was started with torchrun, after
    `torch.distributed.init_process_group`.

    Args:
        model: a `torch.nn.Module`, with its parameters on their final device and in their final dtype, or a
            `DistributedDataParallel`, which becomes the wrapped model.
        optimizer: a `torch.optim.Optimizer` with parameters of the model.
        plan: `"auto"` to make the plan from the first 12 steps of training, a `Plan`, or the path of a plan file.
        process_group: the ranks to train on; None stands for all.
        replan: `"auto"` to make a new plan, on all ranks, when computation or communication has slowed down or
            sped up; with None, rank 0 only logs such a change.
        debug: checks during training: True, or names separated by commas (`order`, `finite`, `reads`); None stands for
            the value of `$LEGATO_DEBUG`. See `legato.pytorch.runtime.debug`.
        flight_dir: the directory for the record of the last messages if something fails; None stands for the value
            of `$LEGATO_FLIGHT_DIR`, or the system's directory for temporary files. See
            `legato.pytorch.network.watchdog`.
        options: arguments of `DistributedDataParallel`, such as `gradient_as_bucket_view`, which mean what they mean
            there; `find_unused_parameters` is always on and costs nothing.

    Returns:
        The wrapped model, to be used like a `DistributedDataParallel` model, and the same optimizer object.

    Raises:
        InputError: no process group is initialized, or an argument is not as described.
        PlanError: the plan is for another model, or this runtime cannot carry it out.
        RankError: on every rank, if the ranks do not have the same model, optimizer and plan.
    """
    if replan not in (None, "auto"):
        raise InputError(f"replan: {replan!r} (expected 'auto' or None)")
    automatic = plan == "auto"
    wrapped, optimizer = wrap_model(
        model,
        optimizer,
        default_buckets(model) if automatic else plan,
        process_group=process_group,
        debug=debug,
        flight_dir=flight_dir,
        **options,
    )
    if automatic:
        _Observer(wrapped, optimizer, wrapped.plan).attach()
    if replan:
        _replan(wrapped, optimizer)
    return wrapped, optimizer


def _replan(model: DistributedModel, optimizer: Any) -> None:
    """Make a new plan whenever the pace changes."""

    def start_again(change: str) -> None:
        if model.message_group.rank() == 0:
            _log.warning("since the first passes under the plan %s, %s; replanning", model.plan.scheduler, change)
        before = model.plan
        model.adopt(default_buckets(model.module))
        _Observer(model, optimizer, before).attach()

    model.on_drift = start_again


def default_buckets(model: Any) -> Plan:
    """Return torch's buckets for the first iteration: parameters in reverse order, 1 MiB and then 25 MiB."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    messages: list[Message] = []
    slices: list[Slice] = []
    filled = 0
    for name, p in reversed(trained_parameters(module).items()):
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
    """Records the first steps through hooks on the model and the optimizer, and then plans.

    If recording or planning fails, the plan is `fallback`.
    """

    def __init__(self, model: DistributedModel, optimizer: Any, fallback: Plan) -> None:
        self._model = model
        self._optimizer = optimizer
        self._fallback = fallback
        self._done = 0
        self._steps: list[RecordedStep] = []
        self._untraced: list[PhaseTimes] = []
        self._tracer: Tracer | None = None
        self._recorder: Recorder | None = None
        self._problem = ""

    def attach(self) -> None:
        """Register the hooks; they are removed when the plan is made."""
        self._model.observed = True
        self._hooks = [
            self._model.register_forward_pre_hook(self._forward_begins),
            self._optimizer.register_step_pre_hook(self._step_begins),
            self._optimizer.register_step_post_hook(self._step_ended),
        ]

    @property
    def _recording(self) -> bool:
        return self._done >= WARMUP_STEPS and (self._done - WARMUP_STEPS) % 2 == 1

    def _forward_begins(self, *_: Any) -> None:
        """Begin to time or to record a step; of several forward passes before a step, the last one counts."""
        if not self._model.module.training:  # frameworks call train() and eval() on the module, not on its wrapper
            return
        self._abandon()
        if self._recording and not self._problem:
            with self._keeping_problems():
                self._recorder = Recorder(self._model.module, self._optimizer)
                self._recorder.begin("forward", follow=True)
        elif self._done >= WARMUP_STEPS:
            self._tracer = Tracer()
            self._model.set_tracer(self._tracer)

    def _step_begins(self, _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Begin the optimizer's phase; with a closure, after the forward and backward pass in it."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._updates_begin()
            return None

        def closure_and_updates() -> Any:
            loss = closure()
            self._updates_begin()
            return loss

        return args[:1], {**kwargs, "closure": closure_and_updates}

    def _updates_begin(self) -> None:
        if self._recorder is not None:
            with self._keeping_problems():
                self._recorder.begin("optimizer")
        elif self._tracer is not None:
            self._tracer.switch("optimizer")

    def _step_ended(self, *_: Any) -> None:
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            with self._keeping_problems():
                self._steps.append(recorder.finish())
        elif self._tracer is not None:
            tracer, self._tracer = self._tracer, None
            self._model.set_tracer(None)
            tracer.switch(None)
            self._untraced.append(
                PhaseTimes(tracer.seconds("forward"), tracer.seconds("backward"), tracer.seconds("optimizer"))
            )
        self._done += 1
        if len(self._steps) == RECORDED_STEPS or self._done >= WARMUP_STEPS + 2 * RECORDED_STEPS:
            with without_dispatch_modes():  # another model may be recorded in this step
                self._decide()

    @contextmanager
    def _keeping_problems(self) -> Iterator[None]:
        """Whatever goes wrong while recording, training goes on, and no further step is recorded."""
        try:
            yield
        except Exception as error:
            self._problem = str(error) if isinstance(error, LegatoError) else f"{type(error).__name__}: {error}"
            self._abandon()

    def _abandon(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.abandon()

    def _decide(self) -> None:
        """Calibrate, plan on rank 0, and switch to the plan, on all ranks together."""
        for hook in self._hooks:
            hook.remove()
        self._model.observed = False
        group = self._model.message_group
        nbytes = sum(p.nbytes for p in trained_parameters(self._model.module).values())
        cluster = calibrate(group, sizes=sizes_up_to(nbytes)).cluster
        chosen = self._fallback
        if group.rank() == 0:
            try:
                candidates = compare(self._workload(), cluster)
                if self._model.hooked:
                    candidates = [c for c in candidates if can_be_hooked(c.plan)]
                chosen = best(candidates).plan if candidates else chosen
            except Exception as error:
                _log.warning("staying with the plan %s: %s", chosen.scheduler, self._problem or error)
        plan = files.decode(broadcast_bytes(files.encode(chosen), group), Plan, "the plan of rank 0")
        if plan != self._model.plan:
            self._model.adopt(plan)
            _log.info("switching to the plan %s", self._model.plan.scheduler)

    def _workload(self) -> Workload:
        if not self._steps:
            raise CaptureError(self._problem or "no step was recorded")
        device = next(iter(trained_parameters(self._model.module).values())).device.type
        name = type(self._model.module).__name__
        return to_workload(self._steps, name=name, batch_size=1, device=device, untraced=self._untraced)
