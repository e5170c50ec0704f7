"""Fit a machine's efficiency to measured steps, and up to two other numbers if the steps determine them.

A higher efficiency of matrix products makes a step shorter. So each step determines one efficiency, which bisection
finds. With several steps that determine no other number, the median efficiency is used. If communication takes longer
than the computation that hides it, the step hardly depends on the efficiency, and cannot be used for fitting.

Two steps with different computing times per layer also determine the host's time for each layer and micro-batch. Steps
with different sequence lengths determine the efficiency of attention. A step's time is nearly linear in three numbers:
1 / efficiency, the host's time, and 1 / attention's efficiency. So a few rounds of least squares find all three
numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from legato.core.errors import InputError
from legato.core.job import Job, Machine
from legato.core.text import percent
from legato.core.units import format_seconds
from legato.whole_jobs.step import predict

__all__ = ["Fitted", "FittedStep", "fit"]

#: The lowest efficiency that the search tries, and the relative precision of its result.
_LEAST, _EXACT = 1e-3, 1e-9
#: Matrix products must take at least this share of a step. At this share, an error of 1% in the step's time causes an
#: error of 20% in the efficiency. In measured steps of large models, the share is 40 to 91%.
_LEAST_SHARE = 0.05


#: The numbers that steps may determine, in the order of `_Numbers`.
NUMBERS = ("efficiency", "host time", "attention's efficiency")
#: Steps determine a further number if two conditions hold. The ratio of the number's share of a step to the matrix
#: products' share varies by the factor `_DIFFERENT` among the steps, and the number's share is at least `_TOLD` in one
#: step. `_ROUNDS` is the most rounds of least squares.
_DIFFERENT, _TOLD, _ROUNDS = 1.5, 0.03, 12
#: A step is odd if its own fitted efficiency differs by this much from the efficiency fitted to all steps.
_ODD = 0.1


@dataclass(frozen=True, slots=True)
class FittedStep:
    """A measured step: the `efficiency` fitted only to this step, and the step's prediction after fitting all steps.

    If there are several steps, `left_out_s` is this step's prediction after fitting all other steps. An error of 1% in
    `measured_s` causes an error of 1% / `product_share` in `efficiency`.
    """

    job: Job
    measured_s: float
    efficiency: float
    product_share: float
    predicted_s: float
    left_out_s: float | None


class Fitted(NamedTuple):
    """The fitted `machine`, each measured step, the names of the fitted numbers, and the host's time in seconds."""

    machine: Machine
    steps: list[FittedStep]
    numbers: tuple[str, ...] = ("efficiency",)
    host_s: float = 0.0

    @property
    def odd(self) -> list[FittedStep]:
        """Return the steps whose own efficiency differs by more than 10% from the efficiency fitted to all steps."""
        return [one for one in self.steps if abs(one.efficiency / self.machine.efficiency - 1) > _ODD]


class _Numbers(NamedTuple):
    """The numbers in which a step's time is nearly linear; for a number that is None, jobs keep their own."""

    slowness: float
    host_s: float | None = None
    attention: float | None = None

    def of(self, job: Job) -> Job:
        machine, framework = replace(job.machine, efficiency=min(1.0, 1 / self.slowness)), job.framework
        if self.attention is not None:
            machine = replace(machine, attention_efficiency=min(1.0, 1 / self.attention))
        if self.host_s is not None:
            framework = replace(framework, host_s=self.host_s)
        return replace(job, machine=machine, framework=framework)


