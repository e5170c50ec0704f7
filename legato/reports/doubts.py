"""Reasons to doubt a measurement: measured times that contradict the calibration, or that vary too much."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from legato.core.text import percent

__all__ = ["doubts", "spread"]

#: A measured time contradicts a lower bound if the time is below the bound by more than this share. On quiet machines,
#: predictions are about 1% off (docs/rehearsal.md), and the bound is computed from the same costs.
_BELOW = 0.02
#: The largest `spread` of iterations on a quiet machine.
_SPREAD = 0.1
#: The fewest iterations for which quartiles are computed.
_FEWEST = 4


def spread(seconds: Sequence[float]) -> float:
    """Return the distance between the quartiles as a share of the median; a few slow iterations do not change it."""
    if len(seconds) < _FEWEST:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0


def doubts(measured: Mapping[str, Sequence[float]], bounds: Mapping[str, float]) -> list[str]:
    """Return one sentence for each reason to doubt these iterations and lower bounds, which are in seconds by plan."""
    found = []
    below = {n: 1 - statistics.median(measured[n]) / bound for n, bound in bounds.items() if bound > 0}
    below = {name: share for name, share in below.items() if share > _BELOW}
    if below:
        found.append(
            f"the calibration cannot be right, because measured iterations ({', '.join(below)}) are up to "
            f"{percent(max(below.values()), 0)} below the lower bound: the machine was busy while calibrating; run it "
            "again"
        )
    spreads = {name: spread(seconds) for name, seconds in measured.items()}
    wide = max(spreads, key=lambda name: spreads[name], default="")
    if wide and spreads[wide] > _SPREAD:
        found.append(
            f"the machine was busy while measuring: the distance between the quartiles of the iterations of {wide} is "
            f"{percent(spreads[wide], 0)} of their median (at most {percent(_SPREAD, 0)} on a quiet machine); run it "
            "again"
        )
    return found
