"""How much a search may do: work, which is counted, and seconds, which are measured.

A budget of seconds alone would make plans depend on the machine and on what else runs on
it. So what ends a search is work: each step counts as the seconds that it takes on a
processor of today, whatever it takes on this one. The same input then has the same plan
everywhere. Seconds are a limit far above, for machines that are much slower or very busy;
`cut` says whether they have ended the search.
"""

from __future__ import annotations

import math
import time

__all__ = ["Budget"]


class Budget:
    """`work` (nominal seconds) that is left, to be done within `limit_s` (seconds)."""

    def __init__(self, work: float = math.inf, limit_s: float = math.inf) -> None:
        self.work = work
        self.cut = False
        self._stop_at = time.perf_counter() + limit_s
        self._parent: Budget | None = None

    def part(self, fraction: float) -> Budget:
        """At most this fraction of what is left; what it spends, this one spends too."""
        part = Budget(self.work * fraction)
        part._stop_at, part._parent = self._stop_at, self
        return part

    def spend(self, work: float) -> None:
        """Count work that was done."""
        self.work -= work
        if self._parent is not None:
            self._parent.spend(work)

    @property
    def spent(self) -> bool:
        """Return whether to stop."""
        if self.work > 0 and time.perf_counter() > self._stop_at:
            self.cut = True
            if self._parent is not None:
                self._parent.cut = True
        return self.work <= 0 or self.cut
