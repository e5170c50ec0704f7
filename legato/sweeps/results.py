"""The rows of sweeps, in which axes differ and cells may fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from legato.core.axes import NETWORK, Axis
from legato.core.results import Results
from legato.core.table import Column

__all__ = ["Swept", "failures", "named"]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def named(inputs: Sequence[_Named]) -> list[str]:
    """Return the names of inputs; inputs with the same name are numbered."""
    names = [one.name for one in inputs]
    return [f"{name} {k + 1}" if names.count(name) > 1 else name for k, name in enumerate(names)]


class _Row(Protocol):
    @property
    def columns(self) -> dict[str, Any]: ...
    @property
    def parts(self) -> dict[str, float]: ...
    @property
    def axes(self) -> dict[str, Any]: ...
    @property
    def error(self) -> str | None: ...


Row = TypeVar("Row", bound=_Row)


class Swept(Results[Row]):
    """The rows of a sweep; each has its values of the axes of networks, by field."""

    @property
    def differing(self) -> list[Axis]:
        """Return the axes on which the rows have different values."""
        return [axis for axis in self._axes if len({row.axes[axis.field] for row in self}) > 1]

    @property
    def _axes(self) -> list[Axis]:
        return [axis for axis in NETWORK if self and axis.field in self[0].axes]

    def columns(self) -> Iterator[Column]:
        """Yield a column for each axis on which the rows differ."""
        for axis in self.differing:
            yield Column(axis.column, lambda row, field=axis.field: row.axes[field], axis.write)

    def in_common(self, *, usual: bool = True) -> list[str]:
        """Return in words the values that all rows have in common; without `usual`, leave out default values."""
        same = [(axis, self[0].axes[axis.field]) for axis in self._axes if axis.words and axis not in self.differing]
        return [axis.say(axis.write(value)) for axis, value in same if usual or value != axis.usual]

    @property
    def failures(self) -> list[str]:
        """Return a line for each reason why cells have no result."""
        return failures(self)


def failures(rows: Iterable[_Row]) -> list[str]:
    """Return a line for each reason why cells have no result."""
    errors = [row.error for row in rows if row.error is not None]
    return [f"{errors.count(error):,} failed: {error}" for error in dict.fromkeys(errors)]
