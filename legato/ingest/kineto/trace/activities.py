"""Separate the computations in a profiler trace from the collectives.

[Note: collectives without a device] Under gloo, an operator (`c10d::allreduce_`) issues a collective, and a thread of
gloo runs it later; the mark (`gloo:all_reduce`) shows the time of this run. The record id of a mark is one more than
its operator's. Without ids, marks are matched with operators by size and order, since gloo's threads nearly always
begin collectives in order. Only the operator tells which collective was issued, and by which thread: gloo runs a
reduce-scatter as an all-reduce, and marks it as an all-reduce.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from legato.ingest.kineto.trace.columns import Arguments, EventColumns, rows_with, whole_number
from legato.ingest.kineto.trace.events import COLLECTIVE_NAME, ISSUES, WAIT, Trace
from legato.ingest.names import COMMUNICATION, collective_kind, element_bytes, is_integer, tensor_bytes, tensor_elements
from legato.ingest.source import one_line
from legato.ingest.traced import Sent

__all__ = [
    "Activity",
    "Described",
    "collectives",
    "computations",
    "describe",
    "device_free_at",
    "foreign",
    "grouped",
    "suspected",
    "waits",
]

_WRAPPER = re.compile(r"autograd::|torch::|torch\.|detach$|.*Backward\d*$")
_WAITS = re.compile(rf"_?c10d\w*::(\w*wait|monitored_barrier)|{WAIT.pattern}")
#: How many of the next issued collectives are compared with the size of a mark.
_TRIES = 8


class Activity(NamedTuple):
    """An event that ran from `start_s` to `end_s` (seconds). The host launched the event at `host_s` on `thread`."""

    name: str
    host_s: float
    thread: int
    start_s: float
    end_s: float
    columns: EventColumns
    row: int


class Described(NamedTuple):
    """A description of a collective: its kind, the bytes of each rank's input, and whether the input has integers.

    `itemsize` is the bytes of an element, `ranks` the number of ranks that take part, and `peer` the other rank of a
    send or receive. `group` are the ranks of the process group, and `purpose` is the program's name for it. Unknown
    numbers are None; an unknown `group` or `purpose` is empty.
    """

    kind: str
    nbytes: int | None
    integers: bool
    itemsize: int | None = None
    ranks: int | None = None
    peer: int | None = None
    group: tuple[int, ...] = ()
    purpose: str = ""


def computations(trace: Trace, start_s: float, end_s: float) -> list[Activity]:
    """Return the kernels, copies and fills that the host launched; without a device, return the outermost operators.

    Only what the host launched from `start_s` to `end_s` is returned. Time in which the host issues collectives, waits
    for them or runs them does not count as computation, even inside an operator.
    """
    if len(trace.device):
        return _device_activities(trace, start_s, end_s, ~_sends(trace))
    columns, found, carried_out = trace.operator, list[Activity](), _times_by_thread(trace, start_s, end_s)
    until, cut, current = dict[int, float](), dict[int, float](), dict[int, int]()
    nothing = np.array([bool(trace.known.known(n) or _WAITS.match(n)) for n in trace.names], dtype=bool)
    for i in range(int(np.searchsorted(columns.start, start_s)), int(np.searchsorted(columns.start, end_s))):
        name, thread, start = trace.named(columns, i), int(columns.thread[i]), float(columns.start[i])
        inside, end = start < until.get(thread, -np.inf), float(columns.end[i])
        if start < cut.get(thread, -np.inf) or not (nothing[columns.name[i]] or (not inside and _computes(name))):
            continue
        starts, ends = carried_out.get(thread, ([], []))
        within = bisect_right(starts, start)
        if within and start < ends[within - 1]:
            continue
        if not nothing[columns.name[i]]:
            until[thread], current[thread] = end, len(found)
            found.append(Activity(name, start, thread, start, end, columns, i))
            continue
        cut[thread] = end
        if inside:  # the wait splits the operator around it in two
            around, at = found[current[thread]], current[thread]
            found[at], current[thread] = around._replace(end_s=start), len(found)
            found.append(around._replace(host_s=end, start_s=end, end_s=max(around.end_s, end)))
    return found


def _computes(name: str) -> bool:
    return "::" in name and _WRAPPER.match(name) is None


def _times_by_thread(trace: Trace, start_s: float, end_s: float) -> dict[int, tuple[list[float], list[float]]]:
    """Return the starts and the ends of collectives on each thread of the host between `start_s` and `end_s`."""
    columns, found = trace.annotation, dict[int, tuple[list[float], list[float]]]()
    rows = np.array(_marks(trace), dtype=np.int64)
    for i in rows[(columns.end[rows] > start_s) & (columns.start[rows] < end_s)].tolist():
        starts, ends = found.setdefault(int(columns.thread[i]), ([], []))
        starts.append(float(columns.start[i]))
        ends.append(float(columns.end[i]))
    return found


def waits(trace: Trace, begin_s: float, until_s: float) -> list[tuple[float, float]]:
    """Return the times (start, end) in which an operator waits for a collective, or none if there is a device."""
    if len(trace.device):
        return []
    columns = trace.operator
    waiting = np.array([bool(_WAITS.match(name)) for name in trace.names], dtype=bool)[columns.name]
    rows = waiting & (columns.end > begin_s) & (columns.start < until_s)
    return list(zip(columns.start[rows].tolist(), columns.end[rows].tolist(), strict=True))


def collectives(trace: Trace, start_s: float, end_s: float) -> list[Activity]:
    """Return the collectives that the host issued between `start_s` and `end_s` (see the note above).

    The collectives are events of the device (see `_sends`), or marks on the host, for example of gloo or MPI.
    """
    if not _on_host(trace):
        return _device_activities(trace, start_s, end_s, _sends(trace))
    return [a for a in _marked(trace) if start_s <= a.host_s < end_s]


def _on_host(trace: Trace) -> bool:
    """Return whether the host runs the collectives, even if a device computes."""
    if not len(trace.device):
        return True
    marks = {trace.named(trace.annotation, i) for i in _marks(trace)}
    return not _sends(trace).any() and any(not name.startswith("nccl") for name in marks)


def _sends(trace: Trace) -> NDArray[np.bool_]:
    """Return which events of the device move data between devices; keep the answer in `trace.sends`.

    An event moves data if its name says so, or if it was launched by the operator or mark of a collective, but not by
    an operator inside that operator.
    """
    if trace.sends is None:
        device, (host, thread) = trace.device, _launches(trace)
        trace.sends = _rows(trace, device, trace.known.known)
        can_be = _rows(trace, device, trace.known.can_be) & ~trace.sends
        can_be &= np.isfinite(host)
        order = np.flatnonzero(can_be)[np.argsort(host[can_be], kind="stable")]
        operators = trace.operator, np.flatnonzero(_rows(trace, trace.operator, trace.known.known))
        for columns, around in (operators, (trace.annotation, _marks(trace))):
            for i in around:
                first, last = np.searchsorted(host[order], (columns.start[i], columns.end[i]))
                for row in order[first:last]:
                    if thread[row] == columns.thread[i] and not trace.sends[row]:
                        inside = _around(trace.operator, int(thread[row]), float(host[row]))
                        inside = [k for k in inside if trace.operator.start[k] >= columns.start[i]]
                        trace.sends[row] = not inside or trace.known.known(trace.named(trace.operator, inside[0]))
    return trace.sends


def suspected(trace: Trace, computed: Sequence[Activity]) -> dict[str, float]:
    """Return the kernels among these computations that may move data between devices, with their seconds.

    A kernel is suspected if its name looks like a transfer's name, or if no operator launched it and most events of its
    stream are transfers.
    """
    if not len(trace.device):
        return {}
    sends, found = _sends(trace), dict[str, float]()
    most = {t for t in np.unique(trace.device.thread) if np.mean(sends[trace.device.thread == t]) > 1 / 2}
    for a in computed:
        beside = len(trace.operator) and trace.device.thread[a.row] in most and trace.known.can_be(a.name)
        by = (trace.named(trace.operator, i) for i in _around(trace.operator, a.thread, a.host_s)) if beside else ()
        if trace.known.suspects(a.name) or (beside and not any(map(_computes, by))):
            found[a.name] = found.get(a.name, 0.0) + a.end_s - a.start_s
    return found


def _around(columns: EventColumns, thread: int, moment_s: float) -> list[int]:
    """Return the rows of the events that run on a thread at a moment, beginning with the latest."""
    last = int(np.searchsorted(columns.start, moment_s, side="right"))
    rows = np.arange(max(last - 256, 0), last)
    return [int(i) for i in rows[(columns.thread[rows] == thread) & (columns.end[rows] >= moment_s)][::-1]]


def _rows(trace: Trace, columns: EventColumns, wanted: Callable[[str], object]) -> NDArray[np.bool_]:
    """Return, for each event, whether `wanted` is true for the event's name."""
    return np.array([bool(wanted(name)) for name in trace.names], dtype=np.bool_)[columns.name]


