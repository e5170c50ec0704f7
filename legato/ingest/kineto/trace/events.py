"""Read a PyTorch profiler trace in two passes.

A trace has millions of events, but only one step is needed. The first pass finds the steps; the second pass stores the
events of one step in columns.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from legato.core.errors import FileError
from legato.ingest.chrome import Header, events
from legato.ingest.kineto.trace.columns import NEAREST, Arguments, EventColumns, Number, rows_with, whole_number
from legato.ingest.names import Transfers
from legato.ingest.source import Progress, one_line

__all__ = [
    "ACCUMULATE",
    "COLLECTIVE_NAME",
    "ISSUES",
    "STRAY",
    "WAIT",
    "HostInterval",
    "Marks",
    "Trace",
    "read_marks",
    "read_trace",
]

#: The operators by which gradients and collectives are found.
ACCUMULATE = "torch::autograd::AccumulateGrad"
COLLECTIVE_NAME = re.compile(r"(?:\w*ccl|gloo|mpi|ucc):(\w+)")
#: The operators that issue collectives.
ISSUES = re.compile(r"c10d::(?!check_for_nan)")
#: Python's calls of `work.wait()`, which appear in a trace with stacks.
WAIT = re.compile(r"<built-in method (?:wait|monitored_barrier) of (?:pybind11|PyCapsule|torch\._C\._distributed_c10d)")

_STEP, _UPDATE = "ProfilerStep#", "Optimizer.step"
_MARKS = re.compile(rf"{_STEP}|{_UPDATE}|{COLLECTIVE_NAME.pattern}")
_DEVICE = dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"), "device")
_LAUNCH = dict.fromkeys(("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "runtime"), "launch")
#: The kind of each event category, in lower case. Profilers before 2022 wrote one-word categories, and wrote marks as
#: operators.
_KINDS = {"cpu_op": "operator", "operator": "operator", "user_annotation": "annotation", **_DEVICE, **_LAUNCH}
#: Fewer than one in this number of events are strays. Strays on another device do not mean that the trace is of several
#: ranks, and the times of strays may be wrong even if all other times are right.
STRAY = 20
#: An event has a wrong time if it begins this much before an event that was launched earlier.
_MISPLACED_S = 0.1
#: Larger times (more than 30,000 years) are errors.
_LARGEST_US = 1e18


@dataclass(frozen=True)
class HostInterval:
    """A step or an update of the optimizer: its name, and its time on the host (seconds since the first event)."""

    name: str
    start_s: float
    end_s: float


@dataclass
class Marks:
    """The result of the first pass over one rank's trace: steps and updates of the optimizer, in order."""

    path: Path
    rank: int | None = None
    workers: int | None = None
    has_groups: bool = False  # whether it has groups of fewer ranks than the job has
    # by name: the purpose, and the ranks if known
    groups: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    origin_us: float = 0.0
    events: int = 0
    has_work: bool = False  # whether it has operators or kernels
    # the number of events without times, or that end before they begin
    timeless: Counter[str] = field(default_factory=Counter)
    unmarked: int = 0  # the number of steps without duration
    endless: int = 0  # the number of events that still run after the end of the next event of their stream
    repeats: int = 0  # the number of repeated events
    misplaced: int = 0  # the number of events with times far from their place in the order of launches
    late: int = 0  # the number of kernels that began before their launch
    behind_s: float = 0.0  # the least lag of the device's clock after the host's clock
    repaired: int = 0  # the number of values that were not JSON
    processes: set[int] = field(default_factory=set)  # the processes of the host
    devices: Counter[str] = field(default_factory=Counter)  # the number of events of each device
    steps: list[HostInterval] = field(default_factory=list)
    updates: list[HostInterval] = field(default_factory=list)

    @property
    def device(self) -> str:
        """Return the device with the most events; other devices are left out."""
        return max(self.devices, key=self.devices.__getitem__, default="")


@dataclass
class Trace:
    """The events of one step of one rank.

    The column `link` has correlation numbers in `device` and `launch`, and sequence numbers in `operator`.
    """

    marks: Marks
    device: EventColumns
    launch: EventColumns
    operator: EventColumns
    annotation: EventColumns
    names: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    known: Transfers = field(default_factory=Transfers)
    issued: list[Any] | None = None  # the collectives of the host, once they are matched with their operators
    sends: NDArray[np.bool_] | None = None  # which events of the device are transfers, once that is known

    def without_events(self) -> Trace:
        """Return the same trace without its events."""
        return Trace(self.marks, EventColumns(), EventColumns(), EventColumns(), EventColumns())

    def named(self, columns: EventColumns, row: int) -> str:
        """Return the name of an event."""
        return self.names[int(columns.name[row])]


