"""The messages that the bound of nested sets asks for attain it for chains of layers, and never beat it."""

import random

import pytest
from support.nets import chain
from support.strategies import seeds

from legato.core.cluster import Cluster, LinearCost
from legato.schedule import schedule
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.bound.arguments.nested import Nested
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.bound.plan_kind import PlanKind
from legato.schedule.bound.problem import Problem
from legato.schedule.search.budget import Budget
from legato.schedule.search.collectives import CheapestCollective
from legato.schedule.search.fill import Instance, fill
from legato.schedule.search.nested_messages import nested_messages
from legato.simulator.collective import iteration_time


def random_chain(seed, layers):
    draw = random.Random(seed)
    forward_s = [draw.expovariate(100) for _ in range(layers)]
    backward_s = [draw.expovariate(50) for _ in range(layers)]
    return chain(backward_s, forward_s, [16 * int(2 ** draw.uniform(8, 18)) for _ in range(layers)]), draw


def instance_of(workload, costs, bound_s=1e-3):
    times = heads_tails(workload, "one", "captured")
    collectives = CheapestCollective(tuple((f"{k}", 1) for k in range(len(costs))), tuple(costs))
    return Instance(times.release_s, times.tail_s, [t.nbytes for t in workload.tensors], collectives, bound_s, Budget())


@pytest.mark.parametrize("seed", seeds(20, quick=2))
def test_they_attain_the_bound_of_a_chain(seed):
    workload, draw = random_chain(seed, random.Random(seed).randint(2, 90))
    alpha = workload.compute_s * 10 ** draw.uniform(-3, -0.3)
    line = LinearCost(alpha, workload.compute_s * 10 ** draw.uniform(-1, 0.3) / workload.nbytes)
    problem = Problem(workload, Cluster(2, {"0": line}), "one", PlanKind("captured", "all_reduces"))
    bound = max(Nested.find(problem, 1e-6))
    found = nested_messages(instance_of(workload, [line]))
    assert bound.seconds <= found.seconds * (1 + 1e-9)
    assert found.seconds <= bound.seconds * (1 + 1e-3)
    cluster = Cluster(2, {"0": line})
    ours = iteration_time(workload, schedule("legato", workload, cluster), cluster)
    assert ours <= lower_bound(workload, cluster, sends="all_reduces").seconds * (1 + 0.005)


@pytest.mark.parametrize("seed", seeds(6))
def test_with_many_layers_or_several_collectives_every_byte_is_sent_and_none_too_early(seed):
    workload, draw = random_chain(seed, 40 + 60 * seed)
    costs = [LinearCost(a, b / workload.nbytes) for a, b in ((1e-3, 0.9), (2e-2, draw.uniform(0.2, 0.6)))]
    instance = instance_of(workload, costs)
    found = nested_messages(instance)
    sent = [0] * len(instance.nbytes)
    for message in found.messages:
        for piece in message:
            assert piece.start == sent[piece.tensor]
            sent[piece.tensor] += piece.nbytes
    assert sent == instance.nbytes
    arrival = instance.arrival_s(found)
    assert max(a + q for a, q in zip(arrival, instance.tail_s, strict=True)) == pytest.approx(found.seconds, rel=1e-3)


def test_a_message_waits_for_what_is_ready_by_a_moment():
    """Without, the second one takes the rest of a at 12; with, it waits until 14, and takes b, which is more urgent."""
    fixed = [0.0, 14.0], [0.0, 9.0], [64, 16], lambda nbytes: 6.0 + nbytes / 16
    early = fill([48, 16, 16], *fixed)
    late = fill([48, 16, 16], *fixed, not_before_s=[0.0, 14.0, 14.0])
    assert [[piece.tensor for piece in message] for message in early.messages] == [[0], [0], [1]]
    assert [[piece.tensor for piece in message] for message in late.messages] == [[0], [1], [0]]
    assert (early.seconds, late.seconds) == (9 + 7 + 7 + 9, 30)
