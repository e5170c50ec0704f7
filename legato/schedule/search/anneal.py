"""Simulated annealing, the loop of every search: make random changes, and accept slower states less and less often."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol, TypeVar

__all__ = ["anneal"]


class _Valued(Protocol):
    @property
    def seconds(self) -> float: ...


S = TypeVar("S", bound=_Valued)


def anneal(
    start: S,
    change: Callable[[S], S | None],
    *,
    changes: int,
    heat: float,
    rng: random.Random,
    done: Callable[[S], bool],
) -> S:
    """Return the best state seen in this number of changes; stop earlier if the best state is `done`.

    A change may make the state slower, at random by at most a fraction of the best state's time; the fraction is `heat`
    at first, and falls to 0 at the end (Kirkpatrick, Gelatt, Vecchi, Optimization by Simulated Annealing, Science
    1983). `change` returns None if nothing can change.
    """
    state = best = start
    for k in range(changes):
        if done(best):
            break
        changed, warmth = change(state), heat * best.seconds * (1 - k / changes)
        if changed is not None and changed.seconds <= state.seconds + warmth * rng.random():
            state = changed
            if state.seconds <= best.seconds:
                best = state
    return best
