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
from legato.pytorch.device import DeviceClock, HostClock

__all__ = ["Measured", "Tournament", "most_steps"]

#: Number of rounds.
FEWEST_ROUNDS, MOST_ROUNDS = 4, 8
#: Timed steps of a turn: as many as take `TURN_S` seconds, within these limits.
FEWEST_STEPS, MOST_STEPS = 4, 28
TURN_S = 0.2
#: Steps of a turn that are not timed: of its plan's first one, in which legato looks at readers, and of others.
FIRST_UNTIMED, UNTIMED = 3, 1
#: Plans whose times differ by no more than this fraction are equal.
SAME = 0.005


class Measured(NamedTuple):
    """The measurement of a plan: the median of its turns, and how far they scatter around it, both in seconds per
    step (the median of their distances from it), and the number of timed steps.
    """

    seconds: float
    steps: int
    scatter: float = 0.0


class Tournament:
    """Lets plans take turns. Their order decides between equals: the simplest comes first.

    `plan` is the plan of the next step; at the end, it is the winner.
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
        #: How many rounds are over.
        self.rounds = 0
        self._played = self._play()
        #: Whether there are turns to come.
        self.goes_on = next(self._played, False)

    def step_ended(self) -> None:
        """Call this after the first backward pass that sends of each step, on all ranks."""
        self.goes_on = next(self._played, False)

    @property
    def most_left(self) -> int:
        """Return the most steps that may remain."""
        return (MOST_ROUNDS - self.rounds) * len(self._contestants) * (self._steps + UNTIMED)

    @property
    def measured(self) -> dict[str, Measured]:
        """Return the measurements, by the names of the plans' schedulers."""
        return {
            plan.scheduler: Measured(
                statistics.median(rounds), self._steps * len(rounds), _scatter(rounds, statistics.median(rounds))
            )
            for plan, rounds in zip(self.plans, self._rounds, strict=True)
            if rounds
        }

    def _play(self) -> Generator[bool, None, None]:
        if len(self.plans) == 1:
            return
        slowest_s = yield from self._turn(self.plan, UNTIMED)
        self._steps = _steps_of_turn(slowest_s)
        for number in range(MOST_ROUNDS):
            order = reversed(self._contestants) if number % 2 else self._contestants
            for i in list(order):
                untimed = UNTIMED if number else FIRST_UNTIMED
                self._rounds[i].append((yield from self._turn(self.plans[i], untimed)))
            self.rounds = number + 1
            if self.rounds >= FEWEST_ROUNDS:
                self._contestants = [i for i in self._contestants if min(self._ratios(i)) <= 1 + SAME]
                if max(self._ratios(self._contestants[0])) <= 1 + 2 * SAME:
                    break
        self.plan = self.plans[next(i for i in self._contestants if self._is_as_fast(i))]

    def _turn(self, plan: Plan, untimed: int) -> Generator[bool, None, float]:
        """Let a plan have its turn; return the median seconds per step, on the slowest rank."""
        self.plan = plan
        for _ in range(untimed):
            yield True
        marks = [self._clock.now()]
        for _ in range(self._steps):
            yield True
            marks.append(self._clock.now())
        seconds = statistics.median(self._clock.seconds(a, b) for a, b in itertools.pairwise(marks))
        return max(told for (told,) in self._gather([seconds]))

    def _ratios(self, i: int) -> list[float]:
        """Compare a contestant with the leader, round by round."""
        leader = min(self._contestants, key=lambda i: statistics.median(self._rounds[i]))
        return [mine / best for mine, best in zip(self._rounds[i], self._rounds[leader], strict=True)]

    def _is_as_fast(self, i: int) -> bool:
        """Return whether a contestant is as fast as the leader: within `SAME` or the scatter of their rounds."""
        ratios = self._ratios(i)
        middle = statistics.median(ratios)
        return middle <= 1 + max(SAME, _scatter(ratios, middle))


def most_steps(plans: int, step_s: float) -> int:
    """Return the most steps that a tournament of this number of plans may take, if a step takes `step_s` seconds."""
    turns = 1 + MOST_ROUNDS * plans
    return turns * (_steps_of_turn(step_s) + UNTIMED) + plans * (FIRST_UNTIMED - UNTIMED)


def _steps_of_turn(step_s: float) -> int:
    return min(MOST_STEPS, max(FEWEST_STEPS, math.ceil(TURN_S / max(step_s, 1e-9))))


def _scatter(values: Sequence[float], middle: float) -> float:
    """The median of the distances from the median."""
    return statistics.median(abs(value - middle) for value in values)
