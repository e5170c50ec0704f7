"""Plans with all messages in a wire format: plan for exact and for rounded messages, and choose the faster plan.

A plan for rounded messages assumes that a whole tensor need not be copied out of its message. Rounded tensors are
always copied, so if the cluster has a cost for this (`Cluster.unpack_s_per_byte`), a plan for exact messages may be
faster.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from legato.core.plan import Message, Plan, Wire
from legato.schedule.basics.compose import is_runnable
from legato.schedule.basics.joined import divided
from legato.schedule.search.candidates import published
from legato.schedule.search.problem import Problem, Solve
from legato.simulator.collective import iteration_time
from legato.simulator.pipelining import message_s

__all__ = ["plan_in_wire_format"]


def plan_in_wire_format(problem: Problem, wire: Wire, solve: Solve) -> Plan:
    """Return the best plan with all messages rounded, from plans for exact and for rounded messages."""
    workload, cluster = problem.workload, problem.cluster

    def fit(message: Message) -> Message:
        if cluster.contention is not None:  # the cheapest collective may take more time from computation
            return message
        nbytes = message.wire_nbytes
        name, depth = problem.collectives.way(nbytes, message.kind)
        if message_s(cluster, name, depth, nbytes) >= message_s(cluster, message.collective, message.depth, nbytes):
            return message
        return msgspec.structs.replace(message, collective=name, depth=depth)

    def rounded(plan: Plan) -> Plan:
        messages = divided(plan.in_wire_format(wire).messages, problem.most)
        return msgspec.structs.replace(plan, messages=tuple(map(fit, messages)))

    plans: list[Plan] = []
    for costs in (cluster, cluster.in_wire_format()):
        plans.append(solve(replace(problem, cluster=costs)))
        if not problem.large:
            slowed, name = costs.while_computing(), problem.collective or costs.default_collective
            found = published(replace(problem, cluster=slowed), name)
            plans += [plan for plan in found if is_runnable(plan, workload)]
    return min(map(rounded, plans), key=lambda plan: iteration_time(workload, plan, cluster))
