"""Find the maximum of a smooth sequence: sample the sequence evenly, then refine around the best sample."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["coarse_to_fine"]


def coarse_to_fine(count: int, value: Callable[[int], float], *, first: int) -> int:
    """Return the index below `count` with the highest value found.

    Evaluates about `first` evenly spaced indices, then halves the spacing around the best index until the spacing is 1.
    The result is the exact maximum if the values rise and then fall, and a heuristic otherwise.
    """
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
