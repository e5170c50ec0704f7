"""Measured timelines: when a worker computed, and when its messages were on the wire."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from legato.core.timeline import Span, SpanKind, Timeline, merge_intervals
from legato.pytorch._private import leaves

__all__ = ["Tracer", "trace_ddp"]


class Tracer:
    """Records what one rank does, by the host's clock.

    The compute lane is in one state at a time: a kind of work, or None while it
    waits. An iteration starts at a call of `begin_iteration`, where a backward
    pass begins.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._state: SpanKind | None = None
        self._since = 0.0
        self._spans: list[Span] = []
        self._starts: list[float] = []

    def switch(self, state: SpanKind | None) -> SpanKind | None:
        """Set the state of the compute lane from now on; return the previous one."""
        now = time.perf_counter()
        if self._state is not None and now > self._since:
            self._spans.append(Span(self.rank, "compute", self._state, self._since, now, self._state))
        before, self._state, self._since = self._state, state, now
        return before

    def begin_iteration(self) -> None:
        """Record that a backward pass starts now."""
        self.switch("backward")
        self._starts.append(self._since)

    def message(self, label: str, nbytes: int, work: Any) -> None:
        """Record that a message of `nbytes` bytes was launched; its span ends when `work` does."""
        start = time.perf_counter()

        def finished(future: Any) -> None:
            self._spans.append(Span(self.rank, "network", label, start, time.perf_counter(), "message", nbytes))

        work.get_future().add_done_callback(finished)

    def end_forward(self, outputs: Any) -> None:
        """Begin the next iteration when the backward pass reaches these outputs of the forward pass.

        Until then the compute lane stays in `forward`, which so includes the loss.
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
        """The time that the compute lane spent on one kind of work, in seconds."""
        return sum(s.end_s - s.start_s for s in self._spans if s.lane == "compute" and s.kind == kind)

    @property
    def communication_s(self) -> float:
        """The time in which at least one message was in flight, in seconds; only messages that have arrived count."""
        busy = merge_intervals((s.start_s, s.end_s) for s in list(self._spans) if s.kind == "message")
        return sum(end - start for start, end in busy)

    def timelines(self, name: str) -> list[Timeline]:
        """Return one timeline for each complete iteration; each starts at 0 seconds."""
        self.switch(None)
        result = []
        for start, end in zip(self._starts, self._starts[1:], strict=False):
            spans = [
                msgspec.structs.replace(s, start_s=max(s.start_s, start) - start, end_s=min(s.end_s, end) - start)
                for s in sorted(self._spans, key=lambda s: s.start_s)
                if s.start_s < end and s.end_s > start
            ]
            result.append(Timeline(name, "measured", end - start, tuple(spans)))
        return result


@contextmanager
def trace_ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[list[Timeline]]:
    """Measure the iterations of a `DistributedDataParallel` model, once for each model.

    DDP's all-reduce is replaced by the same all-reduce in a communication hook,
    where it can be timed. The list is filled when the context ends.
    """
    ddp: Any = model
    group = ddp.process_group  # DDP's reducer holds the hook below for good, which must not hold the model
    tracer = Tracer(dist.get_rank(group))
    found: list[Timeline] = []
    waiting: set[int] = set()
    parameters: list[Any] = [p for p in ddp.parameters() if p.requires_grad]

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

    send.__annotations__.clear()  # DDP checks them, and here they are strings
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