def _marks(trace: Trace) -> list[int]:
    """Return the rows of the marks of collectives on the host."""
    known = _rows(trace, trace.annotation, lambda name: COLLECTIVE_NAME.match(name) or trace.known.is_added(name))
    return [int(row) for row in np.flatnonzero(known)]


def _marked(trace: Trace) -> list[Activity]:
    """Return the marks of collectives on the host, with their operators if traced; keep them in `trace.issued`."""
    if trace.issued is None:
        trace.issued = _joined(trace)
    return trace.issued


def _joined(trace: Trace) -> list[Activity]:
    columns, operator = trace.annotation, trace.operator
    rows = _marks(trace)
    kinds = [collective_kind(trace.named(columns, i)) for i in rows]
    issued: dict[str | None, deque[int]] = {}
    issues = np.array([ISSUES.match(name) is not None for name in trace.names], dtype=bool)
    for i in np.flatnonzero(issues[operator.name]).tolist():
        kind = collective_kind(trace.named(operator, i))
        as_sum = kind == "reduce_scatter" and kind not in kinds
        issued.setdefault("all_reduce" if as_sum else kind, deque()).append(i)
    found = []
    for i, kind in zip(rows, kinds, strict=True):
        by = _issuer(trace, i, issued.get(kind, deque()))
        at = (float(columns.start[i]), int(columns.thread[i]))
        if by is not None:
            at = (float(operator.start[by]), int(operator.thread[by]))
        found.append(Activity(trace.named(columns, i), *at, float(columns.start[i]), float(columns.end[i]), columns, i))
    return found


