"""Small workloads with updates, and all of their sharded plans, one by one."""

import itertools
import random

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import PlanError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Op, Tensor, Workload
from legato.simulator.collective import iteration_time
from support.updated_chains import UNIT


def layers(seed, count=3, fused=False):
    """A chain of layers, each with a tensor; an update each, or one for all. Times are whole seconds."""
    draw = random.Random(seed)
    ops = [Op(f"f{k}", "forward", draw.randint(0, 4), (k - 1,) if k else ()) for k in range(count)]
    ops += [Op(f"b{k}", "backward", draw.randint(0, 4), (k - 1,)) for k in range(count, 2 * count)]
    updates = 1 if fused else count
    ops += [Op(f"u{k}", "optimizer", draw.randint(0, 8)) for k in range(updates)]
    tensors = (
        Tensor(f"t{k}", draw.randint(1, 4), 2 * count - 1 - k, (k, 2 * count + (0 if fused else k)))
        for k in range(count)
    )
    cost = LinearCost(draw.choice([0, 1, 2, 4]), draw.choice([1, 2, 4]))
    return Workload(f"layers{seed}", tuple(ops), tuple(tensors)), Cluster(draw.choice([1, 2, 4]), {"c": cost})


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


def best_in_pairs(times, units, cluster, from_s=0.0):
    """The least seconds of all plans in pairs of whole units, where all that follows an arrival is its tail.

    Nothing is gathered before `from_s`.
    """
    items = [t for t, count in enumerate(units) for _ in range(count)]
    best = float("inf")

    def follow(left, under_way, now, least):
        nonlocal best
        if least >= best:
            return
        if not left and not under_way:
            best = least
        for k, (ready, tail, half) in enumerate(left):
            end = max(now, ready) + half
            follow(left[:k] + left[k + 1 :], [*under_way, (tail, half)], end, least)
        for k, (tail, half) in enumerate(under_way):
            end = max(now, from_s) + half
            follow(left, under_way[:k] + under_way[k + 1 :], end, max(least, end + tail))

    for groups in {tuple(sorted(tuple(sorted(group)) for group in groups)) for groups in partitions(items)}:
        near = [[max(of[t] for t in group) for group in groups] for of in (times.release_s, times.tail_s)]
        cost = [min(c.cost(UNIT * len(group)) for c in cluster.collectives.values()) / 2 for group in groups]
        follow(list(zip(*near, cost, strict=True)), [], 0.0, times.compute_s)
    return best
