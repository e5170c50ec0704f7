"""A piece of a pass: computing, and the communication during and after the computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from legato.core.program import Operation

__all__ = ["Beside", "Exchange", "Work"]


class Exchange(NamedTuple):
    """A communication in groups of workers that differ only in `dimensions` of the mesh (as in `Mesh.placements`).

    `nbytes` counts as in `Communication`. The exchange runs `times` times in a row.
    """

    kind: str
    operation: Operation
    dimensions: tuple[str, ...]
    nbytes: float
    times: int = 1


class Beside(NamedTuple):
    """Successive exchanges that can run during `seconds` of computing, from `after_s` seconds of computing on."""

    seconds: float
    exchanges: tuple[Exchange, ...]
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of a pass: computing, exchanges during this computing (`beside`), and exchanges after it (`behind`)."""

    computing_s: float = 0.0
    beside: tuple[Beside, ...] = ()
    behind: tuple[Exchange, ...] = ()

    def and_then(self, other: Work) -> Work:
        """Return both pieces as one piece of work, in which exchanges can run during the computing of both pieces."""
        return Work(self.computing_s + other.computing_s, self.beside + other.beside, self.behind + other.behind)

    def window_s(self, one: Beside) -> float:
        """Return the seconds of computing during which these exchanges can run."""
        return max(0.0, min(one.seconds, self.computing_s - one.after_s))