class _Mark(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: Number = None
    ts: Number = None
    dur: Number = None


class _Where(msgspec.Struct, gc=False):
    device: Any = None


class _First(_Mark, gc=False):
    args: _Where | None = None


class _Event(_Mark, gc=False):
    tid: Number = None
    args: msgspec.Raw = msgspec.Raw()


def read_marks(path: Path, progress: Progress | None = None) -> Marks:
    """Make the first pass. Raises `FileError` if the file is not a trace or a mark is malformed."""
    marks, header, began = Marks(path), Header(), False
    for event in events(path, _First, header, progress):
        marks.events += 1
        kind = _kind(event)
        if kind is None:
            continue
        start_us, length_us = _number(event.ts), _number(event.dur)
        if not (math.isfinite(start_us) and length_us >= 0):
            marks.timeless[kind] += 1
            continue
        if not marks.has_work:
            marks.has_work = kind in ("device", "operator") or COLLECTIVE_NAME.match(event.name or "") is not None
        if kind == "device":
            marks.devices[_device(event.pid, event.args)] += 1
        else:
            marks.processes.add(whole_number(event.pid))
        if not began:
            marks.origin_us, began = start_us, True
        if kind == "annotation" and (name := event.name or "").startswith((_STEP, _UPDATE)):
            start = (start_us - marks.origin_us) * 1e-6
            found = HostInterval(one_line(name), start, start + length_us * 1e-6)
            if name.startswith(_UPDATE):
                marks.updates.append(found)
            elif length_us > 0:
                marks.steps.append(found)
            else:
                marks.unmarked += 1
    marks.repaired = header.repaired
    marks.steps = list(dict.fromkeys(marks.steps))
    marks.steps.sort(key=lambda w: (w.start_s, -w.end_s))
    marks.updates.sort(key=lambda w: (w.start_s, -w.end_s))
    _note_job(marks, header.distributed)
    return marks


def _note_job(marks: Marks, distributed: Mapping[str, Any]) -> None:
    """Record the profiler's information about the job: the rank, the number of ranks, and the process groups."""
    marks.rank = _positive(distributed.get("rank"))
    marks.workers = _positive(distributed.get("world_size"))
    groups = distributed.get("pg_config")
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, dict) and isinstance(group.get("pg_name"), str):
            ranks, size = group.get("ranks"), _positive(group.get("pg_size"))
            known = isinstance(ranks, list) and len(ranks) == size and None not in map(_positive, ranks)
            members = tuple(ranks) if known and isinstance(ranks, list) else ()
            marks.groups[group["pg_name"]] = (one_line(str(group.get("pg_desc") or "")), members)
            marks.has_groups |= 1 < (size or 0) < (marks.workers or 0)


def read_trace(
    marks: Marks, step: HostInterval, progress: Progress | None = None, known: Transfers | None = None
) -> Trace:
    """Make the second pass, for one step. Raises `FileError` if an event is malformed."""
    device, launch = (EventColumns(step.start_s, step.end_s, NEAREST) for _ in range(2))
    operator, annotation = (EventColumns(step.start_s, step.end_s) for _ in range(2))
    trace = Trace(marks, device, launch, operator, annotation, known=known or Transfers())
    names: dict[str, int] = {}
    threads: dict[str, int] = {}
    by_kind: dict[str, EventColumns] = {kind: getattr(trace, kind) for kind in set(_KINDS.values())}
    header, mine = Header(), marks.device
    for index, event in enumerate(events(marks.path, _Event, header, progress)):
        kind = _kind(event)
        start_us, length_us = _number(event.ts), _number(event.dur)
        if kind is None or not (math.isfinite(start_us) and length_us >= 0):
            continue
        start = (start_us - marks.origin_us) * 1e-6
        columns, end, name = by_kind[kind], start + length_us * 1e-6, event.name or ""
        if not columns.wants(start, end) or (kind == "launch" and not _launches(name)):
            continue
        args = _arguments(marks.path, index, event.args)
        if kind == "device" and _device(event.pid, args) != mine:
            continue
        on_host = kind in ("operator", "annotation")
        thread = threads.setdefault(str(args.stream if kind == "device" else event.tid), len(threads))
        link = whole_number(args.sequence if on_host else args.correlation)
        number = names.setdefault(name, len(names))
        columns.add(start, end, number, thread, link, args, _has_detail(name, args, trace.known))
    marks.repaired = max(marks.repaired, header.repaired)
    trace.names, trace.threads = list(names), list(threads)
    for columns in by_kind.values():
        columns.seal()
    # a stream cannot run the same event twice at once, so the file has the event twice
    if (device.repeats() & (device.end > device.start)).any():
        marks.repeats = max(marks.repeats, sum(columns.drop(columns.repeats()) for columns in by_kind.values()))
    marks.misplaced = max(marks.misplaced, device.drop(_misplaced(trace)))
    marks.endless = max(marks.endless, device.end_in_turn())
    marks.behind_s = max(marks.behind_s, _align(trace))
    return trace


