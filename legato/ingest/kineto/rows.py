"""Which events of a profiler trace are computation, and which are collectives."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from legato.ingest.kineto.columns import Spans, whole_number
from legato.ingest.kineto.events import COLLECTIVE_NAME, COMMUNICATION, Trace
from legato.ingest.names import collective_kind, element_bytes, tensor_bytes

__all__ = ["Row", "collective_rows", "compute_rows", "describe", "device_free_at"]

_NCCL = re.compile(r"nccl|rccl", re.IGNORECASE)
_WRAPPER = re.compile(r"autograd::|torch::|torch\.|c10d::|detach$|.*Backward\d*$")


class Row(NamedTuple):
    """An event: when the host launched it (`host_s`, on `thread`) and when it ran, in seconds."""

    name: str
    host_s: float
    thread: int
    start_s: float
    end_s: float
    spans: Spans
    place: int


def compute_rows(trace: Trace, start_s: float, end_s: float) -> list[Row]:
    """Kernels, copies and fills that the host launched in that time; without a device its outermost operators."""
    if len(trace.device):
        return [row for row in _device_rows(trace, start_s, end_s) if not _NCCL.search(row.name)]
    spans, rows, until = trace.operator, [], dict[int, float]()
    for i in range(int(np.searchsorted(spans.start, start_s)), int(np.searchsorted(spans.start, end_s))):
        name, thread, start = trace.named(spans, i), int(spans.thread[i]), float(spans.start[i])
        if "::" not in name or name == COMMUNICATION or _WRAPPER.match(name) or start < until.get(thread, -np.inf):
            continue
        until[thread] = float(spans.end[i])
        rows.append(Row(name, start, thread, start, float(spans.end[i]), spans, i))
    return rows


def collective_rows(trace: Trace, start_s: float, end_s: float) -> list[Row]:
    """The kernels of NCCL or RCCL; without a device what gloo and its like mark on the host."""
    if len(trace.device):
        found = _device_rows(trace, start_s, end_s)
        return [row for row in found if _NCCL.search(row.name) and not row.name.startswith("Mem")]
    spans = trace.annotation
    return [
        Row(name, float(spans.start[i]), int(spans.thread[i]), float(spans.start[i]), float(spans.end[i]), spans, i)
        for i in range(int(np.searchsorted(spans.start, start_s)), int(np.searchsorted(spans.start, end_s)))
        if COLLECTIVE_NAME.match(name := trace.named(spans, i))
    ]


def device_free_at(trace: Trace, start_s: float) -> float:
    """When the device had done what the host launched before that moment; the moment itself at the earliest."""
    if not len(trace.device):
        return start_s
    host, _ = _launches(trace)
    before = trace.device.end[host < start_s]
    return max(start_s, float(before.max())) if len(before) else start_s


def _device_rows(trace: Trace, start_s: float, end_s: float) -> list[Row]:
    device = trace.device
    host, thread = _launches(trace)
    return [
        Row(
            trace.named(device, i),
            float(host[i]),
            int(thread[i]),
            float(device.start[i]),
            float(device.end[i]),
            device,
            i,
        )
        for i in np.flatnonzero((host >= start_s) & (host < end_s)).tolist()
    ]


def _launches(trace: Trace) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """When and on which thread the host launched each event of the device, by correlation; else when it began."""
    device, launch = trace.device, trace.launch
    if not len(launch):
        return device.start, np.full(len(device), -1)
    order = np.argsort(launch.link, kind="stable")
    at = order[np.searchsorted(launch.link[order], device.link).clip(max=len(order) - 1)]
    known = (launch.link[at] == device.link) & (device.link >= 0)
    return np.where(known, launch.start[at], device.start), np.where(known, launch.thread[at], -1)


def describe(trace: Trace, row: Row) -> tuple[str, int | None, int | None]:
    """(kind, bytes, number of workers) of a collective.

    From the kernel's own arguments where NCCL wrote them, else from what the
    host says around the launch: `nccl:all_reduce` and `record_param_comms`.
    """
    kind, nbytes, workers = collective_kind(row.name), None, None
    candidates = [row.spans.detail(row.place)]
    candidates += [trace.annotation.detail(i) for i in _enclosing(trace, trace.annotation, row, COLLECTIVE_NAME)]
    candidates += [trace.operator.detail(i) for i in _enclosing(trace, trace.operator, row, _COMMUNICATION)]
    for args in candidates:
        if args is None:
            continue
        size, elements = element_bytes(args.dtype), whole_number(args.elements)
        if nbytes is None and size is not None and elements > 0:
            nbytes = size * elements
        nbytes = nbytes or tensor_bytes(args.dimensions(), args.type_names())
        kind = collective_kind(args.collective or "") or kind
        group = whole_number(args.group)
        workers = workers or (group if group > 0 else None)
    for i in _enclosing(trace, trace.annotation, row, COLLECTIVE_NAME):
        kind = collective_kind(trace.named(trace.annotation, i)) or kind
    return kind or "unknown", nbytes, workers


_COMMUNICATION = re.compile(COMMUNICATION)


def _enclosing(trace: Trace, spans: Spans, row: Row, pattern: re.Pattern[str]) -> list[int]:
    """The events of that name on the launching thread that were open when `row` was launched, innermost first."""
    found = []
    last = int(np.searchsorted(spans.start, row.host_s, side="right"))
    for i in range(last - 1, max(last - 1 - 256, -1), -1):
        if spans.thread[i] == row.thread and spans.end[i] >= row.host_s and pattern.match(trace.named(spans, i)):
            found.append(i)
    return found
