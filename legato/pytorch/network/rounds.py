"""All-reduces as rounds of sends and receives: who gives which parts of a chunk to whom.

A chunk is cut into equal parts. In the first half of a collective, what a round
receives is added to what is there; afterwards every part is complete on some
rank. The second half hands the parts out, and is the first one backwards in
time: who received a part sends it back, complete, to the rank that had sent it.

    collective           rounds of a half        complete on rank i after the first half
    shuffle              1                       part i
    ring                 n - 1                   part i
    halving-doubling     log2(n)                 part i
    recursive-doubling   log2(n), 0              everything
    tree                 log2(n)                 everything on rank 0, nothing elsewhere

The two with a doubling need a power of two, p. Of other numbers of ranks, rank
p + i first adds its all to rank i's, stands aside, and is told the result at
the very end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["ROUNDS", "Round", "Rounds", "Transfer"]


class Transfer(NamedTuple):
    """Parts `start` to `stop` (exclusive), to or from a peer."""

    peer: int
    start: int
    stop: int


class Round(NamedTuple):
    """What one rank does in a round; rounds without anything keep all ranks in step."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()

    @property
    def overwrites(self) -> bool:
        """Whether it receives parts that it sends."""
        return any(s.start < r.stop and r.start < s.stop for s in self.sends for r in self.receives)

    def backwards(self) -> Round:
        return Round(sends=self.receives, receives=self.sends)


class Rounds(NamedTuple):
    """A collective on one rank: the parts of a chunk, the rounds that add up and those that hand out."""

    parts: int
    reduce: tuple[Round, ...]
    distribute: tuple[Round, ...]


def _mirrored(parts: int, reduce: list[Round]) -> Rounds:
    return Rounds(parts, tuple(reduce), tuple(step.backwards() for step in reversed(reduce)))


def _shuffle(rank: int, ranks: int) -> Rounds:
    others = [(rank + k) % ranks for k in range(1, ranks)]  # everybody begins with another one
    sends = tuple(Transfer(peer, peer, peer + 1) for peer in others)
    receives = tuple(Transfer(peer, rank, rank + 1) for peer in others)
    return _mirrored(ranks, [Round(sends, receives)])


def _ring(rank: int, ranks: int) -> Rounds:
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    rounds = []
    for k in range(1, ranks):
        given, taken = (rank - k) % ranks, (rank - k - 1) % ranks
        rounds.append(Round((Transfer(after, given, given + 1),), (Transfer(before, taken, taken + 1),)))
    return _mirrored(ranks, rounds)


def _halving_doubling(rank: int, ranks: int) -> Rounds:
    power = _power_of_two(ranks)
    rounds = _fold(rank, ranks, power, parts=power)
    start, stop = 0, power
    while stop - start > 1:
        half = (stop - start) // 2
        middle = start + half
        lower, upper = (start, middle), (middle, stop)
        if rank >= power:
            rounds.append(Round())
            stop = middle
            continue
        (start, stop), given, peer = (lower, upper, rank + half) if rank < middle else (upper, lower, rank - half)
        rounds.append(Round((Transfer(peer, *given),), (Transfer(peer, start, stop),)))
    return _mirrored(power, rounds)


def _recursive_doubling(rank: int, ranks: int) -> Rounds:
    power = _power_of_two(ranks)
    fold = _fold(rank, ranks, power, parts=1)
    peers = [rank ^ 2**k for k in range(power.bit_length() - 1)]
    if rank < power:
        exchanges = [Round((Transfer(peer, 0, 1),), (Transfer(peer, 0, 1),)) for peer in peers]
    else:
        exchanges = [Round() for _ in peers]
    return Rounds(1, (*fold, *exchanges), tuple(step.backwards() for step in fold))


def _tree(rank: int, ranks: int) -> Rounds:
    rounds = []
    for k in range((ranks - 1).bit_length()):
        below, step = rank % 2**k, 2**k
        if below:
            rounds.append(Round())  # it has given its sum away
        elif rank & step:
            rounds.append(Round(sends=(Transfer(rank - step, 0, 1),)))
        else:
            rounds.append(Round(receives=(Transfer(rank + step, 0, 1),) if rank + step < ranks else ()))
    return _mirrored(1, rounds)


def _power_of_two(ranks: int) -> int:
    """The largest one that is not more than `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def _fold(rank: int, ranks: int, power: int, parts: int) -> list[Round]:
    """The round in which the ranks beyond a power of two give their all away; none if there are none."""
    if ranks == power:
        return []
    if rank >= power:
        return [Round(sends=(Transfer(rank - power, 0, parts),))]
    return [Round(receives=(Transfer(rank + power, 0, parts),) if rank + power < ranks else ())]


#: (rank, ranks) -> what that rank does, by the names of `legato.core.cluster.COLLECTIVES`.
ROUNDS: dict[str, Callable[[int, int], Rounds]] = {
    "ring": _ring,
    "halving-doubling": _halving_doubling,
    "recursive-doubling": _recursive_doubling,
    "tree": _tree,
    "shuffle": _shuffle,
}
