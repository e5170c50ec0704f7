"""Binomial tree: ceil(log2 n) rounds add everything up on rank 0, and the same rounds in reverse spread the sum.

MG-WFBP, Table II ("binary tree").
"""

from __future__ import annotations

from legato.collectives.rounds import Algorithm, Round, Rounds, back

__all__ = ["TREE"]


def _rounds(ranks: int) -> Rounds:
    """Return the rounds. In round k, each rank whose lowest set bit is bit k sends to the rank 2^k below it."""
    up = tuple(Round(range(1 << k, ranks, 2 << k), shifts=(-(1 << k),)) for k in range((ranks - 1).bit_length()))
    return Rounds(1, up, back(up))


def _latencies(ranks: int) -> int:
    height = (ranks - 1).bit_length()
    # if n is below a power of two, every rank has fewer hops to the root than the tree is high
    return 2 * (height - (ranks < 1 << height))


TREE = Algorithm(_rounds, _latencies)
