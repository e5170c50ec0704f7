"""All-reduce algorithms as lists of rounds, which determine the cost, the work of each rank, and the traffic on links.

An algorithm divides a message into equal parts, and runs in two halves. In the first half, ranks add the parts that
they receive to their own, until some rank has the complete sum of each part. In the second half, the complete parts are
distributed.

[Note: blocks] A transfer carries a block of neighbouring parts. In the first half, the block contains the part with the
receiver's number; in the second half, it contains the part with the sender's number. If there are fewer parts than
ranks, the numbers of ranks are taken modulo the number of parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Algorithm", "Round", "Rounds", "Step", "Transfer", "back", "steps"]


class Round(NamedTuple):
    """A round in which each of `senders` sends a block of parts ([Note: blocks]), all at the same time.

    Rank r sends to the rank r + s, modulo the number of ranks, for each s in `shifts`. With `flip`, the bits of `flip`
    are flipped in the receiver's number. The round runs `laps` times, and each time the senders pass on the block that
    they received the time before.
    """

    senders: range
    shifts: Sequence[int] = (0,)
    flip: int = 0
    block: int = 1
    laps: int = 1


def back(rounds: Sequence[Round]) -> tuple[Round, ...]:
    """Return a second half, the first half backwards: receivers send blocks back, to only one rank per round."""
    return tuple(
        one._replace(
            senders=range(one.senders.start + shift, one.senders.stop + shift, one.senders.step), shifts=(-shift,)
        )
        for one in reversed(rounds)
        for shift in one.shifts
    )


class Transfer(NamedTuple):
    """A transfer of the parts from `start` up to, but not including, `stop`, to or from a peer."""

    peer: int
    start: int
    stop: int


class Step(NamedTuple):
    """The transfers of one rank in one round. A rank without transfers has an empty step."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()

    @property
    def overwrites(self) -> bool:
        """Return whether the rank receives parts that it sends in the same round."""
        return any(s.start < r.stop and r.start < s.stop for s in self.sends for r in self.receives)


class Rounds(NamedTuple):
    """An algorithm for a given number of ranks: the number of parts, and the rounds of the two halves."""

    parts: int
    reduce: tuple[Round, ...]
    distribute: tuple[Round, ...]


class Algorithm(NamedTuple):
    """An all-reduce algorithm; `make` returns its rounds among two or more ranks.

    `latencies` returns the number of consecutive transfers that the smallest message needs. `latencies` is None if this
    number is the number of rounds. If no rank takes part in all rounds, the message needs fewer consecutive transfers
    than there are rounds.
    """

    make: Callable[[int], Rounds]
    latencies: Callable[[int], int] | None = None

    def rounds(self, ranks: int) -> Rounds:
        """Return the rounds of the algorithm among this number of ranks."""
        return _rounds(self.make, ranks)

    @property
    def halves(self) -> bool:
        """Return whether messages can be sent in two halves, so that each rank has the sum of one part in between.

        The cost of a message in halves also depends on the number of its chunks, the depth
        (`legato.simulator.pipelining`).
        """
        return self.rounds(2).parts > 1

    def cost(self, ranks: int, latency: float, byte: float, reduce: float, send: float) -> tuple[float, float]:
        """Return (alpha, beta) of an all-reduce whose rounds run one after another (MG-WFBP, Table II).

        `latency` is the latency of a transfer in seconds, and `send` is the part of the latency for which the sender is
        busy. `byte` is the time to send a byte, and `reduce` the time to add a byte up (seconds).
        """
        parts, (rounds, further, there), (others, more, again) = _loads(self, ranks)
        hops = rounds + others if self.latencies is None or ranks == 1 else self.latencies(ranks)
        sent = (2 * byte + reduce) * there if again == there else byte * (there + again) + reduce * there
        return hops * latency + (further + more) * send, sent / parts

    def half(self, ranks: int, latency: float, byte: float) -> tuple[float, float]:
        """Return (alpha, beta) of one half: the second (an all-gather), or the first if adding takes no time."""
        parts, _, (rounds, _, sent) = _loads(self, ranks)
        return rounds * latency, byte * sent / parts

    def pairs(self, ranks: int) -> list[tuple[int, int]]:
        """Return the pairs (sender, receiver) that occur in the first half."""
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
    """Return the number of parts and, for each half, the rounds, the sends beyond one per round, and the parts sent."""
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
