"""One measured or predicted iteration: spans of computation and communication."""

from __future__ import annotations

import heapq
import html
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from legato.core.errors import InputError
from legato.core.intervals import Intervals
from legato.core.text import count, one_line, shorten
from legato.core.units import Int64, format_bytes, format_seconds

__all__ = ["Bar", "Span", "SpanKind", "Timeline", "coalesce", "draw", "stack"]

#: The largest time in seconds. Larger values could overflow in later arithmetic.
_LATEST_S = 1e18

SpanKind = Literal["forward", "backward", "optimizer", "message"]


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The time of an op or a message, from `start_s` to `end_s` (seconds); reports draw it in the `lane` of a worker.

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


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="legato.timeline/1"):
    """One iteration of training, predicted by a simulation or measured.

    The metrics are defined as in TicTac and Caramel. These definitions use the communication time N and the computation
    time C of the first worker, and the iteration time T, in seconds. Unlike TicTac's coefficient, `overlap` does not
    count time in which neither communication nor computation runs. Time in which several messages are in flight counts
    once, and so does time in which several ops run. If several workers have equal times, the timeline has only one of
    these workers. For each worker in the timeline, `members` then has the worker's number, and the number of workers
    that have the same times (with this worker). `job` and `network` describe, if known, the job and the network in
    words. `baseline` is the timeline of the plan with which this plan is compared, usually DDP's on the same network.
    If `name` equals `job`, the timeline shows one of several jobs on one network, and reports draw the times of all
    these jobs from a common start. If `whole` is true, workers do different work, like the stages of a pipeline, and
    reports draw all workers.
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
    whole: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.iteration_s <= _LATEST_S:
            raise InputError(f"iteration_s: {self.iteration_s} (expected 0 to {_LATEST_S:.0e} seconds)")

    def __str__(self) -> str:
        """Return one line: the time of the iteration, and the metrics."""
        bound = "" if self.lower_bound_s is None else f", lower bound {format_seconds(self.lower_bound_s)}"
        return (
            f"{shorten(self.name)} ({self.source_in_words}): {format_seconds(self.iteration_s)}{bound}, "
            f"computation {format_seconds(self.computation_s)}, "
            f"communication {format_seconds(self.communication_s)} ({format_seconds(self.exposed_comm_s)} exposed), "
            f"overlap {self.overlap:.2f}, utilization {self.utilization:.2f}"
        )

    def _repr_html_(self) -> str:
        """Return a picture for notebooks: the lanes of each worker, below the lanes of the baseline."""
        return draw([self] if self.baseline is None else [self.baseline, self])

    def drawn(self) -> tuple[Timeline, ...]:
        """Return the timelines to draw: one for each distinct worker of a `whole` job, or else only this timeline."""
        if not self.whole:
            return (self,)
        alike = dict(self.members)
        return tuple(
            msgspec.structs.replace(
                self,
                name=f"GPU {worker}" + (f", 1 of {alike[worker]:,} alike" if alike.get(worker, 1) > 1 else ""),
                spans=tuple(span for span in self.spans if span.worker == worker),
                members=(),
            )
            for worker in sorted({span.worker for span in self.spans})
        )

    @property
    def source_in_words(self) -> str:
        """Return `predicted` or `one measured iteration` (other iterations may have taken more or less time)."""
        return "one measured iteration" if self.source == "measured" else self.source

    def _covered(self, *, communication: bool) -> Intervals:
        first = min((s.worker for s in self.spans), default=0)
        return Intervals(
            (s.start_s, s.end_s) for s in self.spans if s.worker == first and (s.kind == "message") == communication
        )

    @property
    def communication_s(self) -> float:
        """Return N: the seconds in which the network is busy."""
        return self._covered(communication=True).seconds

    @property
    def computation_s(self) -> float:
        """Return C: the seconds in which the worker computes."""
        return self._covered(communication=False).seconds

    @property
    def exposed_comm_s(self) -> float:
        """Return the seconds in which the network is busy and the worker computes nothing."""
        return self._covered(communication=True).beyond(self._covered(communication=False))

    @property
    def overlap(self) -> float:
        """Return the overlap: the time in which network and worker are both busy, divided by the lesser of N and C."""
        return self._covered(communication=True).overlap(self._covered(communication=False))

    @property
    def utilization(self) -> float:
        """Return the utilization U = C / T."""
        return self.computation_s / self.iteration_s if self.iteration_s > 0 else 1.0


def overlap_coefficient(communication_s: float, computation_s: float, iteration_s: float) -> float:
    """Return alpha = (N + C - T) / min(N, C) of times in seconds (TicTac, section 3.2); 0 if nothing can overlap."""
    least = min(communication_s, computation_s)
    return (communication_s + computation_s - iteration_s) / least if least > 0 else 0.0


def stack(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Return (row, span) in order of start; spans in a row do not overlap, and there are as few rows as possible.

    Each span gets the lowest free row. Since spans get rows in order of start, there are only as many rows as there are
    spans at the busiest moment. Times that round to the same nanosecond count as equal.
    """
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    placed = []
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        start = round(span.start_s * 1e9)
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (max(round(span.end_s * 1e9), start), row))
        placed.append((row, span))
    return placed