def _launched_s(trace: Trace) -> NDArray[np.float64]:
    """Return when the host launched each event of the device (NaN if its launch is not in the trace)."""
    rows = rows_with(trace.launch.link, trace.device.link)
    return np.append(trace.launch.start, np.nan)[rows]


def _misplaced(trace: Trace) -> NDArray[np.bool_]:
    """Return which events of the device begin long before or after their neighbours in the order of launches."""
    device, launched, found = trace.device, _launched_s(trace), np.zeros(len(trace.device), np.bool_)
    for thread in np.unique(device.thread):
        rows = np.flatnonzero((device.thread == thread) & np.isfinite(launched))
        rows = rows[np.argsort(launched[rows], kind="stable")]
        start = device.start[rows]
        before = np.maximum.accumulate(start) - start > _MISPLACED_S
        behind = start - np.minimum.accumulate(start[::-1])[::-1] > _MISPLACED_S
        found[rows[min(before, behind, key=np.count_nonzero)]] = True
    return found & (found.sum() * STRAY <= len(device))


def _align(trace: Trace) -> float:
    """Set the device's clock forward if most events begin before their launches, and return the shift in seconds."""
    early = _launched_s(trace) - trace.device.start
    if not np.isfinite(early).any() or np.nanmedian(early) <= 0:
        return 0.0
    trace.device.start += np.nanmax(early)
    trace.device.end += np.nanmax(early)
    return float(np.nanmax(early))


def _kind(event: _Mark) -> str | None:
    if event.ph != "X" or event.cat is None:
        return None
    kind = _KINDS.get(event.cat) or _KINDS.get(event.cat.lower())
    if kind is None and event.cat == "python_function" and WAIT.match(event.name or ""):
        return "operator"
    return "annotation" if kind == "operator" and _MARKS.match(event.name or "") else kind


def _device(pid: Number, args: _Where | Arguments | None) -> str:
    """Return the name of a device: the process of its events, and the device in their arguments if it differs."""
    told = None if args is None else args.device
    return str(pid) if told is None or str(told) == str(pid) else f"{pid} (device {one_line(str(told), 20)})"


def _launches(name: str) -> bool:
    return any(word in name for word in ("Launch", "Memcpy", "Memset", "launch"))


def _has_detail(name: str, args: Arguments, known: Transfers) -> bool:
    if args.collective is not None or args.nbytes is not None:
        return True
    tells = name == ACCUMULATE or COLLECTIVE_NAME.match(name) or known.known(name)
    return bool(bytes(args.dims)) and bool(tells)


def _arguments(path: Path, index: int, raw: msgspec.Raw) -> Arguments:
    if not bytes(raw):
        return Arguments()
    try:
        return msgspec.json.decode(raw, type=Arguments | None) or Arguments()
    except msgspec.ValidationError as error:
        place = str(error).replace("$.", f"traceEvents[{index}].args.")
        raise FileError(f"{path}: {one_line(place, 200)}") from None


def _number(value: Number) -> float:
    """Return a time of a trace in microseconds, or NaN if the trace has no valid number."""
    if not isinstance(value, float):
        try:
            value = float(value if value is not None else math.nan)
        except (ValueError, OverflowError):
            return math.nan
    return value if abs(value) < _LARGEST_US else math.nan


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
