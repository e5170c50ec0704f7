"""Exchanges with partners at doubling distances: recursive doubling (MG-WFBP, Table II) and halving-doubling.

Among n ranks, p ranks exchange data, where p is the largest power of two up to n. Each of the remaining ranks first
sends everything to a partner among the p ranks, and receives the result from this partner at the end. Recursive
doubling, which the Network Operator Edition (3.3.2) calls butterfly mixing, exchanges all bytes in each of log2(p)
rounds. In halving-doubling (Rabenseifner), two partners share the bytes that they still have to add up: each sends one
half to the other, so that rounds send 1/2, 1/4, ... 1/p of all bytes. Then the same rounds run backwards and exchange
the sums.
"""

from __future__ import annotations

from legato.collectives.rounds import Algorithm, Round, Rounds, back

__all__ = ["HALVING_DOUBLING", "RECURSIVE_DOUBLING"]


def _power(ranks: int) -> int:
    return 1 << (ranks.bit_length() - 1)


def _fold(ranks: int, parts: int) -> tuple[Round, ...]:
    """Return the round in which all ranks from p on send everything to a partner, or () if there are no such ranks."""
    power = _power(ranks)
    return (Round(range(power, ranks), shifts=(-power,), block=parts),) if power < ranks else ()


def _recursive_doubling(ranks: int) -> Rounds:
    fold, power = _fold(ranks, 1), _power(ranks)
    exchanges = tuple(Round(range(power), flip=1 << k) for k in range(power.bit_length() - 1))
    return Rounds(1, fold + exchanges, back(fold))


def _latencies(ranks: int) -> int:
    """Return how many transfers follow one another. If over half of p ranks have an extra partner, it is one more."""
    power = _power(ranks)
    return power.bit_length() - 1 + (ranks > power) + (2 * ranks > 3 * power)


def _halving_doubling(ranks: int) -> Rounds:
    power = _power(ranks)
    halvings = [power >> k for k in range(1, power.bit_length())]
    there = _fold(ranks, power) + tuple(Round(range(power), flip=half, block=half) for half in halvings)
    return Rounds(power, there, back(there))


RECURSIVE_DOUBLING = Algorithm(_recursive_doubling, _latencies)
HALVING_DOUBLING = Algorithm(_halving_doubling)
