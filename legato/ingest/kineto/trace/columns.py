"""The events of one step of a profiler trace, stored in columns.

[Note: events near a step] An event of the host belongs to the step during which it happens. An event of the device
belongs to the step in which the host launched it. The launch may be much earlier than the event, and the file has the
two in any order. However, a device queue holds only about a thousand launches. Therefore the launches and device events
nearest to the step are kept as well. Their number is larger than any queue, but fixed, so the memory does not grow with
the length of the trace.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Hashable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["NEAREST", "Arguments", "EventColumns", "Number", "rows_with", "whole_number"]

Number = int | float | str | None

#: The number of launches outside a step that are kept, and the number of device events.
NEAREST = 2**15
_MISSING = -1


class Arguments(msgspec.Struct):
    """The arguments of an event as written by profilers of any version: numbers and lists may also be text."""

    external: Number = msgspec.field(default=None, name="External id")
    old_external: Number = msgspec.field(default=None, name="external id")
    record: Number = msgspec.field(default=None, name="Record function id")
    sequence: Number = msgspec.field(default=None, name="Sequence number")
    correlation: Number = None
    stream: Number = None
    device: Any = None
    nbytes: Number = msgspec.field(default=None, name="bytes")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    old_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    elements: Number = msgspec.field(default=None, name="In msg nelems")
    results: Number = msgspec.field(default=None, name="Out msg nelems")
    ranks: Number = msgspec.field(default=None, name="Group size")
    group: Number = msgspec.field(default=None, name="Process Group Name")
    purpose: Number = msgspec.field(default=None, name="Process Group Description")
    members: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Process Group Ranks")
    first: Number = msgspec.field(default=None, name="Global rank start")
    stride: Number = msgspec.field(default=None, name="Global rank stride")
    receiver: Number = msgspec.field(default=None, name="Dst Rank")
    sender: Number = msgspec.field(default=None, name="Src Rank")
    dtype: str | None = None

    def __post_init__(self) -> None:
        if bytes(self.old_dims) and not bytes(self.dims):
            self.dims = self.old_dims
        self.external = self.old_external if self.external is None else self.external

    def detached(self) -> Arguments:
        """Return the same arguments without a reference to the block of the file from which they were decoded."""
        self.dims, self.types, self.old_dims = self.dims.copy(), self.types.copy(), msgspec.Raw()
        self.members = self.members.copy()
        return self

    def key(self) -> Hashable:
        """Return a key that is equal for arguments that differ only in their ids."""
        told = self.nbytes, self.collective, self.elements, self.results, self.ranks, self.dtype
        where = self.group, self.purpose, self.first, self.stride, self.receiver, self.sender
        return *told, *where, bytes(self.dims), bytes(self.types), bytes(self.members)

    def dimensions(self) -> Any:
        """Return `Input Dims` as lists of numbers, or None."""
        return _decoded(self.dims)

    def type_names(self) -> Any:
        """Return `Input type` as a list of names, or None."""
        return _decoded(self.types)

    def group_members(self) -> tuple[int, ...]:
        """Return the ranks of the process group, or () if the trace does not list all of them."""
        size, first, stride = (whole_number(value) for value in (self.ranks, self.first, self.stride))
        listed = _decoded(self.members)
        if isinstance(listed, str):  # the text of a long group ends in "...]"
            listed = [int(number) for number in re.findall(r"\d{1,9}", listed)]
        if isinstance(listed, list) and len(listed) == size and all(isinstance(rank, int) for rank in listed):
            return tuple(listed)
        return (
            tuple(range(first, first + size * stride, stride)) if first >= 0 and 0 < size < 2**20 > stride > 0 else ()
        )


def _decoded(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class EventColumns:
    """The events of one kind in columns; equal arguments are stored once.

    The columns keep all events that overlap the time from `start_s` to `end_s`. Outside that time, they keep the
    `nearest` events nearest to it (see the note above).
    """

    def __init__(self, start_s: float = -math.inf, end_s: float = math.inf, nearest: int = 0) -> None:
        self._from, self._to, self._nearest = start_s, end_s, nearest
        self._reach = math.inf if nearest else 0.0
        self._room = 2 * nearest
        self._start, self._end, self._link = array("d"), array("d"), array("q")
        self._record, self._name, self._thread = array("q"), array("i"), array("i")
        self._detail, self._external = array("i"), array("q")
        self._numbers: dict[Hashable, int] = {}
        self._details: list[Arguments] = []

    def wants(self, start: float, end: float) -> bool:
        """Return whether an event with these times has to be added."""
        return self._from - end <= self._reach and start - self._to <= self._reach

    def add(self, start: float, end: float, name: int, thread: int, link: int, args: Arguments, keep: bool) -> None:
        """Append an event. `name` and `thread` are indices in tables of names; `args` are stored only with `keep`."""
        number = -1
        if keep:
            number = self._numbers.setdefault(args.key(), len(self._details))
            if number == len(self._details):
                self._details.append(args.detached())
        self._detail.append(number)
        self._external.append(whole_number(args.external))
        self._record.append(whole_number(args.record if args.record is not None else args.external))
        self._start.append(start)
        self._end.append(end)
        self._name.append(name)
        self._thread.append(thread)
        self._link.append(link)
        if self._nearest and len(self._start) > self._room:
            self._drop_the_farthest()

    def _drop_the_farthest(self) -> None:
        start, end = np.array(self._start), np.array(self._end)
        distance = np.maximum(np.maximum(self._from - end, start - self._to), 0.0)
        outside = np.sort(distance[distance > 0])
        if len(outside) > self._nearest:
            self._reach = min(self._reach, float(outside[self._nearest - 1]))
        kept = np.flatnonzero(distance <= self._reach)
        for column in ("_start", "_end", "_link", "_record", "_external", "_name", "_thread", "_detail"):
            values: array[Any] = getattr(self, column)
            setattr(self, column, array(values.typecode, np.array(values)[kept].tobytes()))
        self._room = 2 * len(kept) + self._nearest

    def __len__(self) -> int:
        return len(self.start)

    def seal(self) -> None:
        """Sort events by start (on a tie, the longest first), and convert them to numpy. Later, none can be added."""
        start, end = np.array(self._start), np.array(self._end)
        order = np.lexsort((-end, start))
        del self._start, self._end
        self.start: NDArray[np.float64] = start[order]
        self.end: NDArray[np.float64] = end[order]
        self.name: NDArray[np.int64] = np.array(self._name, dtype=np.int64)[order]
        self.thread: NDArray[np.int64] = np.array(self._thread, dtype=np.int64)[order]
        self.link: NDArray[np.int64] = np.array(self._link, dtype=np.int64)[order]
        self.record: NDArray[np.int64] = np.array(self._record, dtype=np.int64)[order]
        self.external: NDArray[np.int64] = np.array(self._external, dtype=np.int64)[order]
        del self._link, self._record, self._external, self._name, self._thread
        self._number: NDArray[np.int64] = np.array(self._detail, dtype=np.int64)[order]
        del self._detail

    def repeats(self) -> NDArray[np.bool_]:
        """Return which events are repeats: all but one event of each set of events that differ only in arguments."""
        columns = self.link, self.thread, self.name, self.end, self.start
        order, found = np.lexsort(columns), np.zeros(len(self), np.bool_)
        found[order[1:]] = np.all([np.diff(column[order]) == 0 for column in columns], axis=0)
        return found

    def drop(self, rows: NDArray[np.bool_]) -> int:
        """Drop the events of these rows, and return how many."""
        for name in ("start", "end", "name", "thread", "link", "record", "external", "_number"):
            setattr(self, name, getattr(self, name)[~rows])
        return int(rows.sum())

    def end_in_turn(self) -> int:
        """Cut each event that outlasts its thread's next event where that event starts; return the number of cuts."""
        count = 0
        for thread in np.unique(self.thread):
            rows = np.flatnonzero(self.thread == thread)
            each, after = rows[:-1], rows[1:]
            endless = (self.end[each] > self.end[after]) & (self.start[each] < self.start[after])
            self.end[each[endless]] = self.start[after[endless]]
            count += int(endless.sum())
        return count

    def detail(self, row: int) -> Arguments | None:
        """Return the arguments of an event, or None if they were not stored."""
        number = int(self._number[row])
        return None if number < 0 else self._details[number]

    def describe(self, row: int, args: Arguments) -> None:
        """Store arguments for an event that has none in the profiler's trace."""
        self._number[row] = len(self._details)
        self._details.append(args)

    def detailed(self) -> list[int]:
        """Return the rows whose arguments are stored."""
        return [int(row) for row in np.flatnonzero(self._number >= 0)]


def rows_with(numbers: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each wanted number, a row that has this number; -1 if no row has it, or if the number is negative."""
    if not len(numbers):
        return np.full(len(wanted), -1)
    order = np.argsort(numbers, kind="stable")
    at = order[np.searchsorted(numbers[order], wanted).clip(max=len(order) - 1)]
    return np.where((numbers[at] == wanted) & (wanted >= 0), at, -1)


def whole_number(value: Number) -> int:
    """Return the value as an integer of at most 62 bits, or -1."""
    try:
        number = int(value) if value is not None else _MISSING
    except (ValueError, OverflowError):
        return _MISSING
    return number if -(2**62) < number < 2**62 else _MISSING
