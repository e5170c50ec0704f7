"""Timelines as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

The format is "Trace Event Format" (JSON object form): `X` are complete events,
`M` name and sort the rows, `i` mark one moment, `s` and `f` are the two ends of
an arrow ("flow"): from a gradient's op to its message, and from a message to the
op that stood idle for it. Times are microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from legato.core.files import write_text
from legato.core.timeline import Span, Timeline
from legato.core.workload import Workload
from legato.report.flows import flows
from legato.report.lanes import stack

__all__ = ["to_perfetto", "write_perfetto"]

#: Names of the viewers' own colours.
_COLOURS = {
    "forward": "thread_state_running",
    "backward": "thread_state_iowait",
    "optimizer": "thread_state_unknown",
    "message": "rail_load",
}


def to_perfetto(timelines: Sequence[Timeline], workload: Workload | None = None) -> str:
    """The timelines as one trace: a process each, in it a thread for every worker and lane.

    Their workload, where it is given, says which op a message's gradient comes from.

    Spans of a lane that overlap (several messages in flight) go to threads of
    their own, because the viewers only nest the events of one thread.
    """
    events = [event for pid, timeline in enumerate(timelines, 1) for event in _process(pid, timeline, workload)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"producer": "legato"}})


def write_perfetto(
    path: str | os.PathLike[str], timelines: Sequence[Timeline], workload: Workload | None = None
) -> None:
    """Write `to_perfetto` to a file, whole or not at all. Raises `FileError`."""
    write_text(path, to_perfetto(timelines, workload))


def _process(pid: int, timeline: Timeline, workload: Workload | None) -> Iterator[dict[str, Any]]:
    yield _metadata(pid, 0, "process_name", name=f"{timeline.name} ({timeline.source})")
    yield _metadata(pid, 0, "process_sort_index", sort_index=pid)
    marks = {"end of iteration": timeline.iteration_s, "lower bound": timeline.lower_bound_s}
    for name, at_s in marks.items():
        if at_s is not None:
            yield {"ph": "i", "s": "p", "pid": pid, "tid": 0, "name": name, "cat": "mark", "ts": _ns(at_s) / 1000}
    tid = 0
    thread: dict[int, int] = {}  # id of a span -> its thread
    for (worker, lane), spans in _lanes(timeline.spans):
        rows: dict[int, list[Span]] = {}
        for row, span in stack(spans):
            rows.setdefault(row, []).append(span)
        for row in sorted(rows):
            tid += 1
            name = f"worker {worker} {lane}" + (f" ({row + 1})" if row else "")
            yield _metadata(pid, tid, "thread_name", name=name)
            yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)
            thread |= dict.fromkeys(map(id, rows[row]), tid)
            yield from (_complete(pid, tid, span) for span in rows[row])
    for number, (start, end) in enumerate(flows(timeline, workload)):
        # An arrow starts in the first span and ends at the start of the second, each on its own thread.
        arrow = {"pid": pid, "cat": "flow", "name": "waits for", "id": pid << 32 | number}
        yield {"ph": "s", "tid": thread[id(start)], "ts": _inside(start), **arrow}
        yield {"ph": "f", "bp": "e", "tid": thread[id(end)], "ts": _ns(end.start_s) / 1000, **arrow}


def _inside(span: Span) -> float:
    """Its last nanosecond, in which viewers still see the span."""
    return max(_ns(span.start_s), _ns(span.end_s) - 1) / 1000


def _lanes(spans: Iterable[Span]) -> list[tuple[tuple[int, str], list[Span]]]:
    """Spans by (worker, lane): workers in order, a worker's compute before its network."""
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
    # Whole nanoseconds: the viewers' own resolution, so that spans that touch do not overlap by rounding.
    return round(seconds * 1e9)
