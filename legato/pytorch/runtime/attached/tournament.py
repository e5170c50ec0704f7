"""A tournament of plans: they take turns in training, and the one that is measured fastest stays.

docs/runtime.md has the rules. All ranks exchange their medians after each round, so all of them
draw the same conclusions from the same numbers. Plans are compared round by round, so what slows
the machine down for a while slows all of them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from legato.core.plan import Plan
from legato.pytorch.recording.clock import DeviceClock, HostClock

__all__ = ["Measured", "Tournament"]

#: Number of rounds.
FEWEST_ROUNDS, MOST_ROUNDS = 4, 8
#: Timed steps of a turn: as many as take `TURN_S` seconds, within these limits.
FEWEST_STEPS, MOST_STEPS = 4, 100
TURN_S = 0.2
#: Plans whose times differ by no more than this fraction are equal.
SAME = 0.005


class Measured(NamedTuple):
    """What was measured of a plan: the median of its turns in seconds per step, and the number of timed steps."""

    seconds: float
    steps: int


class Tournament:
    """Lets plans take turns. They come in the order in which they win among equals: the simplest first.

    `plan` is the plan of the current step; at the end, it is the winner.
    `gather(numbers)` exchanges numbers among the ranks, and returns all of them
    in the order of the ranks.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        gather: Callable[[Sequence[float]], Sequence[Sequence[float]]],
        clock: HostClock | DeviceClock,
    ) -> None:
        self.plan = plans[0]
        self.plans, self._gather, self._clock = tuple(plans), gather, clock
        self._rounds: list[list[float]] = [[] for _ in plans]  # seconds per step of each plan, round by round
        self._contestants = list(range(len(plans)))
        self._steps = FEWEST_STEPS
        self._played = self._play()

    def step_begins(self) -> bool:
        """Call this at the beginning of each step on all ranks; returns whether the tournament goes on."""
        return next(self._played, False)

    @property
    def measured(self) -> dict[str, Measured]:
        """What was measured, by the names of the plans' schedulers."""
        return {
            plan.scheduler: Measured(statistics.median(rounds), self._steps * len(rounds))
            for plan, rounds in zip(self.plans, self._rounds, strict=True)
            if rounds
        }

    def _play(self) -> Generator[bool, None, None]:
        if len(self.plans) == 1:
            return
        trial_s = yield from self._turn(self.plan)
        (slowest_s,) = self._slowest([trial_s])
        self._steps = min(MOST_STEPS, max(FEWEST_STEPS, math.ceil(TURN_S / max(slowest_s, 1e-9))))
        for number in range(MOST_ROUNDS):
            yield from self._round(backwards=bool(number % 2))
            if number + 1 >= FEWEST_ROUNDS:
                self._contestants = [i for i in self._contestants if min(self._ratios(i)) <= 1 + SAME]
                if max(self._ratios(self._contestants[0])) <= 1 + 2 * SAME:
                    break
        self.plan = self.plans[next(i for i in self._contestants if self._is_as_fast(i))]

    def _round(self, backwards: bool) -> Generator[bool, None, None]:
        medians = dict.fromkeys(self._contestants, 0.0)
        for i in reversed(self._contestants) if backwards else self._contestants:
            medians[i] = yield from self._turn(self.plans[i])
        for i, seconds in zip(medians, self._slowest(list(medians.values())), strict=True):
            self._rounds[i].append(seconds)

    def _turn(self, plan: Plan) -> Generator[bool, None, float]:
        """Let a plan have its turn; return the median seconds per step."""
        self.plan = plan
        yield True
        marks = []
        for _ in range(self._steps):
            marks.append(self._clock.now())
            yield True
        marks.append(self._clock.now())
        self._clock.settle()
        return statistics.median(self._clock.seconds(a, b) for a, b in itertools.pairwise(marks))

    def _slowest(self, seconds: Sequence[float]) -> list[float]:
        """The maxima over all ranks."""
        return [max(column) for column in zip(*self._gather(seconds), strict=True)]

    def _ratios(self, i: int) -> list[float]:
        """How a contestant compares with the leader, round by round."""
        leader = min(self._contestants, key=lambda i: statistics.median(self._rounds[i]))
        return [mine / best for mine, best in zip(self._rounds[i], self._rounds[leader], strict=True)]

    def _is_as_fast(self, i: int) -> bool:
        """Whether a contestant is as fast as the leader: within `SAME`, or within the scatter of their rounds."""
        ratios = self._ratios(i)
        middle = statistics.median(ratios)
        return middle <= 1 + max(SAME, statistics.median(abs(ratio - middle) for ratio in ratios))