def _issuer(trace: Trace, mark: int, issued: deque[int]) -> int | None:
    """Remove from `issued` the row of the operator that issued a mark's collective, and return it, or None."""
    began = trace.annotation.start[mark]
    elements = _elements(trace.annotation.detail(mark))
    before = [i for i in itertools.islice(issued, _TRIES) if trace.operator.start[i] <= began]
    same = [i for i in before if elements is not None and _elements(trace.operator.detail(i)) == elements]
    follows = (i for i in same or before if 0 < trace.operator.record[i] == trace.annotation.record[mark] - 1)
    by = next(itertools.chain(follows, same, before), None)
    if by is not None:
        issued.remove(by)
    return by


def _elements(args: Arguments | None) -> int | None:
    """Return the elements that a collective sends.

    Results come first in the arguments, so the elements are in the second argument if that is a tensor.
    """
    dims = None if args is None else args.dimensions()
    if not isinstance(dims, list):
        return None
    return next((tensor_elements(shape) for shape in reversed(dims[:2]) if shape), None)


def device_free_at(trace: Trace, start_s: float) -> float:
    """Return when the device has finished everything launched before `start_s`, or `start_s` if that is later."""
    if not len(trace.device):
        return start_s
    host, _ = _launches(trace)
    before = trace.device.end[host < start_s]
    return max(start_s, float(before.max())) if len(before) else start_s


def foreign(
    trace: Trace, start_s: float, end_s: float, begin_s: float, until_s: float
) -> tuple[tuple[tuple[float, float], ...], tuple[tuple[str, float, float], ...]]:
    """Return the computations (start, end) and collectives (kind, start, end) of other steps in a period of the trace.

    The period lasts from `begin_s` to `until_s`. Events that the host launched from `start_s` to `end_s` belong to the
    step itself, and are left out. Without a device, no computations are returned.
    """

    def of_others(activity: Activity) -> bool:
        launched = start_s <= activity.host_s < end_s
        return not launched and activity.end_s > begin_s and activity.start_s < until_s

    computed = computations(trace, -np.inf, np.inf) if len(trace.device) else []
    sent = collectives(trace, -np.inf, np.inf)
    return (
        tuple((a.start_s, a.end_s) for a in computed if of_others(a)),
        tuple((describe(trace, a).kind, a.start_s, a.end_s) for a in sent if of_others(a)),
    )


def _device_activities(trace: Trace, start_s: float, end_s: float, wanted: NDArray[np.bool_]) -> list[Activity]:
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
        for i in np.flatnonzero(wanted & (host >= start_s) & (host < end_s)).tolist()
    ]


