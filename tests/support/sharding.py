"""All sharded plans of small workloads, one by one."""

import itertools

from legato.core.errors import PlanError
from legato.core.plan import Message, Plan, Slice
from legato.simulator.collective import iteration_time


def partitions(items):
    """All ways to put items into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for groups in partitions(rest):
        yield [[first], *groups]
        for k in range(len(groups)):
            yield [*groups[:k], [first, *groups[k]], *groups[k + 1 :]]


def halves_in_any_order(workload):
    """The messages of all sharded plans of whole tensors: every grouping, and every order of both halves."""
    for groups in partitions(list(workload.tensors)):
        slices = [tuple(Slice(t.name, 0, t.nbytes) for t in group) for group in groups]
        for order in itertools.permutations(range(2 * len(groups))):
            place = {half: k for k, half in enumerate(order)}
            if all(place[k] < place[k + len(groups)] for k in range(len(groups))):
                kinds = ("reduce_scatter", "all_gather")
                yield tuple(Message(slices[h % len(groups)], kinds[h // len(groups)]) for h in order)


def orders_of_updates(workload, anywhere=False):
    """All orders of ops that keep backward and forward ops in theirs; updates follow the backward pass, or not."""
    backward, forward = workload.phase_ops("backward"), workload.phase_ops("forward")
    found = [()]
    sequences = [tuple(backward + forward)]
    for update in workload.phase_ops("optimizer"):
        sequences = [(*s[:k], update, *s[k:]) for s in sequences for k in range(len(s) + 1)]
    for sequence in sequences:
        place = {op: k for k, op in enumerate(sequence)}
        applied = [(t, u) for t in workload.tensors for u in t.readers if workload.ops[u].phase == "optimizer"]
        if all(
            place[t.ready_after] < place[u]
            and all(place[u] < place[r] for r in t.readers if workload.ops[r].phase == "forward")
            for t, u in applied
        ) and (anywhere or list(sequence[: len(backward)]) == backward):
            found.append(sequence)
    return list(dict.fromkeys(found))[1:]


def best_sharded(workload, cluster, anywhere=False, compute="one"):
    """The seconds of the best sharded plan of whole tensors, of all that there are, and the plan."""
    best, best_plan = float("inf"), None
    orders = orders_of_updates(workload, anywhere) if compute == "one" else [()]
    for messages in halves_in_any_order(workload):
        for order in orders:
            plan = Plan("brute", messages, True, order, shard="optimizer")
            try:
                seconds = iteration_time(workload, plan, cluster, compute=compute)
            except PlanError:  # it waits for itself
                continue
            if seconds < best:
                best, best_plan = seconds, plan
    return best, best_plan