def fit(steps: Sequence[tuple[Job, float]]) -> Fitted:
    """Return the machine of all jobs after its efficiency (and up to two other numbers) has been fitted to the steps.

    Raises `InputError` if the machines differ in more than their efficiency, if a step needs an efficiency above 1 or
    below 0.001, or if a step hardly depends on the efficiency.
    """
    machine = steps[0][0].machine
    for job, _ in steps:
        if replace(job.machine, efficiency=1.0) != replace(machine, efficiency=1.0):
            raise InputError(f"{job.name}: another machine than {steps[0][0].name} has (expected one for all steps)")
    own = [1 / _efficiency(job, seconds) for job, seconds in steps]
    best = _numbers(steps, own)
    result = []
    for k, (job, seconds) in enumerate(steps):
        others, left_out_s = [*steps[:k], *steps[k + 1 :]], None
        if others:
            left_out_s = predict(_numbers(others, own[:k] + own[k + 1 :]).of(job)).seconds
        job_so = best.of(job)
        alone = _efficiency(job_so, seconds)
        share = _product_share(job_so, alone)
        result.append(FittedStep(job, seconds, alone, share, predict(job_so).seconds, left_out_s))
    told = tuple(name for name, value in zip(NUMBERS, best, strict=True) if value is not None)
    return Fitted(best.of(steps[0][0]).machine, result, told, best.host_s or 0.0)


def _numbers(steps: Sequence[tuple[Job, float]], own: list[float]) -> _Numbers:
    """Return the numbers that these steps determine; `own` has 1 / efficiency, fitted to each step alone."""
    one, attention = (
        _Numbers(1 / statistics.median(1 / each for each in own)),
        1 / steps[0][0].machine.attention_efficiency,
    )
    for start in (
        one._replace(host_s=0.0, attention=attention),
        one._replace(host_s=0.0),
        one._replace(attention=attention),
    ):
        if (found := _least_squares(steps, start)) is not None:
            return found
    return one


def _least_squares(steps: Sequence[tuple[Job, float]], numbers: _Numbers) -> _Numbers | None:
    """Return the numbers with the least relative errors, or None if these steps do not determine all of them."""
    names = [name for name, value in numbers._asdict().items() if value is not None]
    if len(steps) < len(names):
        return None
    for turn in range(_ROUNDS):
        predicted = [predict(numbers.of(job)).seconds for job, _ in steps]
        moves = {
            name: getattr(numbers, name) + (1e-4 if name == "host_s" else 1e-3 * getattr(numbers, name))
            for name in names
        }
        slopes = {
            name: [
                (predict(numbers._replace(**{name: to}).of(job)).seconds - now)
                / (to - getattr(numbers, name))
                / seconds
                for (job, seconds), now in zip(steps, predicted, strict=True)
            ]
            for name, to in moves.items()
        }
        if turn == 0 and not all(_told(slopes, name, moves, steps) for name in names[1:]):
            return None
        rest = [1 - now / seconds for (_, seconds), now in zip(steps, predicted, strict=True)]
        columns = np.array(list(slopes.values())).T
        scales = np.linalg.norm(columns, axis=0)
        solution, _, rank, _ = np.linalg.lstsq(columns / scales, np.array(rest), rcond=1e-6)
        if rank < len(names):
            return None
        change = (solution / scales).tolist()
        numbers = numbers._replace(
            **{name: getattr(numbers, name) + by for name, by in zip(names, change, strict=True)}
        )
        if numbers.slowness < 1 or (numbers.host_s or 0.0) < 0 or not 1 <= (numbers.attention or 1.0) <= 50:
            return None
        if max(abs(by) for by in change) < 1e-9:
            break
    return numbers


def _seconds(job: Job, efficiency: float) -> float:
    return predict(replace(job, machine=replace(job.machine, efficiency=efficiency))).seconds


def _product_share(job: Job, efficiency: float) -> float:
    """Return the share of a step that depends on the efficiency: predict the step with 1% more efficiency."""
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


def _told(
    slopes: dict[str, list[float]], name: str, moves: dict[str, float], steps: Sequence[tuple[Job, float]]
) -> bool:
    """Return whether the steps determine a number; `_DIFFERENT` and `_TOLD` explain the conditions."""
    host_s = 1e-3 if name == "host_s" else moves[name]  # the host's share if each layer took 1 ms
    ratios = [own / max(products, 1e-30) for own, products in zip(slopes[name], slopes["slowness"], strict=True)]
    return max(slopes[name]) * host_s >= _TOLD and max(ratios) >= _DIFFERENT * max(min(ratios), 0.0)
