"""TicTac: order the pulls from parameter servers by the structure of a worker's graph.

The graph of a worker begins with one transfer (`recv`) per parameter: the pull of the parameter from its server. An
op's *communication dependency* is the set of transfers that it needs, directly or through other ops. While a set R of
transfers is outstanding, section 4.1 (Algorithm 1) defines

    an op        M    the time of all its outstanding transfers
    a transfer   M    its own time
                 P    the computation that waits only for this transfer: the ops that need no other transfer of R
                 M+   the least M of an op that needs it and at least one more of R; infinite if there is none

*TIC* (section 4.2, Algorithm 2) orders pulls without knowing any time. Of the ops that need a parameter and at least
one other parameter, TIC takes the op that needs the fewest transfers. The fewer transfers it needs, the more urgent is
the parameter. The priority of a parameter is M+ if every transfer takes time 1 and every op takes time 0.

*TAC* (section 4.3, equation 2 and Algorithm 3) also uses the times of ops and transfers. With two transfers left, A
comes first if T(A, B) < T(B, A), where T(A, B) = M_A + max(P_A, M_B) + P_B: the computation that waits only for A runs
while B is being sent. The condition is equivalent to min(P_B, M_A) < min(P_A, M_B), Johnson's rule for a flow shop of
two machines. If both orders take equally long, the transfer with the lesser M+ comes first. An op's time is the least
of 5 runs (section 5), as `legato capture` records it; a transfer takes as long as its pull.

Paper: TicTac (Hashemi, Abdu Jyothi, Campbell, SysML 2019).
Units: transfers for TIC, whole picoseconds for TAC.

Deviations:
- M+ leaves ties. For example, the first two parameters of a chain have the same M+, because the op that waits only for
  the first one does not count. TicTac sends tied transfers in any order. Here TIC and TAC send tied transfers in the
  order in which the captured forward pass first reads their parameters.
- Algorithm 3 compares the wrong way round, min(P_A, M_B) < min(P_B, M_A). This module implements the paper's
  derivation, equation 2.
- The paper calls its comparator transitive. It is not, because ties are not transitive. For example, let A have M = 1
  and P = 3, B have M = 1 and P = 1, and C have M = 3 and P = 1. By equation 2, A comes before C, but B ties with A and
  with C, so M+ may put C before B, and B before A. So TAC finds all transfers that equation 2 puts after no other
  transfer, and from these it sends the transfer with the least M+ next. (Equation 2 alone has no cycle. Equation 2 can
  be refined to Johnson's order: first the transfers with M < P by rising M, then all others by falling P.)
- The plan starts with the pushes, as gradients become ready (`fifo`).

[Note: sets] Ops with the same communication dependency have the same M, and P adds up their times. So the ops are
stored as distinct sets of transfers, each with the total time of its ops. A chain of n layers has n sets, and its whole
backward pass has a single set. A set is a row of bits. When a transfer completes, only the rows that contain it are
updated.

[Note: counts] TIC needs only the number of transfers in each set. The set of transfers that ops need grows along the
graph. So among the ops that need a transfer and at least one other transfer, the earliest ops need the fewest
transfers. If the sets are too large to store, the transfers are counted on a cover of the graph by chains of ops
(`reach.py`). In the cover, a transfer is a part of an op if only this op reads its tensor.

[Note: whole numbers] Times are counted in whole picoseconds, so that a sum is the
same in any order and equal times compare as equal. (A week has 6e17 picoseconds, and the limit is 9e18.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from legato.core.cluster import Cluster
from legato.core.errors import TooLargeError
from legato.core.placement import Placement
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.basics.compose import priorities
from legato.schedule.basics.reach import Cover
from legato.schedule.published.pulls import pull_seconds, push_and_pull

__all__ = [
    "NEVER",
    "TransferProperties",
    "find_dependencies",
    "least_counts",
    "picoseconds",
    "tac",
    "tac_order",
    "tic",
    "tic_order",
]


#: M+ of a transfer that no op needs together with another one.
NEVER = np.iinfo(np.int64).max
#: The most bits of all distinct sets of tensors that ops need, with a bit for each tensor: 128 MiB.
_MOST_NEEDS = 2**30
#: The most bits of the sets of all forward ops, before equal sets are merged: 512 MiB.
_MOST_BITS = 2**32
#: Up to this number of bits, TIC counts the bits of the sets.
_FEW_BITS = 2**26
#: The number of sets to unpack at once, and the most transfers to look up one by one.
_ROWS = 64


def tic(
    workload: Workload, cluster: Cluster, *, collective: str | None = None, placement: Placement = "round-robin"
) -> Plan:
    """Return a plan that pushes in ready order and pulls in TIC's order. Raises `InputError` as `push_and_pull`."""
    return push_and_pull("tic", tic_order(workload), workload, cluster, collective, placement)


