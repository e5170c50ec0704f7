"""Spans that lie over one another, laid out in rows that do not."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from legato.core.timeline import Span

__all__ = ["stack"]


def stack(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """(row, span) in order of start, so that no two spans of a row overlap, in as few rows as possible.

    First fit in order of start: the lowest row that is free again, which for
    intervals needs no more rows than spans overlap at once. Times count as
    equal when they round to the same nanosecond.
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