class Bar(msgspec.Struct):
    """A bar that is drawn for `count` spans of a row; its times are in seconds."""

    start_s: float
    end_s: float
    name: str
    kind: str
    nbytes: int = 0
    count: int = 1


def coalesce(spans: Iterable[Span], finest_s: float) -> list[Bar]:
    """Return the bars for the spans of a row, in order of start; spans shorter than `finest_s` may share a bar.

    Two spans are joined only if the gap between them is less than `finest_s`, so that longer gaps stay visible. Spans
    of different kinds are joined while the bar is shorter than `finest_s`; the kind with the most time in a bar
    determines its colour.
    """
    bars: list[Bar] = []
    busy: dict[str, float] = {}  # seconds by kind in the last bar, while spans can still join it
    for span in spans:
        seconds = span.end_s - span.start_s
        last = bars[-1] if busy and seconds < finest_s else None
        if (
            last
            and span.start_s - last.end_s < finest_s
            and (last.end_s - last.start_s < finest_s or busy.keys() == {span.kind})
        ):
            busy[span.kind] = busy.get(span.kind, 0.0) + seconds
            last.end_s, last.count = max(last.end_s, span.end_s), last.count + 1
            last.nbytes += span.nbytes or 0
            last.kind = max(busy, key=lambda kind: busy[kind])
        else:
            bars.append(Bar(span.start_s, span.end_s, span.name, span.kind, span.nbytes or 0))
            busy = {span.kind: seconds} if seconds < finest_s else {}
    return bars


#: Colours of pictures in notebooks, which must be legible on light and on dark backgrounds.
_COLOURS: dict[str, str] = {"backward": "#e08a1e", "forward": "#2f6db5", "optimizer": "#9a4f96", "message": "#1b8a77"}
# in pixels: the width of the lanes' names, the width of the time axis, the height of a lane
_LEFT, _WIDTH, _LANE = 150, 800, 24
_MOST_LANES, _MOST_ROWS = 16, 10
_FINE_ROWS = 20  # with more rows, bars are at least longer than a pixel, which limits a picture to 16,000 bars


def draw(timelines: Sequence[Timeline], title: str = "") -> str:
    """Return the timelines below each other on one time axis, as one SVG element without scripts or external files.

    If a `title` is given, it replaces the name above each timeline. If a timeline has many lanes, only the first are
    drawn, and a line says how many are left out.
    """
    first = min([0.0, *(span.start_s for timeline in timelines for span in timeline.spans)])
    ends = [end for t in timelines for end in (t.iteration_s, t.lower_bound_s or 0.0, *(s.end_s for s in t.spans))]
    second = _WIDTH / ((max(ends) - first) or 1.0)  # pixels per second
    parts = []
    for k, (kind, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<rect x="{_LEFT + 90 * k}" y="6" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(_LEFT + 90 * k + 14, 15, kind))
    top = 40.0
    for timeline in timelines:
        drawn, height = _draw_lanes(timeline, title or _title(timeline), top, first, second)
        parts += drawn
        top += height
    box = f'viewBox="0 0 {_LEFT + _WIDTH + 20} {top:.0f}" style="max-width: {_LEFT + _WIDTH + 20}px"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">{"".join(parts)}</svg>'
    )


