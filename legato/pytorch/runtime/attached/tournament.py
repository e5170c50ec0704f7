"""A tournament of plans: they take turns in training, and the plan that is measured fastest is kept.

docs/runtime.md has the rules. All ranks exchange their medians after each turn, so all of them draw the same
conclusions from the same numbers. Plans are compared round by round, so a temporary slowdown of the machine affects all
plans.
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

#: The least and the greatest number of rounds.
FEWEST_ROUNDS, MOST_ROUNDS = 4, 8
#: The number of timed steps in a turn: enough for `TURN_S` seconds, within these limits.
FEWEST_STEPS, MOST_STEPS = 4, 28
TURN_S = 0.2
#: The number of untimed steps at the start of a turn: in a plan's first turn, in which legato looks at readers, and in
#: later turns.
FIRST_UNTIMED, UNTIMED = 3, 1
#: Plans count as equally fast if their times differ by no more than this fraction.
SAME = 0.005


class Measured(NamedTuple):
    """The measurement of a plan: `seconds` per step, the number of timed `steps`, and the `scatter` of its turns.

    `seconds` is the median over the plan's turns. `scatter` is the median difference between a turn and `seconds`, in
    seconds per step.
    """

    seconds: float
    steps: int
    scatter: float = 0.0


class Tournament:
    """Lets plans take turns. Among equally fast plans the first one is kept, so the simplest plan should come first.

    `plan` is the plan of the next step; at the end, it is the winner. `gather(numbers)` exchanges numbers among the
    ranks, and returns all of them in the order of the ranks.
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
        #: The number of rounds that are over.
        self.rounds = 0
        self._played = self._play()
        #: Whether there are turns to come.
        self.goes_on = next(self._played, False)

    def step_ended(self) -> None:
        """Call this on all ranks, once in each step: after its first backward pass that sends."""
        self.goes_on = next(self._played, False)

    @property
    def most_left(self) -> int:
        """Return the greatest number of steps that may remain."""
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
        """Let a plan have its turn; return the median seconds per step on the slowest rank."""
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
        """Return the ratio of a contestant's time to the leader's, for each round."""
        leader = min(self._contestants, key=lambda i: statistics.median(self._rounds[i]))
        return [mine / best for mine, best in zip(self._rounds[i], self._rounds[leader], strict=True)]

    def _is_as_fast(self, i: int) -> bool:
        """Return whether a contestant's time is above the leader's by at most `SAME` or the scatter of their ratios."""
        ratios = self._ratios(i)
        middle = statistics.median(ratios)
        return middle <= 1 + max(SAME, _scatter(ratios, middle))


def most_steps(plans: int, step_s: float) -> int:
    """Return how many steps a tournament of `plans` plans may take at most, if a step takes `step_s` seconds."""
    turns = 1 + MOST_ROUNDS * plans
    return turns * (_steps_of_turn(step_s) + UNTIMED) + plans * (FIRST_UNTIMED - UNTIMED)


def _steps_of_turn(step_s: float) -> int:
    return min(MOST_STEPS, max(FEWEST_STEPS, math.ceil(TURN_S / max(step_s, 1e-9))))


def _scatter(values: Sequence[float], middle: float) -> float:
    """Return the median distance of values from their median, `middle`."""
    return statistics.median(abs(value - middle) for value in values)
