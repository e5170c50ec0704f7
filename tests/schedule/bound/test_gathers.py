"""The bound "gathers", alone: by hand, against all sharded plans of small cases, and against its checker."""

import random
import runpy
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.sharding import best_in_pairs, best_sharded, layers
from support.strategies import clusters, examples, op_orders, sharded_plans, workloads
from support.updated_chains import UNIT, chain, cluster_of

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError, PlanError
from legato.schedule import schedule
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.basics.sharded import sharded, with_sharded_updates, without_updates
from legato.schedule.bound.check import verify_bound
from legato.schedule.bound.gathers import gathers
from legato.schedule.bound.lower_bound import Bound, Certificate, cheapest_line, lower_bound
from legato.schedule.bound.plan_kind import kind_of
from legato.schedule.published import PUBLISHED
from legato.simulator.collective import iteration_time
from legato.simulator.period import Period

layered_net = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "random_nets.py"))["layered_net"]


def first_gather_s(workload, cluster, step_last):
    """The end of the backward pass, and the least update of a tensor if all follow it."""
    ops = with_sharded_updates(workload, cluster.workers).ops
    updates = [sum(ops[op].duration_s for op in of) for of in Period.of(workload).updates] if step_last else [0.0]
    return sum(op.duration_s for op in ops if op.phase == "backward") + min(updates)


def bound_of(workload, cluster, order="captured", step_last=True, beat_s=1e-3):
    """The bound of this argument alone, and what it claims; None if it proves nothing."""
    times, line = heads_tails(without_updates(workload), "one", order), cheapest_line(cluster, workload.nbytes)
    from_s = first_gather_s(workload, cluster, step_last)
    found = gathers(times, [t.nbytes for t in workload.tensors], line, from_s=from_s, beat_s=beat_s)
    return found and Bound(
        found.seconds, Certificate("gathers", found.tensors, 0.0, found.seconds, 0.0, sets=found.sets)
    )


def check_refuses(seconds, bound, workload, cluster, step_last=True):
    """The checker does not prove more than `seconds`, which some plan takes, with the sets of this bound."""
    claimed = Bound(seconds, msgspec.structs.replace(bound.certificate, network_s=seconds * (1 + 1e-6)))
    with pytest.raises(InputError, match="what is scattered and then gathered may take"):
        verify_bound(claimed, workload, cluster, shard="optimizer", step_last=step_last)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_no_sharded_plan_at_all_is_faster(seed, fused):
    workload, cluster = layers(seed, count=3 if seed % 4 == 0 else 2, fused=fused)
    for step_last in (True, False):
        best, _ = best_sharded(workload, cluster, anywhere=not step_last)
        bound = bound_of(workload, cluster, step_last=step_last, beat_s=0.1 * best)
        assert bound.seconds <= best * (1 + 1e-12)
        verify_bound(bound, workload, cluster, shard="optimizer", step_last=step_last)
        check_refuses(best, bound, workload, cluster, step_last)


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_faster_that_partitions_tensors_on_several_collectives(seed):
    """Which gradients are read when has nothing to do with when they are ready."""
    draw = random.Random(seed)
    units = draw.choice([(1, 1), (1, 2), (2, 1), (1, 1, 1)])
    backward, forward = ([float(draw.randint(0, 4)) for _ in units] for _ in range(2))
    workload = without_updates(chain(backward, forward, units, [0.0] * len(units)))
    readers = [tuple(sorted(draw.sample(workload.phase_ops("forward"), draw.randint(0, 2)))) for _ in units]
    tensors = [msgspec.structs.replace(t, readers=of) for t, of in zip(workload.tensors, readers, strict=True)]
    workload = msgspec.structs.replace(workload, tensors=tuple(tensors))
    costs = [LinearCost(draw.choice([0.5, 1.0, 3.0]), draw.choice([0.0, 1.0, 3.0]) / UNIT) for _ in range(3)]
    cluster = Cluster(2, {f"c{k}": cost for k, cost in enumerate(costs)})
    best = best_in_pairs(heads_tails(workload, "one", "captured"), units, cluster, sum(backward))
    bound = bound_of(workload, cluster, beat_s=0.1)
    assert bound.seconds <= best * (1 + 1e-12)
    verify_bound(bound, workload, cluster, shard="optimizer")


@examples(200)
@given(st.data(), workloads(), clusters(contended=True), st.sampled_from(["captured", "any"]))
def test_no_random_plan_is_faster(data, workload, cluster, order):
    plan = data.draw(sharded_plans(workload, cluster, op_order=op_orders(workload, captured=order == "captured")))
    try:
        seconds = iteration_time(workload, plan, cluster)
    except PlanError:
        assume(False)
    step_last = kind_of(plan, workload).step_last
    bound = seconds and bound_of(workload, cluster, order, step_last, beat_s=0.1 * seconds)
    if bound:
        assert bound.seconds <= seconds * (1 + 1e-12)
        verify_bound(bound, workload, cluster, order=order, shard="optimizer", step_last=step_last)


