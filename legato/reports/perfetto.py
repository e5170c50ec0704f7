"""Timelines as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

The format is the "Trace Event Format" (JSON object form). Events of phase `X` are
complete events, `M` names and sorts rows, and `i` marks a moment. `s` and `f` are the two
ends of an arrow ("flow") from a gradient's op to its message, or from a message
to the op that waited for it. Times are microseconds.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from legato.core.files import write_text
from legato.core.timeline import Span, Timeline, stack
from legato.core.workload import Workload
from legato.reports.idle import idle_causes

__all__ = ["flows", "to_perfetto", "write_perfetto"]

#: Names of colours in the viewers.
_COLOURS = {
    "forward": "thread_state_running",
    "backward": "thread_state_iowait",
    "optimizer": "thread_state_unknown",
    "message": "rail_load",
}


def to_perfetto(timelines: Sequence[Timeline], workload: Workload | None = None) -> str:
    """Return the timelines as one trace, with a process per timeline and a thread per worker and lane.

    With the workload, there are also arrows from ops to the messages of their
    gradients (see `flows`). Overlapping spans of a lane (several messages in
    flight) get separate threads, because viewers nest the events of one thread.
    """
    events = [event for pid, timeline in enumerate(timelines, 1) for event in _process(pid, timeline, workload)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"producer": "legato"}})


def write_perfetto(
    path: str | os.PathLike[str], timelines: Sequence[Timeline], workload: Workload | None = None
) -> None:
    """Write the trace of `to_perfetto` to a file. Raises `FileError` without leaving a partial file."""
    write_text(path, to_perfetto(timelines, workload))


def _process(pid: int, timeline: Timeline, workload: Workload | None) -> Iterator[dict[str, Any]]:
    yield _metadata(pid, 0, "process_name", name=f"{timeline.name} ({timeline.source_in_words})")
    yield _metadata(pid, 0, "process_sort_index", sort_index=pid)
    marks = {"end of iteration": timeline.iteration_s, "lower bound": timeline.lower_bound_s}
    for name, at_s in marks.items():
        if at_s is not None:
            yield {"ph": "i", "s": "p", "pid": pid, "tid": 0, "name": name, "cat": "mark", "ts": _ns(at_s) / 1000}
    tid, members = 0, dict(timeline.members)
    thread: dict[int, int] = {}  # id of a span -> its thread
    for (worker, lane), spans in _lanes(timeline.spans):
        rows: dict[int, list[Span]] = {}
        for row, span in stack(spans):
            rows.setdefault(row, []).append(span)
        for row in sorted(rows):
            tid += 1
            alike = f" of {members[worker]:,} alike" if worker in members else ""
            name = f"worker {worker}{alike} {lane}" + (f" ({row + 1})" if row else "")
            yield _metadata(pid, tid, "thread_name", name=name)
            yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)
            thread |= dict.fromkeys(map(id, rows[row]), tid)
            yield from (_complete(pid, tid, span) for span in rows[row])
    for number, (start, end) in enumerate(flows(timeline, workload)):
        # An arrow goes from within the first span to the start of the second.
        arrow = {"pid": pid, "cat": "flow", "name": "waits for", "id": pid << 32 | number}
        yield {"ph": "s", "tid": thread[id(start)], "ts": _inside(start), **arrow}
        yield {"ph": "f", "bp": "e", "tid": thread[id(end)], "ts": _ns(end.start_s) / 1000, **arrow}


def _inside(span: Span) -> float:
    """Return, in microseconds, the last nanosecond at which viewers consider a span as running."""
    return max(_ns(span.start_s), _ns(span.end_s) - 1) / 1000


def _lanes(spans: Iterable[Span]) -> list[tuple[tuple[int, str], list[Span]]]:
    """Return the spans by (worker, lane), with workers in order, and computation before network."""
    lanes: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        lanes.setdefault((span.worker, span.lane), []).append(span)
    return sorted(lanes.items(), key=lambda item: (item[0][0], item[1][0].kind == "message", item[0][1]))


def _complete(pid: int, tid: int, span: Span) -> dict[str, Any]:
    start, end = _ns(span.start_s), _ns(span.end_s)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": span.name,
        "cat": span.kind,
        "cname": _COLOURS[span.kind],
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": {} if span.nbytes is None else {"nbytes": span.nbytes},
    }


def _metadata(pid: int, tid: int, what: str, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _ns(seconds: float) -> int:
    # Viewers resolve whole nanoseconds; with finer times, rounding would make adjacent spans overlap.
    return round(seconds * 1e9)


def flows(timeline: Timeline, workload: Workload | None = None) -> Iterator[tuple[Span, Span]]:
    """Yield pairs of a span and the span that waits for it, worker by worker.

    There are two kinds of pairs: the op that computes a gradient and the gradient's message, and a message and an op
    that had to wait for this message. A message has the name of its gradient, and the workload tells which backward op
    computes this gradient. Without a workload, there are only pairs of the second kind.
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
    """Return the tensor after which a message is named."""
    return name if name in known else re.sub(r" \+ ?\d+$", "", name)


def _waits(timeline: Timeline, worker: int, spans: list[Span]) -> Iterator[tuple[Span, Span]]:
    messages = [span for span in spans if span.kind == "message"]
    computing = [span for span in spans if span.kind != "message"]
    starts = [span.start_s for span in computing]
    for start, end, shares in idle_causes(timeline, worker):
        cause = max(shares, key=lambda name: shares[name])
        at = bisect_left(starts, end)
        if cause is None or at == len(computing) or computing[at].kind == "backward":
            continue
        flying = [span for span in messages if span.name == cause and start < span.end_s and span.start_s < end]
        if flying:
            yield max(flying, key=lambda span: span.end_s), computing[at]
