"""The events of a PyTorch profiler trace that matter here, held in columns.

A trace has millions of events. Each that is kept takes 44 bytes, so that the
memory stays a small part of the file.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from legato.core.errors import FileError
from legato.ingest.chrome import Header, events
from legato.ingest.source import Progress, one_line

__all__ = [
    "ACCUMULATE",
    "COLLECTIVE_NAME",
    "COMMUNICATION",
    "Arguments",
    "Spans",
    "Trace",
    "read_trace",
    "whole_number",
]

Number = int | float | str | None


class Arguments(msgspec.Struct):
    """What profilers write about an event, of any version: numbers also as text, lists also as text."""

    external: Number = msgspec.field(default=None, name="External id")
    record: Number = msgspec.field(default=None, name="Record function id")
    sequence: Number = msgspec.field(default=None, name="Sequence number")
    correlation: Number = None
    stream: Number = None
    nbytes: Number = msgspec.field(default=None, name="bytes")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    elements: Number = msgspec.field(default=None, name="In msg nelems")
    dtype: str | None = None
    group: Number = msgspec.field(default=None, name="Group size")

    def detached(self) -> Arguments:
        """The same without a hold on the block of the file in which it stood."""
        self.dims, self.types = self.dims.copy(), self.types.copy()
        return self

    def key(self) -> Hashable:
        """Equal for arguments that say the same but for their ids."""
        said = (self.nbytes, self.collective, self.elements, self.dtype, self.group)
        return (*said, bytes(self.dims), bytes(self.types))

    def dimensions(self) -> Any:
        """`Input Dims` as lists of numbers, or None."""
        return _decoded(self.dims)

    def type_names(self) -> Any:
        """`Input type` as a list of names, or None."""
        return _decoded(self.types)


def _decoded(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str | None = None
    name: str | None = None
    ts: int | float | str | None = None
    dur: int | float | str | None = None
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    args: Arguments | None = None


class Spans:
    """Events of one sort: columns; equal arguments are kept once."""

    def __init__(self) -> None:
        self._start, self._end, self._link = array("d"), array("d"), array("q")
        self._record, self._name, self._thread = array("q"), array("i"), array("i")
        self._detail = array("i")
        self._known: dict[Hashable, int] = {}
        self._details: list[Arguments] = []

    def add(self, start: float, end: float, name: int, thread: int, link: int, args: Arguments, keep: bool) -> None:
        """Append an event; `name` and `thread` are numbers of the trace's tables; `keep` all of `args` or only ids."""
        number = -1
        if keep:
            number = self._known.setdefault(args.key(), len(self._details))
            if number == len(self._details):
                self._details.append(args.detached())
        self._detail.append(number)
        self._record.append(whole_number(args.record if args.record is not None else args.external))
        self._start.append(start)
        self._end.append(end)
        self._name.append(name)
        self._thread.append(thread)
        self._link.append(link)

    def __len__(self) -> int:
        return len(self.start)

    def seal(self) -> None:
        """Sort by start (longest first where that is equal) and turn to numpy; nothing is added afterwards."""
        start, end = np.array(self._start), np.array(self._end)
        order = np.lexsort((-end, start))
        del self._start, self._end
        self.start: NDArray[np.float64] = start[order]
        self.end: NDArray[np.float64] = end[order]
        self.name: NDArray[np.int64] = np.array(self._name, dtype=np.int64)[order]
        self.thread: NDArray[np.int64] = np.array(self._thread, dtype=np.int64)[order]
        self.link: NDArray[np.int64] = np.array(self._link, dtype=np.int64)[order]
        self.record: NDArray[np.int64] = np.array(self._record, dtype=np.int64)[order]
        del self._link, self._record, self._name, self._thread
        self._number: NDArray[np.int64] = np.array(self._detail, dtype=np.int64)[order]
        del self._detail

    def detail(self, row: int) -> Arguments | None:
        """The arguments of an event, where they were kept."""
        number = int(self._number[row])
        return None if number < 0 else self._details[number]

    def detailed(self) -> list[int]:
        """The rows whose arguments were kept."""
        return [int(row) for row in np.flatnonzero(self._number >= 0)]


