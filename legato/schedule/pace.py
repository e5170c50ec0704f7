"""PACE: fuse small gradients to balanced groups, and let the urgent overtake at any moment.

Idea: an all-reduce that is under way is cut the moment that a more urgent one
becomes ready, so the network never works on what can wait. Small tensors are
fused first, or their startup times would eat the gain.
Paper: Preemptive All-reduce Scheduling for Expediting Distributed DNN Training
(Bao, Peng, Chen, Wu, INFOCOM 2020). Section IV: the schedule; section V: the
fusion (`pace_fusion.py`).
Units: seconds and bytes.

Section IV wants the x_i(t), which operator has the network in which time slot,
that minimise max(y_i + L_i): arrival plus longest path of computation after it
(Theorem 1). The paper solves an integer program with T N variables and
coefficients of (T N)^t. It is the problem 1 | r_j, pmtn | L_max, for which
Jackson's rule is exactly optimal in O(n log n) (`jackson.py`), without slots.

A partition costs nothing in the paper, only what is fused counts a startup
time. In the plan every piece of the schedule is a message and costs its own, so
the iteration takes longer than the paper's oracle believes.

Deviations:
- `compute`: the paper assumes "unlimited" devices, every op runs as soon as it
  can. The default is "one" stream that runs the ops in the captured order; the
  computation after an arrival is then all from its first reader on, and the
  schedule is as exactly optimal.
- The paper combines the gradients of one op beforehand. They may have different
  readers, so here fusion decides.
- A cut falls on a multiple of 16 bytes of its tensor, the next one down, so
  that no element is divided; a piece that this leaves empty is not sent.
- As printed, constraint 7 lets a gradient be sent in the very slot in which it
  is still being computed (t < z should read t <= z).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Tensor, Workload
from legato.schedule.compose import compose, known_collective, ready_times
from legato.schedule.heads_tails import HeadsTails, heads_tails
from legato.schedule.pace_fusion import Chain, fuse, preemptive
from legato.simulate.period import Compute

__all__ = ["pace"]

_ALIGNMENT = 16


def pace(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    compute: Compute = "one",
    fusion: bool = True,
) -> Plan:
    """A message for each piece of the optimal preemptive schedule, with forward overlap.

    The schedule takes O(N log N) for N tensors, fusion O(N^2); with `fusion`
    off, the tensors are scheduled as they are (section IV alone). Raises
    `InputError` on a compute setting that does not exist or a collective the
    cluster lacks.
    """
    name = known_collective(cluster, collective)
    cost = cluster.cost(name)
    known = _heads_tails(workload, compute)
    order = sorted(range(len(workload.tensors)), key=lambda t: (known.head_s[t], workload.tensors[t].ready_after))
    chain = Chain(
        [known.head_s[t] for t in order],
        [workload.tensors[t].nbytes for t in order],
        [known.tail_s[t] for t in order],
    )
    ends = fuse(chain, cost, known.compute_s) if fusion else list(range(1, len(order) + 1))
    groups = [_Fused([workload.tensors[t] for t in order[a:b]]) for a, b in pairwise([0, *ends])]
    _, pieces = preemptive(chain.fused(ends), cost)
    messages = [Message(slices, collective=name) for slices in _cut(groups, pieces, cost)]
    return compose("pace", messages, workload, cluster, forward_overlap=True)


def _heads_tails(workload: Workload, compute: Compute) -> HeadsTails:
    """Heads and tails of the DAG; on one stream with the optimizer ops too where the plan will have them."""
    if compute != "one":
        return heads_tails(workload, compute, "captured")
    backwards = workload.iteration_order()[::-1]
    rest = dict(zip(backwards, accumulate(workload.ops[i].duration_s for i in backwards), strict=True))
    tails = [max((rest[r] for r in tensor.readers), default=0.0) for tensor in workload.tensors]
    return HeadsTails(ready_times(workload), tails, workload.compute_s)


class _Fused:
    """Tensors laid end to end."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        *self.starts, self.nbytes = accumulate((tensor.nbytes for tensor in tensors), initial=0)

    def aligned(self, at: int) -> int:
        """The last place up to `at` where a tensor may be cut."""
        start = self.starts[bisect_right(self.starts, at) - 1]
        return start + (at - start) // _ALIGNMENT * _ALIGNMENT

    def slices(self, start: int, stop: int) -> tuple[Slice, ...]:
        """Bytes `start` to `stop` of the whole as slices of its tensors."""
        found = []
        k = bisect_right(self.starts, start) - 1
        while start < stop:
            begin, tensor = self.starts[k], self.tensors[k]
            end = min(stop, begin + tensor.nbytes)
            found.append(Slice(tensor.name, start - begin, end - begin))
            start, k = end, k + 1
        return tuple(found)


def _cut(
    groups: Sequence[_Fused], pieces: Sequence[tuple[int, float, float]], cost: LinearCost
) -> list[tuple[Slice, ...]]:
    """What each piece carries: the share of its group's bytes that it has of its group's time."""
    last = {i: k for k, (i, _, _) in enumerate(pieces)}
    busy, sent = [0.0] * len(groups), [0] * len(groups)
    cuts = []
    for k, (i, start, stop) in enumerate(pieces):
        group, end = groups[i], groups[i].nbytes
        busy[i] += stop - start
        if k != last[i]:
            end = group.aligned(min(int(end * busy[i] / cost.cost(end)), end))
        if end > sent[i]:
            cuts.append(group.slices(sent[i], end))
            sent[i] = end
    return cuts