@pytest.mark.parametrize("seed", range(30))
def test_for_a_chain_of_layers_it_is_the_optimum(seed):
    """Up to its precision, where each layer's backward pass takes twice as long as its forward pass.

    A unit takes two seconds to scatter and all times are even, so halves begin and end between units.
    """
    draw = random.Random(seed)
    units = draw.choice([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2), (1, 3)])
    forward = [2.0 * draw.randint(0, 3) for _ in units]
    workload = without_updates(chain([2 * seconds for seconds in forward], forward, units, [0.0] * len(units)))
    cluster = cluster_of(4.0 * draw.randint(1, 3), 4.0)
    best = best_in_pairs(heads_tails(workload, "one", "captured"), units, cluster, 2 * sum(forward))
    bound = bound_of(workload, cluster, beat_s=0.1)
    assert best * (1 + 1e-12) >= max(bound.seconds, workload.compute_s) >= best * (1 - 2e-3)
    check_refuses(best, bound, workload, cluster)


#: The second layer's gradient is ready at 2 and read 3 s before the end, the first one's at 8 and 4 s before. Each
#: takes 3 s to scatter and 3 s to gather; both together take 4 s and 4 s.
TWO = chain([6.0, 2.0], [1.0, 3.0], [1, 1], [0.0, 0.0])
SLOW = cluster_of(4.0, 2.0)


def test_two_layers_by_hand():
    """In two messages, they are scattered from 2 to 5 and from 8 to 11, and gathered until 14 and 17, with 4 and 3 s
    to follow. Together, they are scattered until 12 and gathered until 16, and 4 s follow. So 20 is the least. Without
    shards, the second layer's could be gathered by 8, and 18 would do."""
    bound = lower_bound(TWO, SLOW, shard="optimizer", step_last=True)
    assert bound.certificate.case == "gathers" and bound.seconds == pytest.approx(20, rel=1e-3)
    assert verify_bound(bound, TWO, SLOW, shard="optimizer", step_last=True) >= bound.seconds
    plan = schedule("legato", TWO, SLOW, shard="optimizer")
    assert best_sharded(TWO, SLOW)[0] == iteration_time(TWO, plan, SLOW) == 20
    assert iteration_time(TWO, schedule("legato", TWO, SLOW), SLOW) == 18


@pytest.mark.parametrize("latency_s", [1e-5, 3e-4, 1e-3])
@pytest.mark.parametrize("seed", [1, 3, 5, 7])
def test_no_plan_of_a_layered_net_is_faster(seed, latency_s):
    workload, cluster = layered_net(seed), Cluster.derive(8, 10e9, latency_s, collectives=["ring"])
    bound = bound_of(workload, cluster, beat_s=0.1)
    assert verify_bound(bound, workload, cluster, shard="gradients", step_last=True) >= bound.seconds
    for scheduler in PUBLISHED:
        plan = sharded(schedule(scheduler, workload, cluster), workload, "gradients")
        assert bound.seconds <= iteration_time(workload, plan, cluster)


@pytest.mark.parametrize("seed", range(8))
def test_messages_that_cost_nothing_or_only_their_start(seed):
    workload, _ = layers(seed)
    for alpha_s, beta_s in ((0.0, 2.0), (2.0, 0.0)):
        cluster = Cluster(2, {"c": LinearCost(alpha_s, beta_s)})
        best, _ = best_sharded(workload, cluster)
        bound = bound_of(workload, cluster, beat_s=0.1 * best)
        assert 0.5 * best <= bound.seconds <= best * (1 + 1e-12)
        verify_bound(bound, workload, cluster, shard="optimizer", step_last=True)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"sets": ()}, "rising numbers up to 2"),
        ({"sets": (2, 2)}, "rising numbers up to 2"),
        ({"sets": (1,)}, "rising numbers up to 2"),
        ({"sets": (2,)}, "what is scattered and then gathered may take"),
        ({"tensors": (1, 0)}, "what is scattered and then gathered may take"),
        ({"network_s": 20.2}, "what is scattered and then gathered may take 20.2 s"),
        ({"network_s": 0.0}, "may take 0.0 s"),
    ],
)
def test_certificates_that_prove_nothing(change, error):
    bound = bound_of(TWO, SLOW)
    certificate = msgspec.structs.replace(bound.certificate, **change)
    with pytest.raises(InputError, match=error):
        verify_bound(Bound(bound.seconds, certificate), TWO, SLOW, shard="optimizer", step_last=True)


def test_what_it_does_not_hold_for():
    bound = bound_of(TWO, SLOW)
    with pytest.raises(InputError, match="case 'gathers' without a shard"):
        verify_bound(bound, TWO, SLOW, sends="pairs")
    with pytest.raises(InputError, match="case 'gathers' with unlimited streams"):
        verify_bound(bound, TWO, SLOW, shard="optimizer", compute="unlimited")


def test_the_checker_goes_through_so_many_sets(monkeypatch):
    monkeypatch.setattr("legato.schedule.bound.check_gathers._SETS", 1)
    with pytest.raises(InputError, match=r"case 'gathers' with 2 sets .expected at most 1"):
        verify_bound(bound_of(TWO, SLOW), TWO, SLOW, shard="optimizer", step_last=True)