def _title(timeline: Timeline) -> str:
    network = f" on {timeline.network}" if timeline.network else ""
    job = f": {timeline.job}{network}" if timeline.job and timeline.job != timeline.name else network
    return f"{shorten(timeline.name)} ({timeline.source_in_words}){shorten(job, 90)}"


def _lanes(timeline: Timeline) -> list[tuple[str, list[list[Span]]]]:
    """Return the name of each lane and its spans in rows; if there are too many rows, spans overlap in the last row."""
    lanes: dict[tuple[int, str], list[Span]] = {}
    for span in sorted(timeline.spans, key=lambda span: (span.worker, span.kind == "message", span.start_s)):
        lanes.setdefault((span.worker, span.lane), []).append(span)
    found = []
    for (worker, lane), spans in lanes.items():
        rows: dict[int, list[Span]] = {}
        for row, span in stack(spans):
            rows.setdefault(min(row, _MOST_ROWS - 1), []).append(span)
        found.append((f"worker {worker} {shorten(lane, 12)}", [rows[row] for row in sorted(rows)]))
    return found


def _draw_lanes(timeline: Timeline, title: str, top: float, first: float, second: float) -> tuple[list[str], float]:
    """Return a drawing of a timeline below `top` (pixels), and its height; the left edge is at the time `first` (s)."""
    lanes = _lanes(timeline)
    finest_s = max(1.0, sum(len(rows) for _, rows in lanes[:_MOST_LANES]) / _FINE_ROWS) / second
    parts = [_text(_LEFT, top, title, weight="bold")]
    parts.append(_text(_LEFT + _WIDTH, top, format_seconds(timeline.iteration_s), "end", "bold"))
    bottom = top + 8
    for name, rows in lanes[:_MOST_LANES]:
        parts.append(_text(_LEFT - 8, bottom + 16, name, "end"))
        height = (_LANE - 4) / len(rows)
        for k, row in enumerate(rows):
            parts += _bars(row, bottom + 2 + k * height, height, finest_s, first, second)
        bottom += _LANE
    marks = [(timeline.iteration_s, "none")]
    marks += [] if timeline.lower_bound_s is None else [(timeline.lower_bound_s, "4 3")]
    for seconds, dash in marks:
        x = f"{_LEFT + (seconds - first) * second:.1f}"
        at = f'x1="{x}" x2="{x}" y1="{top + 4:.0f}" y2="{bottom + 4:.0f}"'
        parts.append(f'<line {at} stroke="currentColor" stroke-dasharray="{dash}"/>')
    if timeline.lower_bound_s is not None:
        bound = f"lower bound {format_seconds(timeline.lower_bound_s)}"
        parts.append(_text(_LEFT + (timeline.lower_bound_s - first) * second, bottom + 18, bound, "end"))
    if len(lanes) > _MOST_LANES:
        parts.append(_text(_LEFT, bottom + 18, f"and {count(len(lanes) - _MOST_LANES, 'more lane')}"))
    return parts, bottom + 44 - top


def _bars(
    row: Sequence[Span], top: float, height: float, finest_s: float, first: float, second: float
) -> Iterator[str]:
    for k, bar in enumerate(coalesce(row, finest_s)):
        size = f", {format_bytes(bar.nbytes)}" if bar.nbytes else ""
        more = f" and {bar.count - 1} more" if bar.count > 1 else ""
        title = f"{shorten(bar.name)}{more}{size}, {format_seconds(bar.end_s - bar.start_s)}"
        place = f'x="{_LEFT + (bar.start_s - first) * second:.1f}" y="{top:.1f}"'
        width = max((bar.end_s - bar.start_s) * second, 0.4)
        shape = f'width="{width:.1f}" height="{height:.1f}" fill="{_COLOURS[bar.kind]}"'
        # neighbours have different shades, because they would otherwise look like one bar
        shade = f'opacity="{0.75 if k % 2 else 1}"'
        yield f"<rect {place} {shape} {shade}><title>{_escape(title)}</title></rect>"


def _text(x: float, y: float, content: str, anchor: str = "start", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="currentColor"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{_escape(content)}</text>'


def _escape(content: str) -> str:
    return html.escape(one_line(content))
