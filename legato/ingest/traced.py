"""What every importer makes of its trace: the steps of some ranks, and the result.

Times are seconds since the first event of the trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from legato.core.timeline import Timeline
from legato.core.workload import Phase, Workload

__all__ = ["Gradient", "Imported", "Notes", "RankMeasure", "TracedOp", "TracedTransfer"]


@dataclass(frozen=True)
class TracedOp:
    """One computation of a step.

    Before it the device stood idle for `gap_s`, for want of work, and for
    `stalled_s` while a transfer was under way that it may have needed.
    """

    name: str
    phase: Phase
    start_s: float
    end_s: float
    duration_s: float
    gap_s: float = 0.0
    stalled_s: float = 0.0
    deps: tuple[int, ...] | None = None  # None: the op before it


@dataclass(frozen=True)
class TracedTransfer:
    """One collective as it was seen: it began at `start_s`, `waited_s` of which the other ranks were late."""

    name: str
    kind: str
    nbytes: int | None
    start_s: float
    end_s: float
    phase: Phase
    carries_gradients: bool
    workers: int | None = None
    waited_s: float = 0.0
    after: int = -1  # the last op that began before it was issued


@dataclass(frozen=True)
class Gradient:
    """What becomes a tensor: `ready_after` and `readers` are indices of ops."""

    name: str
    nbytes: int
    ready_after: int
    readers: tuple[int, ...] | None = None  # None: not in the trace


@dataclass
class Notes:
    """What a trace does not say, and what was put in its place; each line once."""

    missing: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def lacks(self, missing: str, assumed: str | None = None) -> None:
        """Note a gap, and what was assumed to fill it."""
        if missing not in self.missing:
            self.missing.append(missing)
        if assumed is not None:
            self.assume(assumed)

    def assume(self, assumed: str) -> None:
        if assumed not in self.assumed:
            self.assumed.append(assumed)


@dataclass(frozen=True)
class RankMeasure:
    """What one rank's step showed (seconds).

    `computation_s` C and `communication_s` N are the times in which the device
    computes and the network carries; `waiting_s` is what collectives spent
    waiting for late ranks (None where one rank alone was given), `idle_s` the
    time in which the device had neither, and `exposed_comm_s` the
    communication under which nothing was computed. `overlap` (alpha), `rho` and
    `utilization` are those of TicTac and Caramel. `host_overlap` is alpha where
    the host's own time, in which the device has no work, counts as computation
    and waiting for late ranks not at all: the one that a plan can change.
    """

    rank: int
    step: str
    iteration_s: float
    computation_s: float
    communication_s: float
    waiting_s: float | None
    idle_s: float
    exposed_comm_s: float
    rho: float
    overlap: float
    utilization: float
    host_overlap: float


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    workload: Workload
    timeline: Timeline | None
    ranks: tuple[RankMeasure, ...]
    notes: Notes
