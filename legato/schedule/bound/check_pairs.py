"""Checks a bound of the case "sequences" for halves in pairs: which pairs are under way is a part of the states.

Pairs that are under way are scattered, but not gathered. With one, the rest of what is collected is in it.
With two of known sizes, the state also has the level at which the second one began.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["Relaxed", "pairs_fit"]

#: Pairs under way: none, one, two of known sizes, two of any sizes, and more; and how many these are at least.
_NONE, _ONE, _TWO, _ANY_TWO, _MORE = range(5)

Array = np.ndarray[Any, np.dtype[Any]]


class Relaxed(Protocol):
    """Everything that a schedule has to wait for, as in `check_sequences.py`, and the levels in bytes."""

    alpha: int
    first: int
    claimed: int
    never: int
    x: tuple[Array, Array]
    y: tuple[Array, Array]
    release: Array
    finish: list[int]
    after: Array

    @property
    def levels(self) -> Sequence[Sequence[int]]: ...
    def collected(self, least: Array, i: int, c: int, done: Array) -> Array: ...


def pairs_fit(relaxed: Relaxed) -> bool:
    """Whether everything can be delivered in time."""
    states = _Pairs(relaxed)
    for i in range(len(relaxed.x[0])):
        for c in range(len(relaxed.release)):
            if i or c:
                states.find(i, c)
    return bool(states.least[_NONE, -1, -1, -1, -1] < relaxed.never)


class _Pairs:
    def __init__(self, relaxed: Relaxed) -> None:
        self.relaxed, kinds = relaxed, len(relaxed.release)
        self.least = np.full((5, len(relaxed.x[0]), len(relaxed.y[0]), kinds, kinds), relaxed.never)
        self.least[_NONE, 0, 0, 0, 0] = 0
        self.own = np.array([[(relaxed.first + 1) * ((c > 0) + (a > 0)) for a in range(kinds)] for c in range(kinds)])
        self.x, self.x_most, self.y, self.y_most = (np.array(of) for of in relaxed.levels)

    def find(self, i: int, c: int) -> None:
        """Find all states with level i collected and coverage c from the states before them."""
        never = self.relaxed.never
        scattered, self.second = self._scattered(i, c)
        for j in range(int(np.searchsorted(self.y, self.x_most[i], side="right"))):
            for a in range(c + 1):
                now = scattered[:, j, a]
                if a < 2 or a == c:
                    if j or a:
                        now = np.minimum(now, self._gathered(i, j, c, a))
                    now = self._unchanged(now, i, j, c, a)
                else:
                    now = self._more(now, i, j, a)
                self.least[:, i, j, c, a] = np.minimum(now, never)

    def _closed(self, i: int, j: int, c: int, a: int) -> bool:
        """Whether all that is collected can have been delivered."""
        return a == c and bool(self.x[i] <= self.y_most[j])

    def _scattered(self, i: int, c: int) -> tuple[Array, Array]:
        """The least times after a reduce-scatter, by pairs under way, level delivered and coverage at its all-gather.

        Also those with two pairs of known sizes, by the level before the second one.
        """
        relaxed, never = self.relaxed, self.relaxed.never
        found = np.full((5, *self.least.shape[2:3], self.least.shape[4]), never)
        second = np.full((i + 1, *found.shape[1:]), never)
        if relaxed.release[c, i] >= relaxed.claimed:
            return found, second
        most_x, most_y = relaxed.x[1], relaxed.y[1]
        done = (most_x[: i + 1, None] + most_y)[:, :, None, None] + self.own
        too_few = (self.y > self.x_most[: i + 1, None])[:, :, None]
        for kind, after in enumerate((_ONE, _TWO, _MORE, _MORE, _MORE)):
            spent = relaxed.collected(self.least[kind], i, c, done).min(axis=2)
            if c > 1:
                spent = np.maximum(spent, relaxed.finish[c] - most_x[i] - most_y[:, None] - self.own[c])
            spent = np.where(too_few, never, np.minimum(spent, never))
            if kind == _ONE:
                second = spent
            found[after] = np.minimum(found[after], spent.min(axis=0))
        return found, second

    def _in_time(self, spent: Array, i: int, j: int, c: int, a: int, after: Array | int) -> Array:
        """The times after an all-gather, or never where it ends too late."""
        relaxed = self.relaxed
        end = spent + relaxed.alpha + relaxed.x[0][i] + relaxed.y[0][j] + relaxed.first * ((c > 1) + (a > 1))
        return np.where(end > relaxed.claimed - after, relaxed.never, spent + relaxed.alpha)

    def _one_of_two(self, i: int, j: int) -> Array:
        """By the level before the second pair, and the one delivered before: whether one pair has what is delivered."""
        k, p = np.arange(i + 1)[:, None], np.arange(j + 1)[None, :]
        most, least = self.y_most[j] - self.y[p], self.y[j] - self.y_most[p]
        later = (self.x[i] - self.x_most[k] <= most) & (self.x_most[i] - self.x[k] >= least)
        earlier = (self.x[k] <= self.y_most[j]) & (self.x_most[k] >= self.y[j])
        return np.asarray(later | earlier)

    def _gathered(self, i: int, j: int, c: int, a: int) -> Array:
        """The least times after an all-gather, by pairs under way."""
        before = self.least[:, i, : j + 1, c, : a + 1].copy()
        before[:, j, a] = self.relaxed.never
        after = self.relaxed.after[: j + 1, : a + 1]
        one, any_two, more = (self._in_time(before[kind], i, j, c, a, after).min() for kind in (_ONE, _ANY_TWO, _MORE))
        second = self.second[:, : j + 1, : a + 1].copy()
        second[:, j, a] = self.relaxed.never
        known = np.where(self._one_of_two(i, j)[:, :, None], second, self.relaxed.never)
        two = self._in_time(known, i, j, c, a, after).min()
        never = self.relaxed.never
        return np.array([one if self._closed(i, j, c, a) else never, min(two, any_two), never, more, more])

    def _unchanged(self, now: Array, i: int, j: int, c: int, a: int) -> Array:
        """With halves that change neither levels nor coverage, only which pairs are under way."""
        now, after = now.copy(), int(self.relaxed.after[j, a])
        for _ in range(3):
            now = self._more(now, i, j, a)
            one, _, any_two, more = (int(self._in_time(now[kind], i, j, c, a, after)) for kind in (1, 2, 3, 4))
            two = self._in_time(self.second[self._one_of_two(i, j)[:, j], j, a], i, j, c, a, after)
            now[_ANY_TWO] = min(now[_ANY_TWO], more)
            now[_ONE] = min([now[_ONE], any_two, *two.tolist()])
            if self._closed(i, j, c, a):
                now[_NONE] = min(now[_NONE], one)
        return self._more(now, i, j, a)

    def _more(self, now: Array, i: int, j: int, a: int) -> Array:
        """With reduce-scatters that change neither levels nor coverage."""
        now, alpha = now.copy(), self.relaxed.alpha
        now[_ONE] = min(now[_ONE], now[_NONE] + alpha)
        self.second[i, j, a] = min(self.second[i, j, a], now[_ONE] + alpha)
        now[_TWO] = min(now[_TWO], self.second[i, j, a])
        now[_MORE] = min(now[_MORE], min(now[_TWO], now[_ANY_TWO]) + alpha)
        return now
