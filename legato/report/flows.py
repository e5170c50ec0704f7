"""What waited for what, as pairs of spans: a gradient's op and its message, a message and the op that stood idle."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator

from legato.core.timeline import Span, Timeline
from legato.core.workload import Workload
from legato.report.waits import blame

__all__ = ["flows"]


def flows(timeline: Timeline, workload: Workload | None = None) -> Iterator[tuple[Span, Span]]:
    """(span, span that waited for it), worker by worker.

    A message is named after its (first) tensor; with the workload, that tells
    the backward op its gradient comes from. The second half of an all-reduce
    follows the first.
    """
    workers: dict[int, list[Span]] = {}
    for span in sorted(timeline.spans, key=lambda span: (span.start_s, span.end_s)):
        workers.setdefault(span.worker, []).append(span)
    for worker, spans in sorted(workers.items()):
        yield from _gradients(spans, workload)
        yield from _waits(timeline, worker, spans)


def _gradients(spans: list[Span], workload: Workload | None) -> Iterator[tuple[Span, Span]]:
    if workload is None:
        return
    op_of = {tensor.name: workload.ops[tensor.ready_after].name for tensor in workload.tensors}
    made = {span.name: span for span in spans if span.kind == "backward"}
    for span in spans:
        if span.kind == "message":
            source = made.get(op_of.get(_tensor(span.name, op_of), ""))
            if source is not None and source.start_s < span.end_s:
                yield source, span


def _tensor(name: str, known: dict[str, str]) -> str:
    """The tensor that a message is named after."""
    return name if name in known else re.sub(r" \+ ?\d+$", "", name)


def _waits(timeline: Timeline, worker: int, spans: list[Span]) -> Iterator[tuple[Span, Span]]:
    messages = [span for span in spans if span.kind == "message"]
    computing = [span for span in spans if span.kind != "message"]
    starts = [span.start_s for span in computing]
    for start, end, shares in blame(timeline, worker):
        cause = max(shares, key=lambda name: shares[name])
        at = bisect_left(starts, end)
        if cause is None or at == len(computing) or computing[at].kind == "backward":
            continue
        flying = [span for span in messages if span.name == cause and start < span.end_s and span.start_s < end]
        if flying:
            yield max(flying, key=lambda span: span.end_s), computing[at]
