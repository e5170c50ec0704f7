"""Plans with messages in a wire format: plan with the costs of exact and of rounded messages, then choose formats.

`rounding.py` finds which messages of these plans must be rounded. If a message mixes tensors that must be rounded with
tensors that need not be, all of it is rounded. So messages are also planned that hold tensors of only one kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import msgspec

from legato.core.files import identity
from legato.core.plan import Message, Plan, Slice
from legato.schedule.basics.compose import is_runnable
from legato.schedule.basics.joined import divided
from legato.schedule.search.candidates import published
from legato.schedule.search.problem import Problem, Solve
from legato.schedule.search.rounding import MOST_SHARED, TOLERANCE, exact_shares, rounded
from legato.simulator.pipelining import message_s

__all__ = ["plan_in_wire_format"]

#: Orders in which tensors become exact, as keys of release time, tail and bytes.
_FIRST_EXACT: tuple[Callable[[float, float, int], float], ...] = (
    lambda release_s, tail_s, nbytes: tail_s,
    lambda release_s, tail_s, nbytes: -release_s,
    lambda release_s, tail_s, nbytes: -nbytes,
)
#: The fractions by which plans of regrouped messages should be faster than necessary, since messages have startup
#: times, and the fraction of the work for each such plan.
_SLACKS, _REGROUPED = (0.0, 0.01, 0.03), 0.1


def plan_in_wire_format(problem: Problem, solve: Solve) -> Plan:
    """Return the best plan with messages that may be rounded, from plans for exact and for rounded messages."""
    workload, cluster = problem.workload, problem.cluster
    beside, exact = cluster.while_computing(), replace(problem, wire="none")
    plans = []
    for costs, slowed in ((cluster, beside), (cluster.in_wire_format(), beside.in_wire_format())):
        plans.append(solve(replace(exact, cluster=costs)))
        if not problem.large:
            name = problem.collective or cluster.default_collective
            found = published(replace(exact, cluster=slowed), name)
            plans += [plan for plan in found if is_runnable(plan, workload)]

    def fit(message: Message) -> Message:
        if cluster.contention is not None:  # the cheapest collective may take more time from computation
            return message
        nbytes = message.wire_nbytes
        name, depth = problem.collectives.way(nbytes, message.kind)
        if message_s(cluster, name, depth, nbytes) >= message_s(cluster, message.collective, message.depth, nbytes):
            return message
        return msgspec.structs.replace(message, collective=name, depth=depth)

    def limited(plan: Plan) -> Plan:
        return msgspec.structs.replace(plan, messages=tuple(divided(plan.messages, problem.most)))

    def regroup(seconds: float) -> Iterator[Plan]:
        return map(limited, _regrouped(exact, seconds, solve))

    budget = problem.budget()
    plan = rounded(map(limited, plans), workload, cluster, problem.wire, budget, fit=fit, regroup=regroup, divide=True)
    problem.warn_if_cut(budget)
    return msgspec.structs.replace(plan, workload_id=identity(workload), cluster_id=identity(cluster))


def _regrouped(problem: Problem, seconds: float, solve: Solve) -> Iterator[Plan]:
    """Yield plans whose messages hold only exact or only rounded tensors, for iterations of `seconds` seconds.

    The exact tensors are those that could be exact in an iteration of this length, or a little less, if startup cost
    nothing.
    """
    workload = problem.workload
    if len(workload.tensors) > MOST_SHARED:
        return
    tried = set()
    work, limit_s, gap = problem.work * _REGROUPED, problem.limit_s * _REGROUPED, min(problem.gap, TOLERANCE / 2)
    for order, slack in itertools.product(_FIRST_EXACT, _SLACKS):
        shares = exact_shares(workload, problem.cluster, seconds * (1 - slack), order)
        light = tuple(share < 1 for share in shares)
        if light in tried or not any(light) or all(light):
            continue
        tried.add(light)
        tensors = (
            msgspec.structs.replace(tensor, nbytes=tensor.nbytes // 2) if half else tensor
            for tensor, half in zip(workload.tensors, light, strict=True)
        )
        halved = msgspec.structs.replace(workload, tensors=tuple(tensors))
        plan = solve(replace(problem, workload=halved, work=work, limit_s=limit_s, gap=gap))
        names = {tensor.name for tensor, half in zip(workload.tensors, light, strict=True) if half}
        yield msgspec.structs.replace(plan, messages=tuple(_by_format(plan.messages, names)))


def _by_format(messages: Iterable[Message], rounded: set[str]) -> Iterator[Message]:
    """Yield the messages, in which rounded tensors have half their bytes, with the full bytes of all tensors.

    A message with tensors of both kinds becomes two messages. The messages with rounded tensors are marked bf16, but
    the final plan has the format that the user chose.
    """
    for message in messages:
        light = [Slice(s.tensor, 2 * s.start, 2 * s.stop) for s in message.slices if s.tensor in rounded]
        exact = [s for s in message.slices if s.tensor not in rounded]
        if light:
            yield msgspec.structs.replace(message, slices=tuple(light), wire="bf16")
        if exact:
            yield msgspec.structs.replace(message, slices=tuple(exact))
