"""Tells the computations in a profiler trace from the collectives."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from legato.ingest.kineto.columns import EventColumns, whole_number
from legato.ingest.kineto.events import COLLECTIVE_NAME, COMMUNICATION, Trace
from legato.ingest.names import collective_kind, element_bytes, tensor_bytes

__all__ = ["Activity", "collectives", "computations", "describe", "device_free_at", "foreign"]

_NCCL = re.compile(r"nccl|rccl", re.IGNORECASE)
_WRAPPER = re.compile(r"autograd::|torch::|torch\.|c10d::|detach$|.*Backward\d*$")


class Activity(NamedTuple):
    """An event that ran from `start_s` to `end_s`; the host launched it at `host_s` on `thread` (seconds)."""

    name: str
    host_s: float
    thread: int
    start_s: float
    end_s: float
    columns: EventColumns
    row: int


def computations(trace: Trace, start_s: float, end_s: float) -> list[Activity]:
    """The kernels, copies and fills that the host launched in that time; without a device its outermost operators."""
    if len(trace.device):
        return [a for a in _device_activities(trace, start_s, end_s) if not _NCCL.search(a.name)]
    columns, found, until = trace.operator, [], dict[int, float]()
    for i in range(int(np.searchsorted(columns.start, start_s)), int(np.searchsorted(columns.start, end_s))):
        name, thread, start = trace.named(columns, i), int(columns.thread[i]), float(columns.start[i])
        if "::" not in name or name == COMMUNICATION or _WRAPPER.match(name) or start < until.get(thread, -np.inf):
            continue
        until[thread] = float(columns.end[i])
        found.append(Activity(name, start, thread, start, float(columns.end[i]), columns, i))
    return found


def collectives(trace: Trace, start_s: float, end_s: float) -> list[Activity]:
    """The kernels of NCCL or RCCL; without a device the marks of gloo, MPI and so on, on the host."""
    if len(trace.device):
        found = _device_activities(trace, start_s, end_s)
        return [a for a in found if _NCCL.search(a.name) and not a.name.startswith("Mem")]
    columns = trace.annotation
    return [
        Activity(
            name,
            float(columns.start[i]),
            int(columns.thread[i]),
            float(columns.start[i]),
            float(columns.end[i]),
            columns,
            i,
        )
        for i in range(int(np.searchsorted(columns.start, start_s)), int(np.searchsorted(columns.start, end_s)))
        if COLLECTIVE_NAME.match(name := trace.named(columns, i))
    ]


def device_free_at(trace: Trace, start_s: float) -> float:
    """When the device has finished everything launched before `start_s`, but not before `start_s`."""
    if not len(trace.device):
        return start_s
    host, _ = _launches(trace)
    before = trace.device.end[host < start_s]
    return max(start_s, float(before.max())) if len(before) else start_s


def foreign(
    trace: Trace, start_s: float, end_s: float, begin_s: float, until_s: float
) -> tuple[tuple[tuple[float, float], ...], tuple[tuple[float, float], ...]]:
    """The times (start, end) of computations and of collectives between `begin_s` and `until_s`.

    Without those that the host launched from `start_s` to `end_s`.
    """
    on_device = len(trace.device) > 0
    columns, pattern = (trace.device, _NCCL) if on_device else (trace.annotation, COLLECTIVE_NAME)
    host = _launches(trace)[0] if on_device else columns.start
    others = ((host < start_s) | (host >= end_s)) & (columns.end > begin_s) & (columns.start < until_s)
    sends = np.array([bool(pattern.search(name)) for name in trace.names], dtype=bool)[columns.name]

    def times(rows: NDArray[np.bool_]) -> tuple[tuple[float, float], ...]:
        return tuple(zip(columns.start[rows].tolist(), columns.end[rows].tolist(), strict=True))

    return times(others & ~sends & on_device), times(others & sends)


def _device_activities(trace: Trace, start_s: float, end_s: float) -> list[Activity]:
    device = trace.device
    host, thread = _launches(trace)
    return [
        Activity(
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
    """When and on which thread the host launched each device event, by correlation.

    A stream runs its events in the order of their launches. An event whose
    launch is not in the trace was therefore launched when the event before it in
    its stream was, and before the trace began (at -inf) if there is none. In a
    stream without any known launch, events are launched when they start. The
    thread of an unknown launch is -1.
    """
    device, launch = trace.device, trace.launch
    if not len(launch):
        return device.start, np.full(len(device), -1)
    order = np.argsort(launch.link, kind="stable")
    at = order[np.searchsorted(launch.link[order], device.link).clip(max=len(order) - 1)]
    known = (launch.link[at] == device.link) & (device.link >= 0)
    host = np.where(known, launch.start[at], -np.inf)
    for stream in np.unique(device.thread[~known]):
        rows = np.flatnonzero(device.thread == stream)
        unlaunched = ~known[rows]
        before = device.start[rows] if unlaunched.all() else np.maximum.accumulate(host[rows])
        host[rows] = np.where(unlaunched, before, host[rows])
    return host, np.where(known, launch.thread[at], -1)


def describe(trace: Trace, activity: Activity) -> tuple[str, int | None]:
    """The kind and the bytes of a collective.

    They come from the arguments of the kernel if NCCL wrote them, else from the
    host events around the launch: `nccl:all_reduce` and `record_param_comms`.
    """
    kind, nbytes = collective_kind(activity.name), None
    candidates = [activity.columns.detail(activity.row)]
    candidates += [trace.annotation.detail(i) for i in _enclosing(trace, trace.annotation, activity, COLLECTIVE_NAME)]
    candidates += [trace.operator.detail(i) for i in _enclosing(trace, trace.operator, activity, _COMMUNICATION)]
    for args in candidates:
        if args is None:
            continue
        size, elements = element_bytes(args.dtype), whole_number(args.elements)
        if nbytes is None and size is not None and elements > 0:
            nbytes = size * elements
        nbytes = nbytes or tensor_bytes(args.dimensions(), args.type_names())
        kind = collective_kind(args.collective or "") or kind
    for i in _enclosing(trace, trace.annotation, activity, COLLECTIVE_NAME):
        kind = collective_kind(trace.named(trace.annotation, i)) or kind
    return kind or "unknown", nbytes


_COMMUNICATION = re.compile(COMMUNICATION)


def _enclosing(trace: Trace, columns: EventColumns, activity: Activity, pattern: re.Pattern[str]) -> list[int]:
    """The matching events on the launching thread during which `activity` was launched, innermost first."""
    found = []
    last = int(np.searchsorted(columns.start, activity.host_s, side="right"))
    for i in range(last - 1, max(last - 1 - 256, -1), -1):
        if (
            columns.thread[i] == activity.thread
            and columns.end[i] >= activity.host_s
            and pattern.match(trace.named(columns, i))
        ):
            found.append(i)
    return found
