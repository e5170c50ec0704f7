"""One measured or predicted iteration: spans of computation and communication."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from legato.core.errors import InputError
from legato.core.text import one_line, shorten
from legato.core.units import Int64, format_bytes, format_seconds

__all__ = ["Span", "SpanKind", "Timeline"]

#: Seconds; larger values could overflow in later arithmetic.
_LATEST_S = 1e18

SpanKind = Literal["forward", "backward", "optimizer", "message"]


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """An op or a message in one of a worker's lanes, from `start_s` to `end_s` (seconds).

    `nbytes` is the size of a message, or None if it is unknown.
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
    """One iteration of training, predicted by a simulation or measured.

    The metrics are those of TicTac and Caramel, for the first worker:
    communication time N, computation time C, iteration time T (seconds). Time
    in which several messages are in flight counts once; so does time in which
    several ops run. `members` has (worker, number of workers with its times,
    itself included) for those that stand for others. `job` and `network` say in
    words what was trained where, if that is known, and `baseline` is the timeline
    of the plan with which this one is compared: that of DDP, on the same network.
    """

    name: str
    source: Literal["predicted", "measured"]
    iteration_s: float
    spans: tuple[Span, ...]
    lower_bound_s: float | None = None
    members: tuple[tuple[int, int], ...] = ()
    job: str = ""
    network: str = ""
    baseline: Timeline | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.iteration_s <= _LATEST_S:
            raise InputError(f"iteration_s: {self.iteration_s} (expected 0 to {_LATEST_S:.0e} seconds)")

    def __str__(self) -> str:
        """One line: the time of the iteration, and the metrics."""
        bound = "" if self.lower_bound_s is None else f", lower bound {format_seconds(self.lower_bound_s)}"
        return (
            f"{shorten(self.name)} ({self.source}): iteration {format_seconds(self.iteration_s)}{bound}, "
            f"computation {format_seconds(self.computation_s)}, "
            f"communication {format_seconds(self.communication_s)} ({format_seconds(self.exposed_comm_s)} exposed), "
            f"overlap {self.overlap:.2f}, utilization {self.utilization:.2f}"
        )

    def _repr_html_(self) -> str:
        """A picture for notebooks: the lanes of each worker, coloured by kind."""
        return _draw(self)

    def _covered(self, communication: bool) -> list[tuple[float, float]]:
        first = min((s.worker for s in self.spans), default=0)
        return merge_intervals(
            (s.start_s, s.end_s) for s in self.spans if s.worker == first and (s.kind == "message") == communication
        )

    @property
    def communication_s(self) -> float:
        """N: seconds in which the network is busy."""
        return _length(self._covered(communication=True))

    @property
    def computation_s(self) -> float:
        """C: seconds in which the worker computes."""
        return _length(self._covered(communication=False))

    @property
    def exposed_comm_s(self) -> float:
        """Seconds in which the network is busy and the worker is not."""
        busy, compute = self._covered(communication=True), self._covered(communication=False)
        return _length(merge_intervals(busy + compute)) - _length(compute)

    @property
    def overlap(self) -> float:
        """Overlap coefficient alpha = (N + C - T) / min(N, C); 0 if nothing can overlap."""
        return overlap_coefficient(self.communication_s, self.computation_s, self.iteration_s)

    @property
    def utilization(self) -> float:
        """U = C / T."""
        return self.computation_s / self.iteration_s if self.iteration_s > 0 else 1.0


def overlap_coefficient(communication_s: float, computation_s: float, iteration_s: float) -> float:
    """Return alpha = (N + C - T) / min(N, C) of times in seconds (TicTac, section 3.2); 0 if nothing can overlap."""
    least = min(communication_s, computation_s)
    return (communication_s + computation_s - iteration_s) / least if least > 0 else 0.0


