"""A time that no wrapping can beat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from legato.fsdp.costs import Costs
from legato.fsdp.units import Precision, Unit

__all__ = ["WrappingBound", "lower_bound"]


class WrappingBound(NamedTuple):
    """No wrapping takes less than `seconds`."""

    seconds: float


def lower_bound(
    units: Sequence[Unit], costs: Costs, precision: Precision, memory_nbytes: int | None, *, node: int | None = None
) -> WrappingBound:
    """The computation of both passes."""
    return WrappingBound(sum(unit.forward_s + unit.backward_s for unit in units))
