"""An all-reduce algorithm as data: its rounds. What it costs, what each rank does, and what links carry follow.

A message is divided into equal parts, and has two halves. In the first half, ranks add the parts that they receive to
their own, until each part is complete somewhere; the second half hands the complete parts out.

[Note: blocks] Parts travel in blocks of neighbours: in the first half to the rank that has the number of one of these
parts, in the second half from there. Where there are fewer parts than ranks, numbers are taken modulo the number of
parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Algorithm", "Round", "Rounds", "Step", "Transfer", "back", "steps"]


class Round(NamedTuple):
    """Each of `senders` sends a block of parts ([Note: blocks]), at the same time as all others.

    Receivers are the ranks that are `shifts` further on, modulo the number of ranks; or, with `flip`, the rank whose
    number differs in these bits. In each of `laps` rounds, senders pass on what they received in the round before.
    """

    senders: range
    shifts: Sequence[int] = (0,)
    flip: int = 0
    block: int = 1
    laps: int = 1


def back(rounds: Sequence[Round]) -> tuple[Round, ...]:
    """The second half that is the first one reversed in time: receivers return the blocks. Each has one receiver."""
    return tuple(
        one._replace(
            senders=range(one.senders.start + shift, one.senders.stop + shift, one.senders.step), shifts=(-shift,)
        )
        for one in reversed(rounds)
        for shift in one.shifts
    )


class Transfer(NamedTuple):
    """A transfer of parts `start` to `stop` (exclusive), to or from a peer."""

    peer: int
    start: int
    stop: int


class Step(NamedTuple):
    """One rank's part in one round; an empty step keeps all ranks in step."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()

    @property
    def overwrites(self) -> bool:
        """Return whether the rank receives parts that it also sends."""
        return any(s.start < r.stop and r.start < s.stop for s in self.sends for r in self.receives)


class Rounds(NamedTuple):
    """An algorithm among some ranks: the number of parts, and the rounds of its two halves."""

    parts: int
    reduce: tuple[Round, ...]
    distribute: tuple[Round, ...]


class Algorithm(NamedTuple):
    """`make` gives the rounds among two or more ranks.

    `latencies` is the number of transfers one after another that the smallest message needs, where this is not the
    number of rounds, because no rank takes part in all rounds.
    """

    make: Callable[[int], Rounds]
    latencies: Callable[[int], int] | None = None

    def rounds(self, ranks: int) -> Rounds:
        """The rounds among any number of ranks."""
        return _rounds(self.make, ranks)

    @property
    def halves(self) -> bool:
        """Return whether a message can be sent in two halves: after the first, each rank has the sum of a part of its
        own.

        Then its cost also depends on the depth (`legato.simulator.pipelining`).
        """
        return self.rounds(2).parts > 1

    def cost(self, ranks: int, latency: float, byte: float, reduce: float, send: float) -> tuple[float, float]:
        """(alpha, beta) of an all-reduce: all rounds one after another (MG-WFBP, Table II).

        `latency` (seconds) is of a transfer, `send` the part of it for which a sender is busy; `byte` and `reduce` are
        the seconds to send a byte, and to add one up.
        """
        parts, (rounds, further, there), (others, more, again) = _loads(self, ranks)
        hops = rounds + others if self.latencies is None or ranks == 1 else self.latencies(ranks)
        sent = (2 * byte + reduce) * there if again == there else byte * (there + again) + reduce * there
        return hops * latency + (further + more) * send, sent / parts

    def half(self, ranks: int, latency: float, byte: float) -> tuple[float, float]:
        """(alpha, beta) of the second half, an all-gather, or of a first half whose additions take no time."""
        parts, _, (rounds, _, sent) = _loads(self, ranks)
        return rounds * latency, byte * sent / parts

    def pairs(self, ranks: int) -> list[tuple[int, int]]:
        """Return who sends to whom in the first half."""
        return [
            (rank, (rank + shift) % ranks ^ one.flip)
            for one in self.rounds(ranks).reduce
            for rank in one.senders
            for shift in one.shifts
        ]


@functools.lru_cache(1024)
def _rounds(make: Callable[[int], Rounds], ranks: int) -> Rounds:
    return make(ranks) if ranks > 1 else Rounds(1, (), ())


@functools.lru_cache(64)
def steps(algorithm: Algorithm, rank: int, ranks: int) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps of one rank in each half."""
    parts, *halves = algorithm.rounds(ranks)

    def step(one: Round, lap: int, reduces: bool) -> Step:
        laps, flip = (one.laps - lap, one.flip) if reduces else (-lap, 0)

        def block(sender: int, shift: int, peer: int) -> Transfer:
            start = ((sender + laps * shift) % ranks ^ flip) % parts // one.block * one.block
            return Transfer(peer, start, start + one.block)

        sends = [block(rank, shift, (rank + shift) % ranks ^ one.flip) for shift in one.shifts if rank in one.senders]
        froms = [(shift, (rank - shift) % ranks ^ one.flip) for shift in reversed(one.shifts)]
        return Step(tuple(sends), tuple(block(peer, shift, peer) for shift, peer in froms if peer in one.senders))

    first, second = (
        tuple(step(one, lap, reduces) for one in half for lap in range(one.laps))
        for half, reduces in zip(halves, (True, False), strict=True)
    )
    return first, second


@functools.lru_cache(1024)
def _loads(algorithm: Algorithm, ranks: int) -> tuple[int, tuple[int, int, int], tuple[int, int, int]]:
    """Return the number of parts, and for each half (rounds, sends that wait for others of their round, parts sent)."""
    parts, *halves = algorithm.rounds(ranks)
    first, second = (
        (
            sum(one.laps for one in half),
            sum(one.laps * (len(one.shifts) - 1) for one in half),
            sum(one.laps * len(one.shifts) * one.block for one in half),
        )
        for half in halves
    )
    return parts, first, second
