"""Plans for messages and computation that share a machine: plan twice, and let the simulator choose.

Messages and computation take time from each other (`Cluster.contention`). How much time messages and computation take
from each other depends on when each message is being sent, which only the simulator knows. So messages are planned
twice: with their cost during computation, and with their cost without computation.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from legato.core.files import identity
from legato.core.plan import Plan
from legato.core.workload import Op, Workload
from legato.schedule.basics.sharded import sharded
from legato.schedule.search.candidates import Fastest, published
from legato.schedule.search.problem import Problem, Solve

__all__ = ["contended_plan"]


def contended_plan(problem: Problem, solve: Solve) -> Plan:
    """Return the best plan from two searches: with the cost of messages during computation, and without computation."""
    workload, cluster = problem.workload, problem.cluster
    each = replace(problem, work=problem.work / 2, limit_s=problem.limit_s / 2)
    slowed = replace(each, workload=_slowed(problem), cluster=cluster.while_computing())
    alone = replace(each, cluster=msgspec.structs.replace(cluster, contention=None))
    fastest, name = Fastest(problem), problem.collective or cluster.default_collective
    for case in (slowed, replace(slowed, workload=workload)):
        fastest.consider(sharded(plan, workload, problem.shard) for plan in published(case, name))
    for case in (slowed, alone):
        fastest.consider([solve(case)])
    return msgspec.structs.replace(fastest.plan, workload_id=identity(workload))


def _slowed(problem: Problem) -> Workload:
    """Return the workload with ops slowed by packing and by the overhead of one message that has all gradients."""
    workload, contention = problem.workload, problem.cluster.contention
    assert contention is not None
    packed = [0] * len(workload.ops)
    for tensor in workload.tensors:
        packed[tensor.ready_after] += tensor.nbytes
    taken = 1 + contention.overhead.cost(workload.nbytes) / max(workload.compute_s, 1e-9)
    ops = (
        Op(op.name, op.phase, op.duration_s * taken + nbytes * contention.pack_s_per_byte, op.deps)
        for op, nbytes in zip(workload.ops, packed, strict=True)
    )
    return msgspec.structs.replace(workload, ops=tuple(ops))
