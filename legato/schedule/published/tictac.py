"""What a worker's graph says about the transfers that it waits for: TicTac's dependencies and properties.

The graph of a worker begins with one transfer (`recv`) a parameter, its pull
from a parameter server. An op's *communication dependency* is the set of
transfers that it needs, directly or through other ops. While some transfers
are outstanding (R), TicTac (section 4.1, Algorithm 1) gives

    an op        M    the time of all its outstanding transfers
    a transfer   M    its own time
                 P    the computation that it alone still holds up: all ops that need it and no other one of R
                 M+   the least M of an op that needs it and at least one more of R; infinite if there is none

[Note: sets] Ops with the same dependency have the same M, and P only sums them
up. So ops are held as distinct sets with the sum of their times, of which a
chain of n layers has n and its whole backward pass one. A set is a row of bits;
completing a transfer updates the rows that hold it, and nothing is recomputed.

[Note: whole numbers] Times are counted in whole picoseconds: sums come out the
same in any order, and a tie is a tie. (A week is 6e17 of 9e18.)

TIC: pull the parameters in the order in which the graph can use them, without knowing any time.

Idea: what a worker computes first should arrive first. A parameter is the more
urgent, the fewer transfers it takes to start the first op that needs it
together with others.
Paper: TicTac (Hashemi, Abdu Jyothi, Campbell, SysML 2019), section 4.2,
Algorithm 2: the priority is M+ when every transfer takes 1 and every op 0.
Units: transfers.

Deviations:
- M+ leaves ties: the first two parameters of a chain have the same (the first
  one holds up an op by itself, which M+ does not count), and TicTac sends equals
  in any order. Here equals stand in the order in which the captured forward
  pass reads them first.
- The plan starts with the pushes, as gradients become ready (`fifo`).

TAC: pull first what lets the most computation overlap with the transfers to come.

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
from legato.schedule.basics.compose import priorities
from legato.schedule.published.pulls import pull_seconds, push_and_pull

__all__ = ["NEVER", "TransferProperties", "find_dependencies", "picoseconds", "tac", "tac_order", "tic", "tic_order"]

#: M+ of a transfer that no op needs together with another one.
NEVER = np.iinfo(np.int64).max


def picoseconds(seconds: float) -> int:
    """Seconds as a whole number of picoseconds."""
    return round(seconds * 1e12)


def find_dependencies(workload: Workload, *, inference: bool = False) -> list[int]:
    """For each op that a worker runs, the tensors it needs, as a bit mask over `workload.tensors`.

    A worker runs the forward and the backward ops, an inference agent the
    forward ones only; the optimizer is at the servers. Ops stand after what
    they depend on, so one pass in order is the traversal.
    """
    phases = ("forward",) if inference else ("forward", "backward")
    count = sum(op.phase in phases for op in workload.ops)
    reads = [0] * count
    for t, tensor in enumerate(workload.tensors):
        for reader in tensor.readers:
            if workload.ops[reader].phase == "forward":
                reads[reader] |= 1 << t
    for i in range(count):
        for dep in workload.ops[i].deps:
            reads[i] |= reads[dep]
    return reads


class TransferProperties:
    """M, P and M+ of the outstanding transfers, kept up to date while they complete (Algorithm 1).

    `dependencies[op]` is a bit mask over the transfers; `op_time[op]` and
    `transfer_time[t]` are whole numbers of any unit. All transfers are
    outstanding at first.
    """

    def __init__(self, dependencies: Sequence[int], op_time: Sequence[int], transfer_time: Sequence[int]) -> None:
        loads: dict[int, int] = {}
        for needs, time in zip(dependencies, op_time, strict=True):
            if needs:
                loads[needs] = loads.get(needs, 0) + time
        transfers = len(transfer_time)
        width = (transfers + 7) // 8
        packed = b"".join(needs.to_bytes(width, "little") for needs in loads)
        #: `_bits[set]`: its transfers, eight to a byte; rows lose a bit when a transfer completes.
        self._bits = np.frombuffer(packed, np.uint8).reshape(len(loads), width).copy()
        needed = np.unpackbits(self._bits, axis=1, count=transfers, bitorder="little").view(bool)
        self._holders = [np.flatnonzero(needed[:, t]) for t in range(transfers)]
        self._load = np.array(list(loads.values()), np.int64)
        self._count = needed.sum(axis=1, dtype=np.int64)
        self.time = np.array(transfer_time, np.int64)
        self._m = needed.astype(np.int64) @ self.time if len(loads) else np.zeros(0, np.int64)
        self.outstanding = np.ones(transfers, bool)
        #: P of every transfer.
        self.load = np.zeros(transfers, np.int64)
        self._credit(np.flatnonzero(self._count == 1))

    def complete(self, transfer: int) -> None:
        """A transfer is in: it is outstanding no more."""
        holders = self._holders[transfer]
        self.outstanding[transfer] = False
        self._bits[holders, transfer >> 3] &= np.uint8(~(1 << (transfer & 7)) & 0xFF)
        self._count[holders] -= 1
        self._m[holders] -= self.time[transfer]
        self._credit(holders[self._count[holders] == 1])

    def _credit(self, sets: NDArray[np.intp]) -> None:
        """These sets hold one transfer each, from now on: their computation waits for nothing else."""
        only = np.unpackbits(self._bits[sets], axis=1, bitorder="little").argmax(axis=1)
        np.add.at(self.load, only, self._load[sets])

    def impending(self) -> NDArray[np.int64]:
        """M+ of every transfer; `NEVER` where there is none, and for those that are in."""
        result = np.full(len(self.time), NEVER, np.int64)
        shared = np.flatnonzero(self._count > 1)
        for row in shared[np.argsort(-self._m[shared], kind="stable")]:
            held = np.unpackbits(self._bits[row], count=len(self.time), bitorder="little").view(bool)
            result[held] = self._m[row]
        return result

    def least_impending(self, among: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those of some outstanding transfers that have the least M+; all of them if none has any."""
        asked = np.zeros(len(self.time), bool)
        asked[among] = True
        mask = np.packbits(asked, bitorder="little")
        shared = (self._count > 1) & (self._bits & mask).any(axis=1)
        if not shared.any():
            return among
        nearest = shared & (self._m == self._m[shared].min())
        held = np.unpackbits(
            np.bitwise_or.reduce(self._bits[nearest], axis=0), count=len(self.time), bitorder="little"
        ).view(bool)
        nearest_of: NDArray[np.intp] = among[held[among]]
        return nearest_of


def tic(
    workload: Workload, cluster: Cluster, *, collective: str | None = None, placement: Placement = "round-robin"
) -> Plan:
    """Pushes in ready order, pulls in TIC's. Raises `InputError` without servers, or on an unknown setting."""
    return push_and_pull("tic", tic_order(workload), workload, cluster, collective, placement)


def tic_order(workload: Workload, *, inference: bool = False) -> list[int]:
    """Indices of the tensors in TIC's order, for a worker or for an inference agent."""
    needs = find_dependencies(workload, inference=inference)
    properties = TransferProperties(needs, [0] * len(needs), [1] * len(workload.tensors))
    impending, place = properties.impending(), priorities(workload)
    return sorted(range(len(place)), key=lambda t: (impending[t], place[t], t))


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
    place = priorities(workload)
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
