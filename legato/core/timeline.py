"""What happened, or what would: spans of computation and communication."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from legato.core.errors import InputError
from legato.core.units import Int64

__all__ = ["Span", "SpanKind", "Timeline"]

#: Seconds; what is beyond overflows where it is multiplied.
_LATEST_S = 1e18

SpanKind = Literal["forward", "backward", "optimizer", "message"]


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that a worker's lane did from `start_s` to `end_s` (seconds).

    `nbytes` are the bytes of a message, None where nobody knows them.
    """

    worker: Int64
    lane: str
    name: str
    start_s: float
    end_s: float
    kind: SpanKind
    nbytes: Int64 | None = None

    def __post_init__(self) -> None:
        if not -_LATEST_S <= self.start_s <= self.end_s <= _LATEST_S:
            raise InputError(
                f"span {self.name!r}: {self.start_s} to {self.end_s} (expected start <= end, at most {_LATEST_S:.0e})"
            )
        if self.nbytes is not None and self.nbytes < 0:
            raise InputError(f"nbytes: {self.nbytes} (expected at least 0)")


class Timeline(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="format",
    tag="legato.timeline/1",
):
    """One iteration of training, as predicted by a simulation or as measured.

    The metrics are those of TicTac and Caramel, for the first worker: communication
    time N, computation time C, iteration time T (seconds). Where spans of one
    sort lie over one another (several messages in flight), the time that at
    least one of them covers counts once.
    """

    name: str
    source: Literal["predicted", "measured"]
    iteration_s: float
    spans: tuple[Span, ...]
    lower_bound_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.iteration_s <= _LATEST_S:
            raise InputError(f"iteration_s: {self.iteration_s} (expected 0 to {_LATEST_S:.0e} seconds)")

    def _covered(self, communication: bool) -> list[tuple[float, float]]:
        first = min((s.worker for s in self.spans), default=0)
        return merge_intervals(
            (s.start_s, s.end_s) for s in self.spans if s.worker == first and (s.kind == "message") == communication
        )

    @property
    def communication_s(self) -> float:
        """N: the time in which the network is busy."""
        return _length(self._covered(communication=True))

    @property
    def computation_s(self) -> float:
        """C: the time in which the worker computes."""
        return _length(self._covered(communication=False))

    @property
    def exposed_comm_s(self) -> float:
        """The time in which the network is busy and the worker is not."""
        busy, compute = self._covered(communication=True), self._covered(communication=False)
        return _length(merge_intervals(busy + compute)) - _length(compute)

    @property
    def overlap(self) -> float:
        """Overlap coefficient alpha = (N + C - T) / min(N, C); 0 where nothing can overlap."""
        return overlap_coefficient(self.communication_s, self.computation_s, self.iteration_s)

    @property
    def utilization(self) -> float:
        """U = C / T."""
        return self.computation_s / self.iteration_s if self.iteration_s > 0 else 1.0


def overlap_coefficient(communication_s: float, computation_s: float, iteration_s: float) -> float:
    """alpha = (N + C - T) / min(N, C), of times in seconds (TicTac, section 3.2); 0 where nothing can overlap."""
    least = min(communication_s, computation_s)
    return (communication_s + computation_s - iteration_s) / least if least > 0 else 0.0


def merge_intervals(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as sorted disjoint ones."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[tuple[float, float]]) -> float:
    return math.fsum(end - start for start, end in intervals)
