"""TAC: pull first what lets the most computation overlap with the transfers to come.

Idea: with two transfers left, A goes first if T(A, B) < T(B, A), where
T(A, B) = M_A + max(P_A, M_B) + P_B: the computation that A alone holds up runs
while B is on its way. That is min(P_B, M_A) < min(P_A, M_B), Johnson's rule for
a flow shop of two machines. Where it does not matter, what completes an op with
the fewest transfers goes first (least M+).
Paper: TicTac (Hashemi, Abdu Jyothi, Campbell, SysML 2019), section 4.3,
equation 2, Algorithms 1 and 3; section 5 for the times: an op's is the least of
5 runs, which is what `legato capture` gives, a transfer's that of its pull.
Units: whole picoseconds.

Deviations:
- Algorithm 3 compares the wrong way round, min(P_A, M_B) < min(P_B, M_A). Its
  own derivation, equation 2, is implemented.
- Its comparator is said to be transitive. It is not, for equals are not: with
  (M, P) of A (1, 3), B (1, 1), C (3, 1), A goes before C, and B equals both, so
  M+ may put C before B and B before A. "The least" is therefore, of those that
  no other one goes before by equation 2, the one of least M+. (Equation 2 alone
  has no cycle: it refines to Johnson's order, first M < P by rising M, then the
  others by falling P.)
- Of equals in both, the one that the captured forward pass reads first.
- The plan starts with the pushes, as gradients become ready (`fifo`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from legato.core.cluster import Cluster
from legato.core.placement import Placement
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.compose import urgency
from legato.schedule.servers import pull_seconds, push_and_pull
from legato.schedule.transfer_properties import NEVER, TransferProperties, find_dependencies, picoseconds

__all__ = ["tac", "tac_order"]


def tac(
    workload: Workload, cluster: Cluster, *, collective: str | None = None, placement: Placement = "round-robin"
) -> Plan:
    """Pushes in ready order, pulls in TAC's. Raises `InputError` without servers, or on an unknown setting."""
    order = tac_order(workload, pull_seconds(workload, cluster, collective))
    return push_and_pull("tac", order, workload, cluster, collective, placement)


def tac_order(workload: Workload, transfer_s: Sequence[float], *, inference: bool = False) -> list[int]:
    """Indices of the tensors in TAC's order, for a worker or for an inference agent.

    `transfer_s[t]` is the time that the network takes for tensor t alone, in
    seconds (the paper's Time(recv)).
    """
    needs = find_dependencies(workload, inference=inference)
    op_time = [picoseconds(op.duration_s) for op in workload.ops[: len(needs)]]
    properties = TransferProperties(needs, op_time, [picoseconds(s) for s in transfer_s])
    place = urgency(workload)
    order: list[int] = []
    while len(order) < len(transfer_s):
        nearest = properties.least_impending(_not_beaten(properties))
        order.append(min(nearest.tolist(), key=lambda t: (place[t], t)))
        properties.complete(order[-1])
    return order


def _not_beaten(properties: TransferProperties) -> NDArray[np.intp]:
    """The outstanding transfers that no other one goes before by equation 2.

    min(P_A, M_B) < min(P_B, M_A), "B goes before A", holds exactly if P_A is
    below both P_B and M_A, or M_B is below both P_B and M_A.
    """
    left = np.flatnonzero(properties.outstanding)
    m, p = properties.time[left], properties.load[left]
    helpful = m[m < p]
    quickest = helpful.min() if len(helpful) else NEVER
    beaten = ((p < m) & (p < p.max())) | (quickest < m)
    unbeaten: NDArray[np.intp] = left[~beaten]
    return unbeaten