def _launches(trace: Trace) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return when and on which thread the host launched each device event.

    A launch is found by its correlation number, or otherwise by the event's operator. A stream runs its events in the
    order of their launches. So an event without launch and operator in the trace gets the launch time of the previous
    event in its stream. If there is no previous event, the launch time is -inf (before the trace). In a stream without
    any known launch, the launch time of an event is its start. The thread of an unknown launch is -1.
    """
    device = trace.device
    host, thread = np.full(len(device), -np.inf), np.full(len(device), -1)
    for columns, found in (
        (trace.operator, rows_with(trace.operator.external, np.where(device.external > 0, device.external, -1))),
        (trace.launch, rows_with(trace.launch.link, device.link)),
    ):
        host = np.where(found < 0, host, np.append(columns.start, 0.0)[found])
        thread = np.where(found < 0, thread, np.append(columns.thread, 0)[found])
    known = thread >= 0
    for stream in np.unique(device.thread[~known]):
        rows = np.flatnonzero(device.thread == stream)
        unlaunched = ~known[rows]
        before = device.start[rows] if unlaunched.all() else np.maximum.accumulate(host[rows])
        host[rows] = np.where(unlaunched, before, host[rows])
    return host, thread


def grouped(trace: Trace, activity: Activity, since_s: float) -> tuple[Sent, ...]:
    """Return the sends and receives that one kernel runs together.

    The kernel's thread issued these sends and receives after `since_s`, and none of them has its own kernel.

    The result is empty if the trace lacks the peer or the bytes of a send or receive.
    """
    columns, found = trace.operator, list[Sent]()
    for i in range(*map(int, np.searchsorted(columns.start, (since_s, activity.host_s)))):
        args = columns.detail(i) if trace.named(columns, i) == COMMUNICATION else None
        if args is None or columns.thread[i] != activity.thread or columns.end[i] > activity.host_s:
            continue
        kind = collective_kind(args.collective or "")
        if kind in ("send", "recv"):
            peer, nbytes = _peer(args), _given_bytes(args)
            if peer < 0 or nbytes is None:
                return ()
            found.append(Sent(kind, peer, nbytes, _purpose(trace, args)))
    return tuple(found)


def describe(trace: Trace, activity: Activity) -> Described:
    """Return a description of a collective.

    The description comes from the arguments of the kernel if NCCL wrote them. Otherwise, the description comes from the
    host events around the launch: `nccl:all_reduce`, `record_param_comms` and the issuing operator, which knows the
    kind best.
    """
    told, host_names = _told(trace, activity)
    nbytes, integers, itemsize, ranks, peer = None, False, None, None, -1
    group, purpose = tuple[int, ...](), ""
    for args in told:
        if nbytes is None:
            nbytes, integers, itemsize = _size(args)
        if whole_number(args.ranks) > 0:
            ranks = whole_number(args.ranks)
        group = group or trace.marks.groups.get(str(args.group), ("", ()))[1] or args.group_members()
        purpose = purpose or _purpose(trace, args)
        if peer < 0:
            peer = _peer(args)
    kind = trace.known.kind([activity.name, *(args.collective or "" for args in told), *host_names])
    return Described(kind, nbytes, integers, itemsize, ranks, peer if peer >= 0 else None, group, purpose)


def _told(trace: Trace, activity: Activity) -> tuple[list[Arguments], list[str]]:
    """Return all arguments about a collective, its own event's first, and the names of the host events around it."""
    around = _around(trace.annotation, activity.thread, activity.host_s)
    mark = COLLECTIVE_NAME.match, trace.known.is_added
    marks = [i for i in around if any(matches(trace.named(trace.annotation, i)) for matches in mark)]
    around = _around(trace.operator, activity.thread, activity.host_s)
    issuers = [i for i in around if trace.known.known(trace.named(trace.operator, i))]
    # the arguments of these operators begin with their results
    sized = [i for i in issuers if not ISSUES.match(trace.named(trace.operator, i))]
    asked = [activity.columns.detail(activity.row)]
    asked += [*map(trace.annotation.detail, marks), *map(trace.operator.detail, sized)]
    names = [trace.named(trace.annotation, i) for i in marks] + [trace.named(trace.operator, i) for i in issuers]
    return [args for args in asked if args is not None], names


def _given_bytes(args: Arguments) -> int | None:
    """Return the bytes of a rank's input according to NCCL, or None if NCCL does not say."""
    size, elements = element_bytes(args.dtype), whole_number(args.elements)
    return size * elements if size is not None and elements > 0 else None


def _size(args: Arguments) -> tuple[int | None, bool, int | None]:
    """Return the bytes of a rank's input, whether it has integers, and the bytes of an element."""
    if (nbytes := _given_bytes(args)) is not None:
        return nbytes, is_integer(args.dtype), element_bytes(args.dtype)
    dims, types = args.dimensions(), args.type_names()
    first = types[0] if isinstance(types, list) and types else None
    nbytes = tensor_bytes(dims, types)
    return nbytes, is_integer(first), None if nbytes is None else element_bytes(first)


def _peer(args: Arguments) -> int:
    """Return the other rank of a send or receive; -1 if the trace does not tell it, or for another collective."""
    told = {"send": args.receiver, "recv": args.sender}
    return whole_number(told.get(collective_kind(args.collective or "") or ""))


def _purpose(trace: Trace, args: Arguments) -> str:
    """Return the program's description of the process group of a collective."""
    return trace.marks.groups.get(str(args.group), ("", ()))[0] or one_line(str(args.purpose or ""))
