"""Ring: every rank sends to its neighbour only (MG-WFBP, Table II; Horovod; NCCL).

The parts go around to be added up, n - 1 rounds, and the sums go around once more, n - 1 rounds.
"""

from __future__ import annotations

from legato.collectives.rounds import Algorithm, Round, Rounds

__all__ = ["RING"]


def _rounds(ranks: int) -> Rounds:
    around = (Round(range(ranks), shifts=(1,), laps=ranks - 1),)
    return Rounds(ranks, around, around)


RING = Algorithm(_rounds)
