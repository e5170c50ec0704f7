"""What a piece of a pass is made of: computing, and the communication beside and behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from legato.core.program import Operation

__all__ = ["Beside", "Exchange", "Work"]


class Exchange(NamedTuple):
    """A communication among the workers that differ only in these dimensions of the mesh (those of `Mesh.placements`).

    `nbytes` are those of a `Communication`; it is made `times` times in a row.
    """

    kind: str
    operation: Operation
    dimensions: tuple[str, ...]
    nbytes: float
    times: int = 1


class Beside(NamedTuple):
    """Exchanges, one after another, beside `seconds` of a piece of work's computing, from `after_s` of it on."""

    seconds: float
    exchanges: tuple[Exchange, ...]
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of a pass: computing, exchanges `beside` it, and those that the worker waits for `behind` it."""

    computing_s: float = 0.0
    beside: tuple[Beside, ...] = ()
    behind: tuple[Exchange, ...] = ()

    def and_then(self, other: Work) -> Work:
        """Both as one piece, whose exchanges have the computing of both."""
        return Work(self.computing_s + other.computing_s, self.beside + other.beside, self.behind + other.behind)

    def window_s(self, one: Beside) -> float:
        """The seconds of computing that exchanges can run beside."""
        return max(0.0, min(one.seconds, self.computing_s - one.after_s))
