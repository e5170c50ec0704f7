"""All-reduce algorithms as rounds of sends and receives of parts of a chunk.

A chunk is divided into equal parts. In the first half of a collective, the parts
that a rank receives are added to its own; afterwards every part is complete on
some rank. The second half distributes the complete parts. It is the first half
reversed in time: the receiver of a part sends it back, complete, to its sender.

    collective           rounds of a half        complete on rank i after the first half
    shuffle              1                       part i
    ring                 n - 1                   part i
    halving-doubling     log2(n)                 part i
    recursive-doubling   log2(n), 0              everything
    tree                 log2(n)                 everything on rank 0, nothing elsewhere

The two doubling algorithms need a power of two, p. With other numbers of ranks,
rank p + i first sends everything to rank i, which adds it to its own; it then
pauses, and receives the result at the very end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["ROUNDS", "Round", "Rounds", "Transfer"]


class Transfer(NamedTuple):
    """A transfer of parts `start` to `stop` (exclusive), to or from a peer."""

    peer: int
    start: int
    stop: int


class Round(NamedTuple):
    """What one rank does in one round; an empty round keeps all ranks in step."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()

    @property
    def overwrites(self) -> bool:
        """Whether it receives parts that it also sends."""
        return any(s.start < r.stop and r.start < s.stop for s in self.sends for r in self.receives)

    def mirrored(self) -> Round:
        """The same transfers in the opposite direction."""
        return Round(sends=self.receives, receives=self.sends)


class Rounds(NamedTuple):
    """A collective on one rank: the number of parts of a chunk, and the rounds of its two halves."""

    parts: int
    reduce: tuple[Round, ...]
    distribute: tuple[Round, ...]


def _mirrored(parts: int, reduce: list[Round]) -> Rounds:
    return Rounds(parts, tuple(reduce), tuple(step.mirrored() for step in reversed(reduce)))


def _shuffle(rank: int, ranks: int) -> Rounds:
    others = [(rank + k) % ranks for k in range(1, ranks)]  # each rank begins with a different peer
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
        swaps = [Round((Transfer(peer, 0, 1),), (Transfer(peer, 0, 1),)) for peer in peers]
    else:
        swaps = [Round() for _ in peers]
    return Rounds(1, (*fold, *swaps), tuple(step.mirrored() for step in fold))


def _tree(rank: int, ranks: int) -> Rounds:
    rounds = []
    for k in range((ranks - 1).bit_length()):
        below, step = rank % 2**k, 2**k
        if below:
            rounds.append(Round())  # it has sent its sum away
        elif rank & step:
            rounds.append(Round(sends=(Transfer(rank - step, 0, 1),)))
        else:
            rounds.append(Round(receives=(Transfer(rank + step, 0, 1),) if rank + step < ranks else ()))
    return _mirrored(1, rounds)


def _power_of_two(ranks: int) -> int:
    """The largest power of two that is at most `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def _fold(rank: int, ranks: int, power: int, parts: int) -> list[Round]:
    """The round in which the ranks from `power` on send everything away; empty if there are no such ranks."""
    if ranks == power:
        return []
    if rank >= power:
        return [Round(sends=(Transfer(rank - power, 0, parts),))]
    return [Round(receives=(Transfer(rank + power, 0, parts),) if rank + power < ranks else ())]


#: For each name of `legato.core.cluster.COLLECTIVES`: (rank, ranks) -> the rounds of that rank.
ROUNDS: dict[str, Callable[[int, int], Rounds]] = {
    "ring": _ring,
    "halving-doubling": _halving_doubling,
    "recursive-doubling": _recursive_doubling,
    "tree": _tree,
    "shuffle": _shuffle,
}
