"""Shuffle: each rank gets its part from all other ranks, adds it up, and sends back the sum (Caramel, section 2)."""

from __future__ import annotations

from legato.collectives.rounds import Algorithm, Round, Rounds

__all__ = ["SHUFFLE"]


def _rounds(ranks: int) -> Rounds:
    all_to_all = (Round(range(ranks), shifts=range(1, ranks)),)  # the first peer of each rank is different
    return Rounds(ranks, all_to_all, all_to_all)


SHUFFLE = Algorithm(_rounds)
