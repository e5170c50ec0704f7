"""The highest of many values of which neighbours are alike: every so many, then closer and closer around the best."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["highest"]


def highest(count: int, value: Callable[[int], float], *, first: int) -> int:
    """The index below `count` with the highest value of those tried; `first` of them before looking closer."""
    step = -(-count // first)
    tried = {k: value(k) for k in range(0, count, step)}
    while True:
        top = max(tried, key=tried.__getitem__)
        if step == 1:
            return top
        step = -(-step // 2)
        for k in (top - step, top + step):
            if 0 <= k < count and k not in tried:
                tried[k] = value(k)
