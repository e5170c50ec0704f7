"""A machine's efficiency from measured steps: the one number of a prediction that no data sheet has.

The higher the efficiency of matrix products, the shorter the step of a job, so one step has one efficiency, which is
found by bisection. Of several steps the median counts. Where communication takes longer than the computing beside it,
a step hardly depends on the efficiency, and cannot fit it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from legato.core.errors import InputError
from legato.core.job import Job, Machine
from legato.core.text import percent
from legato.core.units import format_seconds
from legato.whole_jobs.step import predict

__all__ = ["FittedStep", "fit"]

#: The lowest efficiency that is looked for, and the relative precision of what is found.
_LEAST, _EXACT = 1e-3, 1e-9
#: The least share of a step that products must take: an error of 1% in the step is then one of 20% in the efficiency.
#: In measured steps of large models it is 40 to 91%.
_LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class FittedStep:
    """A measured step: the `efficiency` that it has alone, its prediction with that of all steps, and, if there are
    others, with that of the others (`left_out_s`).

    An error of 1% in `measured_s` is one of 1% / `product_share` in `efficiency`.
    """

    job: Job
    measured_s: float
    efficiency: float
    product_share: float
    predicted_s: float
    left_out_s: float | None


def fit(steps: Sequence[tuple[Job, float]]) -> tuple[Machine, list[FittedStep]]:
    """The machine of these jobs with the efficiency that their measured seconds have in the median, and each step.

    Raises `InputError` if the machines differ in more than their efficiency, or if a step is faster than with an
    efficiency of 1, or slower than with one of 0.001, or hardly depends on it.
    """
    machine = steps[0][0].machine
    for job, _ in steps:
        if replace(job.machine, efficiency=1.0) != replace(machine, efficiency=1.0):
            raise InputError(f"{job.name}: another machine than {steps[0][0].name} has (expected one for all steps)")
    found = [_efficiency(job, seconds) for job, seconds in steps]
    fitted = replace(machine, efficiency=statistics.median(found))
    result = []
    for k, (job, seconds) in enumerate(steps):
        others = found[:k] + found[k + 1 :]
        left_out_s = _seconds(job, statistics.median(others)) if others else None
        share, predicted_s = _product_share(job, found[k]), _seconds(job, fitted.efficiency)
        result.append(FittedStep(job, seconds, found[k], share, predicted_s, left_out_s))
    return fitted, result


def _seconds(job: Job, efficiency: float) -> float:
    return predict(replace(job, machine=replace(job.machine, efficiency=efficiency))).seconds


def _product_share(job: Job, efficiency: float) -> float:
    """The share of a step that shrinks as the efficiency grows by a hundredth (from one above 0.99: to 1)."""
    low, high = min(efficiency, 0.99), min(efficiency, 0.99) * 1.01
    share = (1 - _seconds(job, high) / _seconds(job, low)) / (1 - low / high)
    if share < _LEAST_SHARE:
        raise InputError(
            f"{job.name}: a step of which matrix products take {percent(max(0.0, share))} (expected at least "
            f"{percent(_LEAST_SHARE)}: this step says little about the efficiency, for it waits for something else)"
        )
    return share


def _efficiency(job: Job, measured_s: float) -> float:
    if not (math.isfinite(measured_s) and measured_s > 0):
        raise InputError(f"{job.name}: a step of {measured_s} s (expected a finite number above 0)")
    if measured_s < (fastest_s := _seconds(job, 1.0)):
        raise InputError(
            f"{job.name}: a step of {format_seconds(measured_s)} (expected at least {format_seconds(fastest_s)}, the "
            "time with an efficiency of 1: is the job, or what the framework hides, another one?)"
        )
    if measured_s > (slowest_s := _seconds(job, _LEAST)):
        raise InputError(
            f"{job.name}: a step of {format_seconds(measured_s)} (expected at most {format_seconds(slowest_s)}, the "
            f"time with an efficiency of {_LEAST:g})"
        )
    low, high = _LEAST, 1.0
    while high - low > _EXACT * high:
        middle = (low + high) / 2
        if _seconds(job, middle) > measured_s:
            low = middle
        else:
            high = middle
    return high
