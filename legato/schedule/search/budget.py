"""Limits on how much a search may do: work, which is counted, and seconds, which are measured.

If seconds were the only limit, plans would depend on the machine and on what else runs there. So a search ends when it
has done a certain amount of work: each operation counts as the seconds that it takes on a current processor, however
long the operation takes on this machine. The same input then has the same plan everywhere. The limit in seconds is far
higher, for machines that are much slower or very busy; `cut` says whether this limit has ended the search.
"""

from __future__ import annotations

import math
import time

__all__ = ["Budget"]


class Budget:
    """The `work` (nominal seconds) that a search may still do, in at most `limit_s` measured seconds."""

    def __init__(self, work: float = math.inf, limit_s: float = math.inf) -> None:
        self.work = work
        self.cut = False
        self._stop_at = time.perf_counter() + limit_s
        self._parent: Budget | None = None

    def part(self, fraction: float) -> Budget:
        """Return a new budget with this fraction of the work that is left; its work is also taken from this budget."""
        part = Budget(self.work * fraction)
        part._stop_at, part._parent = self._stop_at, self
        return part

    def spend(self, work: float) -> None:
        """Subtract work that was done."""
        self.work -= work
        if self._parent is not None:
            self._parent.spend(work)

    @property
    def spent(self) -> bool:
        """Return whether the search must stop."""
        if self.work > 0 and time.perf_counter() > self._stop_at:
            self.cut = True
            if self._parent is not None:
                self._parent.cut = True
        return self.work <= 0 or self.cut