def tic_order(workload: Workload, *, inference: bool = False) -> list[int]:
    """Return the indices of the tensors in TIC's order, for a worker or an inference agent.

    Raises `TooLargeError` if there are too many tensors and the graph is very wide.
    """
    impending, place = least_counts(workload, inference=inference), priorities(workload)
    return sorted(range(len(place)), key=lambda t: (impending[t], place[t], t))


def least_counts(workload: Workload, *, inference: bool = False) -> list[int]:
    """Return M+ of each tensor if every transfer takes 1, or `NEVER` if M+ is infinite ([Note: counts])."""
    counts = _counts(workload, inference)
    least = [count if count > 1 else NEVER for count in counts]  # by op: the least of this op and those after it
    for i in reversed(range(len(counts))):
        for dep in workload.ops[i].deps:
            if counts[dep] < 2:
                least[dep] = min(least[dep], least[i])
    forward = len(workload.phase_ops("forward"))
    return [min((least[r] for r in tensor.readers if r < forward), default=NEVER) for tensor in workload.tensors]


def _counts(workload: Workload, inference: bool) -> list[int]:
    """Return, for each op that a worker (or an inference agent) runs, how many tensors it needs."""
    ops, forward = _worker_ops(workload, inference), len(workload.phase_ops("forward"))
    if ops * len(workload.tensors) > _FEW_BITS:
        waits, counted = [list(workload.ops[i].deps) for i in range(ops)], [0.0] * ops
        for tensor in workload.tensors:
            readers = {r for r in tensor.readers if r < forward}
            if len(readers) == 1:
                counted[min(readers)] += 1
            else:
                for reader in readers:
                    waits[reader].append(len(waits))
                waits.append([])
                counted.append(1)
        cover = Cover([*range(ops, len(waits)), *range(ops)], waits, counted)
        if cover.complete:
            return [round(cover.seconds(cover.reached[i])) for i in range(ops)]
    return [needs.bit_count() for needs in find_dependencies(workload, inference=inference)]


def _worker_ops(workload: Workload, inference: bool) -> int:
    """Return the number of ops that a worker, or an inference agent, runs."""
    return len(workload.phase_ops("forward")) + (0 if inference else len(workload.phase_ops("backward")))


def tac(
    workload: Workload, cluster: Cluster, *, collective: str | None = None, placement: Placement = "round-robin"
) -> Plan:
    """Return a plan that pushes in ready order and pulls in TAC's order. Raises `InputError` as `push_and_pull`."""
    order = tac_order(workload, pull_seconds(workload, cluster, collective))
    return push_and_pull("tac", order, workload, cluster, collective, placement)


