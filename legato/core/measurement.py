"""Measurements of several plans that take turns in one training run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from legato.core.errors import InputError
from legato.core.units import Int64

__all__ = ["MeasuredPlan", "Measurement"]

#: The largest time in seconds. Larger values could overflow in later arithmetic.
_LONGEST_S = 1e18


class MeasuredPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured iteration times of one plan, in seconds: their median `measured_s` and their quartiles.

    `predicted_s` and `lower_bound_s` are None if nothing was predicted.
    """

    scheduler: str
    measured_s: float
    quartiles_s: tuple[float, float]
    iterations: Int64
    predicted_s: float | None = None
    lower_bound_s: float | None = None
    num_messages: Int64 | None = None

    def __post_init__(self) -> None:
        low, high = self.quartiles_s
        if not 0 <= low <= self.measured_s <= high <= _LONGEST_S:
            raise InputError(
                f"measured_s: {self.measured_s}, quartiles {low} to {high} (expected seconds, in order, at least 0)"
            )
        for field in ("predicted_s", "lower_bound_s"):
            value = getattr(self, field)
            if value is not None and not 0 <= value <= _LONGEST_S:
                raise InputError(f"{field}: {value} (expected 0 to {_LONGEST_S:.0e} seconds)")

    @classmethod
    def of(cls, scheduler: str, seconds: Sequence[float], **more: Any) -> MeasuredPlan:
        """Return a measured plan from its iteration times `seconds`; `more` has the fields that are not times."""
        middle = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, method="inclusive") if len(seconds) > 1 else [middle] * 3
        return cls(scheduler, middle, (min(low, middle), max(high, middle)), len(seconds), **more)

    @property
    def error(self) -> float | None:
        """Return the relative error of the prediction (predicted / measured - 1), or None without a prediction."""
        return None if self.predicted_s is None or not self.measured_s else self.predicted_s / self.measured_s - 1


class Measurement(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="legato.measurement/1"
):
    """A measurement by `legato rehearse` or `legato verify`: each plan's times, and a description of job and network.

    The plans took turns, so their times can be compared. `doubts` are sentences with reasons to doubt the measurement,
    such as other work on the machine.
    """

    job: str
    network: str
    plans: tuple[MeasuredPlan, ...]
    doubts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.plans:
            raise InputError("plans: none given (expected at least one)")
