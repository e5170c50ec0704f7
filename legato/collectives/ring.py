"""Ring: every rank sends only to its neighbour (MG-WFBP, Table II; Horovod; NCCL).

In n - 1 rounds, the parts of the message travel around the ring and are added up. In another n - 1 rounds, the sums
travel around the ring.
"""

from __future__ import annotations

from legato.collectives.rounds import Algorithm, Round, Rounds

__all__ = ["RING"]


def _rounds(ranks: int) -> Rounds:
    around = (Round(range(ranks), shifts=(1,), laps=ranks - 1),)
    return Rounds(ranks, around, around)


RING = Algorithm(_rounds)