def tac_order(workload: Workload, transfer_s: Sequence[float], *, inference: bool = False) -> list[int]:
    """Return the indices of the tensors in TAC's order, for a worker or an inference agent.

    `transfer_s[t]` is how many seconds the network takes for tensor t when the network carries nothing else (the
    paper's Time(recv)).
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
    """Return the outstanding transfers that no other outstanding transfer precedes by equation 2.

    B comes before A if min(P_A, M_B) < min(P_B, M_A). This is so exactly if P_A or M_B is less than both P_B and M_A.
    """
    left = np.flatnonzero(properties.outstanding)
    m, p = properties.time[left], properties.load[left]
    helpful = m[m < p]
    quickest = helpful.min() if len(helpful) else NEVER
    beaten = ((p < m) & (p < p.max())) | (quickest < m)
    unbeaten: NDArray[np.intp] = left[~beaten]
    return unbeaten


def find_dependencies(workload: Workload, *, inference: bool = False) -> list[int]:
    """Return, for each op that a worker runs, the tensors that it needs, as a bit mask over `workload.tensors`.

    A worker runs the forward and backward ops, an inference agent only the forward ops, and the optimizer runs on the
    servers. Ops come after the ops on which they depend, so one pass in order is enough. Raises `TooLargeError` if
    there are too many tensors and forward ops.
    """
    forward, tensors = len(workload.phase_ops("forward")), len(workload.tensors)
    if forward * tensors > _MOST_BITS:
        sizes = f"{tensors:,}, with {forward:,} forward ops"
        raise TooLargeError(f"tensors: {sizes} (expected at most {_MOST_BITS:,} pairs of both)")
    reads = [0] * _worker_ops(workload, inference)
    for t, tensor in enumerate(workload.tensors):
        for reader in tensor.readers:
            if reader < forward:
                reads[reader] |= 1 << t
    for i in range(len(reads)):
        for dep in workload.ops[i].deps:
            both = reads[i] | reads[dep]
            reads[i] = reads[dep] if both == reads[dep] else both  # equal sets share their memory
    return reads


def picoseconds(seconds: float) -> int:
    """Return seconds as a whole number of picoseconds."""
    return round(seconds * 1e12)


class TransferProperties:
    """M, P and M+ of the outstanding transfers, updated when transfers complete (Algorithm 1).

    `dependencies[op]` is a bit mask over the transfers. `op_time[op]` and `transfer_time[t]` are whole numbers in the
    same unit. At first, all transfers are outstanding.
    """

    def __init__(self, dependencies: Sequence[int], op_time: Sequence[int], transfer_time: Sequence[int]) -> None:
        loads: dict[int, int] = {}
        for needs, time in zip(dependencies, op_time, strict=True):
            if needs:
                loads[needs] = loads.get(needs, 0) + time
        transfers = len(transfer_time)
        if len(loads) * transfers > _MOST_NEEDS:
            sizes = f"{transfers:,}, of which ops need {len(loads):,} different sets"
            raise TooLargeError(f"tensors: {sizes} (expected at most {_MOST_NEEDS:,} pairs of both)")
        width = (transfers + 7) // 8
        packed = bytearray().join(needs.to_bytes(width, "little") for needs in loads)
        #: `_bits[set]`: the set's transfers, eight to a byte; when a transfer completes, its bit is cleared.
        self._bits = np.frombuffer(packed, np.uint8).reshape(len(loads), width)
        self._load = np.array(list(loads.values()), np.int64)
        self._count = np.array([needs.bit_count() for needs in loads], np.int64)
        self.time = np.array(transfer_time, np.int64)
        self._m = np.zeros(len(loads), np.int64)
        for start in range(0, len(loads), _ROWS):
            rows = np.unpackbits(self._bits[start : start + _ROWS], axis=1, count=transfers, bitorder="little")
            self._m[start : start + _ROWS] = np.where(rows, self.time, 0).sum(axis=1)
        self.outstanding = np.ones(transfers, bool)
        #: P of every transfer.
        self.load = np.zeros(transfers, np.int64)
        self._credit(np.flatnonzero(self._count == 1))

    def _held(self, transfer: int) -> NDArray[np.bool_]:
        """Return, for each set, whether it contains a transfer."""
        held: NDArray[np.bool_] = self._bits[:, transfer >> 3] & (1 << (transfer & 7)) != 0
        return held

    def complete(self, transfer: int) -> None:
        """Record that a transfer has completed."""
        holders = np.flatnonzero(self._held(transfer))
        self.outstanding[transfer] = False
        self._bits[holders, transfer >> 3] &= np.uint8(~(1 << (transfer & 7)) & 0xFF)
        self._count[holders] -= 1
        self._m[holders] -= self.time[transfer]
        self._credit(holders[self._count[holders] == 1])

    def _credit(self, sets: NDArray[np.intp]) -> None:
        """For each set that has only one transfer left, add the time of its ops to the transfer's P."""
        only = np.unpackbits(self._bits[sets], axis=1, bitorder="little").argmax(axis=1)
        np.add.at(self.load, only, self._load[sets])

    def impending(self) -> NDArray[np.int64]:
        """Return M+ of every transfer, or `NEVER` if M+ is infinite or the transfer has completed."""
        result = np.full(len(self.time), NEVER, np.int64)
        shared = np.flatnonzero(self._count > 1)
        for row in shared[np.argsort(-self._m[shared], kind="stable")]:
            held = np.unpackbits(self._bits[row], count=len(self.time), bitorder="little").view(bool)
            result[held] = self._m[row]
        return result

    def least_impending(self, candidates: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the candidates (outstanding transfers) with the least M+, or all candidates if no M+ is finite."""
        asked: NDArray[np.bool_] = np.zeros(len(self._count), bool)
        if len(candidates) <= _ROWS:
            for transfer in candidates.tolist():
                asked |= self._held(transfer)
        else:
            mask = np.zeros(len(self.time), bool)
            mask[candidates] = True
            asked = np.any(self._bits & np.packbits(mask, bitorder="little"), axis=1)
        shared = (self._count > 1) & asked
        if not shared.any():
            return candidates
        nearest = shared & (self._m == self._m[shared].min())
        held = np.unpackbits(
            np.bitwise_or.reduce(self._bits[nearest], axis=0), count=len(self.time), bitorder="little"
        ).view(bool)
        nearest_of: NDArray[np.intp] = candidates[held[candidates]]
        return nearest_of