@dataclass
class Trace:
    """One rank's trace. `device` links to `launch` by correlation; the link of an operator is its sequence number."""

    path: Path
    rank: int | None = None
    workers: int | None = None
    names: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    device: Spans = field(default_factory=Spans)
    launch: Spans = field(default_factory=Spans)
    operator: Spans = field(default_factory=Spans)
    annotation: Spans = field(default_factory=Spans)
    origin_us: float = 0.0
    events: int = 0

    def named(self, spans: Spans, row: int) -> str:
        return self.names[int(spans.name[row])]


#: The operators by which gradients and collectives are found.
ACCUMULATE = "torch::autograd::AccumulateGrad"
COMMUNICATION = "record_param_comms"
COLLECTIVE_NAME = re.compile(r"(?:nccl|gloo|mpi|ucc|xccl):(\w+)")

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCH = {"cuda_runtime", "cuda_driver", "hip_runtime"}
_MISSING = -1


def read_trace(path: Path, progress: Progress | None = None) -> Trace:
    """Read one trace file; raises `FileError` when it is none, or holds an event that makes no sense."""
    trace, header = Trace(path), Header()
    names: dict[str, int] = {}
    threads: dict[str, int] = {}
    sorts = {"cpu_op": trace.operator, "user_annotation": trace.annotation}
    sorts |= dict.fromkeys(_DEVICE, trace.device) | dict.fromkeys(_LAUNCH, trace.launch)
    began = False
    for index, event in enumerate(events(path, _Event, header, progress)):
        trace.events += 1
        spans = sorts.get((event.cat or "").lower())
        if event.ph != "X" or spans is None:
            continue
        start, length = (_number(path, index, key, getattr(event, key)) for key in ("ts", "dur"))
        if length < 0:
            raise FileError(f"{path}: traceEvents[{index}].dur: {length} (expected at least 0)")
        if not began:
            trace.origin_us, began = start, True
        start = (start - trace.origin_us) * 1e-6
        name = names.setdefault(event.name or "", len(names))
        args = event.args or Arguments()
        sort = "launch" if spans is trace.launch else "device" if spans is trace.device else "host"
        if sort == "launch" and not _launches(event.name or ""):
            continue
        thread = threads.setdefault(str(args.stream if sort == "device" else event.tid), len(threads))
        link = whole_number(args.sequence if sort == "host" else args.correlation)
        spans.add(start, start + length * 1e-6, name, thread, link, args, _has_detail(event.name or "", args))
    trace.names, trace.threads = list(names), list(threads)
    for spans in (trace.device, trace.launch, trace.operator, trace.annotation):
        spans.seal()
    trace.rank = _positive(header.distributed.get("rank"))
    trace.workers = _positive(header.distributed.get("world_size"))
    return trace


def _launches(name: str) -> bool:
    return any(word in name for word in ("Launch", "Memcpy", "Memset", "launch"))


def _has_detail(name: str, args: Arguments) -> bool:
    if args.collective is not None or args.nbytes is not None:
        return True
    return bool(bytes(args.dims)) and (name in (ACCUMULATE, COMMUNICATION) or COLLECTIVE_NAME.match(name) is not None)


def _number(path: Path, index: int, key: str, value: Number) -> float:
    try:
        number = float(value if value is not None else "")
    except (ValueError, OverflowError):
        number = math.nan
    if not abs(number) < 1e18:
        found = "missing" if value is None else one_line(str(value), 40)
        raise FileError(f"{path}: traceEvents[{index}].{key}: {found} (expected a number of microseconds)")
    return number


def whole_number(value: Number) -> int:
    """A whole number that 63 bits hold, or -1."""
    try:
        number = int(value) if value is not None else _MISSING
    except (ValueError, OverflowError):
        return _MISSING
    return number if -(2**62) < number < 2**62 else _MISSING


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
