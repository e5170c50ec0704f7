"""Chains of layers whose tensors are updated, and their best iterations, by brute force."""

import itertools
import random

from legato.core.cluster import Cluster, LinearCost
from legato.schedule.search.optimizer_ops import WorkConserving
from support import nets

UNIT = 16


def chain(backward_s, forward_s, units, updates_s):
    """Layers with tensors of so many units, given from the first one on; every tensor has an update."""
    return nets.chain(backward_s, forward_s, [UNIT * n for n in units], updates_s)


def cluster_of(alpha_s, unit_s):
    return Cluster(2, {"c": LinearCost(alpha_s, unit_s / UNIT)})


def best_with_halves(workload, cluster, sends):
    """The fewest seconds of an iteration, over all sequences of reduce-scatters and all-gathers: each unit is in both.

    In pairs, units that are scattered together are gathered together.
    """
    units = [t for t, tensor in enumerate(workload.tensors) for _ in range(tensor.nbytes // UNIT)]
    ready, cost, best = ready_s(workload), cluster.cost(), float("inf")
    slots = range(2 * len(units))
    for places in itertools.product(list(itertools.combinations(slots, 2)), repeat=len(units)):
        if sends == "pairs" and not len(set(places)) == len({s for s, _ in places}) == len({g for _, g in places}):
            continue
        now, arrival = 0.0, [0.0] * len(workload.tensors)
        for slot in slots:
            scattered, gathered = ([t for t, at in zip(units, places, strict=True) if at[k] == slot] for k in (0, 1))
            if scattered and gathered:
                break
            if scattered or gathered:
                now = max(now, *(ready[t] for t in scattered), 0.0)
                now += (cost.alpha_s + cost.beta_s_per_byte * UNIT * len(scattered + gathered)) / 2
            for t in gathered:
                arrival[t] = now
        else:
            best = min(best, WorkConserving(workload)(arrival)[1])
    return best


def ready_s(workload):
    """When the gradients are ready, by tensor."""
    backward = workload.phase_ops("backward")
    until = list(itertools.accumulate(workload.ops[i].duration_s for i in backward))
    return [until[backward.index(tensor.ready_after)] for tensor in workload.tensors]


def case(seed):
    """A chain of two or three layers whose tensors have one or two units; all times but alpha are whole seconds."""
    draw = random.Random(seed)
    units = [draw.randint(1, 2) for _ in range(draw.randint(2, 3))]
    updates_s = [float(draw.randint(0, 4) * n) for n in units]
    backward_s, forward_s = ([float(draw.randint(0, most)) for _ in units] for most in (2, 3))
    cluster = cluster_of(draw.choice([0.0, 0.25, 1.0, 4.0]), float(draw.randint(1, 4)))
    return chain(backward_s, forward_s, units, updates_s), cluster
