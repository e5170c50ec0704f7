"""Binomial tree: ceil(log2 n) rounds add up everything towards rank 0; the sum returns the same way.

MG-WFBP, Table II ("binary tree").
"""

from __future__ import annotations

from legato.collectives.rounds import Algorithm, Round, Rounds, back

__all__ = ["TREE"]


def _rounds(ranks: int) -> Rounds:
    """A rank's round is the lowest bit of its number; its parent lacks that bit."""
    up = tuple(Round(range(1 << k, ranks, 2 << k), shifts=(-(1 << k),)) for k in range((ranks - 1).bit_length()))
    return Rounds(1, up, back(up))


def _latencies(ranks: int) -> int:
    height = (ranks - 1).bit_length()
    return 2 * (height - (ranks < 1 << height))  # with a rank missing, none is as many hops away as the tree is high


TREE = Algorithm(_rounds, _latencies)
