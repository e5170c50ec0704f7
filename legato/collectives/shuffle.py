"""Shuffle: every rank gets its part from all others, adds it up, and sends the sum to all (Caramel, section 2)."""

from __future__ import annotations

from legato.collectives.rounds import Algorithm, Round, Rounds

__all__ = ["SHUFFLE"]


def _rounds(ranks: int) -> Rounds:
    all_to_all = (Round(range(ranks), shifts=range(1, ranks)),)  # each rank begins with a different peer
    return Rounds(ranks, all_to_all, all_to_all)


SHUFFLE = Algorithm(_rounds)