def merge_intervals(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as sorted, disjoint intervals."""
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


_COLOURS: dict[str, str] = {"forward": "#2f6db5", "backward": "#e08a1e", "optimizer": "#9a4f96", "message": "#1b8a77"}
_LEFT, _WIDTH, _TOP, _ROW = 150, 800, 48, 24  # pixels: of the lanes' names, of the time axis, of the title, of a lane
_MOST_LANES = 64


def _draw(timeline: Timeline) -> str:
    """Draw the timeline as one SVG element, without scripts or external files."""
    lanes: dict[tuple[int, str], list[Span]] = {}
    for span in sorted(timeline.spans, key=lambda span: (span.worker, span.kind == "message", span.start_s)):
        lanes.setdefault((span.worker, span.lane), []).append(span)
    drawn = list(lanes.items())[:_MOST_LANES]
    begin = min((span.start_s for span in timeline.spans), default=0.0)
    ends = [timeline.iteration_s, timeline.lower_bound_s or 0.0, *(span.end_s for span in timeline.spans)]
    second = _WIDTH / ((max(ends) - min(begin, 0.0)) or 1.0)  # its pixels
    bottom = _TOP + _ROW * len(drawn)

    def x(seconds: float) -> float:
        return _LEFT + (seconds - min(begin, 0.0)) * second

    def text(at: float, y: float, content: str, anchor: str = "start", weight: str = "normal") -> str:
        style = f'text-anchor="{anchor}" font-weight="{weight}" fill="currentColor"'
        return f'<text x="{at:.1f}" y="{y:.1f}" {style}>{html.escape(one_line(content))}</text>'

    def line(seconds: float, dash: str) -> str:
        at = f'x1="{x(seconds):.1f}" x2="{x(seconds):.1f}" y1="{_TOP - 4}" y2="{bottom + 4}"'
        return f'<line {at} stroke="currentColor" stroke-dasharray="{dash}"/>'

    parts = [text(_LEFT, 16, f"{shorten(timeline.name)} ({timeline.source})", weight="bold")]
    parts.append(text(_LEFT + _WIDTH, 16, f"{format_seconds(timeline.iteration_s)} per iteration", "end", "bold"))
    for k, (kind, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<rect x="{_LEFT + 90 * k}" y="26" width="10" height="10" fill="{colour}"/>')
        parts.append(text(_LEFT + 90 * k + 14, 35, kind))
    for k, ((worker, lane), spans) in enumerate(drawn):
        top = _TOP + _ROW * k
        parts.append(text(_LEFT - 8, top + 16, f"worker {worker} {shorten(lane, 12)}", "end"))
        for first, last, count in _bars(spans, 0.5 / second):
            size = "" if first.nbytes is None else f", {format_bytes(first.nbytes)}"
            what = f"{shorten(first.name)}{size}" if count == 1 else f"{shorten(first.name)} and {count - 1} more"
            label = html.escape(f"{what}, {format_seconds(last.end_s - first.start_s)}")
            width = max((last.end_s - first.start_s) * second - 0.4, 0.3)
            place = f'x="{x(first.start_s):.1f}" y="{top + 2}" width="{width:.1f}" height="{_ROW - 4}"'
            parts.append(f'<rect {place} fill="{_COLOURS[first.kind]}" opacity=".85"><title>{label}</title></rect>')
    parts.append(line(timeline.iteration_s, "none"))
    parts.append(text(x(0.0), bottom + 20, "0", "middle"))
    if timeline.lower_bound_s is not None:
        bound = f"lower bound {format_seconds(timeline.lower_bound_s)}"
        parts += [line(timeline.lower_bound_s, "4 3"), text(x(timeline.lower_bound_s), bottom + 20, bound, "end")]
    if len(lanes) > len(drawn):
        parts.append(text(_LEFT, bottom + 36, f"and {len(lanes) - len(drawn)} more lanes"))
    box = f'viewBox="0 0 {_LEFT + _WIDTH + 20} {bottom + 44}" style="max-width: {_LEFT + _WIDTH + 20}px"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">{"".join(parts)}</svg>'
    )


def _bars(spans: Iterable[Span], narrow_s: float) -> list[tuple[Span, Span, int]]:
    """(first span, last span, how many): neighbours of one kind are one bar while it is narrower than `narrow_s`."""
    bars: list[tuple[Span, Span, int]] = []
    for span in spans:
        if bars and (first := bars[-1][0]).kind == span.kind and span.end_s - first.start_s < narrow_s:
            bars[-1] = (first, span, bars[-1][2] + 1)
        else:
            bars.append((span, span, 1))
    return bars
