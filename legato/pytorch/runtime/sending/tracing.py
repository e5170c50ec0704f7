"""Records timelines: when a worker computed, and when its messages were on the wire."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from legato.core.intervals import Intervals
from legato.core.timeline import Span, SpanKind, Timeline
from legato.pytorch.device import clock_for, group_device
from legato.pytorch.private.tensors import leaves

__all__ = ["Tracer", "trace_ddp"]

_CPU = torch.device("cpu")


class Tracer:
    """A recorder of what one rank does, by the clock of the model's device.

    The timeline's compute lane is in one state at a time: a kind of work, or None while the worker waits. An iteration
    starts at a call of `begin_iteration`, when a backward pass begins. `group` carries the messages.
    """

    def __init__(self, group: Any = None, device: torch.device = _CPU) -> None:
        self.rank = 0 if group is None else group.rank()
        self._clock = clock_for(device)
        # A message over the host ends when the host says so. An idle stream marks this, as other streams may still be
        # busy.
        idle = device.type != "cpu" and group_device(group).type == "cpu"
        self._idle = torch.Stream(device) if idle else nullcontext()
        self._began = self._clock.now()
        self._state: SpanKind | None = None
        self._since = self._began
        self._marked: list[tuple[str, str, Any, Any, SpanKind, int | None]] = []
        self._starts: list[Any] = []

    def switch(self, state: SpanKind | None) -> SpanKind | None:
        """Set the state of the compute lane from now on, and return the previous state."""
        now = self._clock.now()
        if self._state is not None:
            self._marked.append(("compute", self._state, self._since, now, self._state, None))
        before, self._state, self._since = self._state, state, now
        return before

    def begin_iteration(self) -> None:
        """Record that a backward pass starts now."""
        self.switch("backward")
        self._starts.append(self._since)

    def message(self, label: str, nbytes: int, work: Any) -> None:
        """Record that a message of `nbytes` bytes was launched; its span ends when `work` completes.

        If the message runs on the device, the future of `work` is done before the message has arrived, but the future's
        callback runs on a stream that waits for the message.
        """
        start = self._clock.now()

        def finished(future: Any) -> None:
            with self._idle:
                self._marked.append(("network", label, start, self._clock.now(), "message", nbytes))

        work.get_future().add_done_callback(finished)

    def end_forward(self, outputs: Any) -> None:
        """Begin the next iteration when the backward pass reaches these outputs of the forward pass.

        Until then the compute lane stays in the state `forward`, which therefore includes the loss.
        """
        begun = hooked = False

        def begin(*_: Any) -> None:
            nonlocal begun
            if not begun:
                begun = True
                self.begin_iteration()

        for value in leaves(outputs):
            if getattr(value, "grad_fn", None) is not None:
                value.register_hook(begin)
                hooked = True
        if not hooked:
            self.switch(None)

    def seconds(self, kind: SpanKind) -> float:
        """Return the time, in seconds, that the compute lane spent on one kind of work."""
        return sum(s.end_s - s.start_s for s in self._spans() if s.lane == "compute" and s.kind == kind)

    @property
    def communication_s(self) -> float:
        """Return the time, in seconds, during which at least one of the messages that have arrived was in flight."""
        return Intervals((s.start_s, s.end_s) for s in self._spans() if s.kind == "message").seconds

    def timelines(self, name: str) -> list[Timeline]:
        """Return one timeline for each complete iteration; each timeline starts at 0 seconds."""
        self.switch(None)
        result = []
        spans = sorted(self._spans(), key=lambda s: s.start_s)
        for start, end in itertools.pairwise(self._at(mark) for mark in self._starts):
            inside = [
                msgspec.structs.replace(s, start_s=max(s.start_s, start) - start, end_s=min(s.end_s, end) - start)
                for s in spans
                if s.start_s < end and s.end_s > start
            ]
            result.append(Timeline(name, "measured", end - start, tuple(inside)))
        return result

    def _at(self, mark: Any) -> float:
        """Convert a mark of the clock to seconds since this tracer was made."""
        return self._clock.seconds(self._began, mark)

    def _spans(self) -> list[Span]:
        found = []
        for lane, name, start, end, kind, nbytes in list(self._marked):
            start_s, end_s = self._at(start), self._at(end)
            if end_s > start_s:
                found.append(Span(self.rank, lane, name, start_s, end_s, kind, nbytes))
        return found


@contextmanager
def trace_ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[list[Timeline]]:
    """Measure the iterations of a `DistributedDataParallel` model; a model can be measured only once.

    A communication hook runs the same all-reduce as DDP, so that it can be timed. The yielded list is filled when the
    context ends.
    """
    ddp: Any = model
    group = ddp.process_group  # DDP's reducer holds the hook below for good, so the hook must not hold the model
    parameters: list[Any] = [p for p in ddp.parameters() if p.requires_grad]
    tracer = Tracer(group, parameters[0].device)
    found: list[Timeline] = []
    waiting: set[int] = set()

    def send(_: Any, bucket: Any) -> Any:
        buffer = bucket.buffer().div_(group.size())
        work: Any = dist.all_reduce(buffer, group=group, async_op=True)
        tracer.message(f"bucket {bucket.index()}", buffer.nbytes, work)
        return work.get_future().then(lambda done: done.value()[0])

    def forward_begins(*_: Any) -> None:
        waiting.update(map(id, parameters))
        tracer.switch("forward")

    def gradient_ready(p: torch.Tensor) -> None:
        waiting.discard(id(p))
        if not waiting:
            tracer.switch(None)

    def forward_ends(_: Any, __: Any, output: Any) -> None:
        tracer.end_forward(output)

    send.__annotations__.clear()  # DDP checks annotations, and here they are strings
    ddp.register_comm_hook(None, send)
    hooks = [
        ddp.register_forward_pre_hook(forward_begins),
        ddp.register_forward_hook(forward_ends),
        optimizer.register_step_pre_hook(lambda *_: tracer.switch("optimizer") and None),
        optimizer.register_step_post_hook(lambda *_: tracer.switch(None) and None),
        *(p.register_post_accumulate_grad_hook(gradient_ready) for p in parameters),
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        found += tracer.timelines("ddp")
