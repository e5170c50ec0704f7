"""How bounds are found of which it is only known whether a time is too short, as of "nested", "sides" and "gathers"."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Relaxation", "longest_too_short"]


class Relaxation(Protocol):
    """What every schedule fulfils, and perhaps other things, too."""

    def fits(self, seconds: float) -> bool:
        """Whether an iteration may take this long; if it may, it may take longer as well."""
        ...


def longest_too_short(problem: Relaxation, at_least_s: float, *, step: float, exact: float) -> float | None:
    """The longest time found in which nothing fits, or None if none above `at_least_s` is.

    `step` is the relative size of the first step, and `exact` the relative precision.
    """
    short, step_s = at_least_s, step * at_least_s
    if problem.fits(short):
        return None
    while not problem.fits(short + step_s):
        short, step_s = short + step_s, 2 * step_s
    while step_s > exact * short:
        step_s /= 2
        if not problem.fits(short + step_s):
            short += step_s
    return short if short > at_least_s else None
