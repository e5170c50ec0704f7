"""The bound "sides", alone: by hand, against all plans in pairs of small cases, and against its checker."""

import itertools
import random
import runpy
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.optimum import UNIT, Optimum
from support.sharding import best_in_pairs
from support.strategies import clusters, examples, op_orders, paired_plans, workloads
from support.updated_chains import best_with_halves, chain, cluster_of

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError, PlanError, TooLargeError
from legato.core.plan import Message, Plan, Slice
from legato.schedule import schedule
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.basics.sharded import without_updates
from legato.schedule.bound import check_sides
from legato.schedule.bound.check import verify_bound
from legato.schedule.bound.lower_bound import Bound, Certificate, cheapest_line, lower_bound
from legato.schedule.bound.nested import Chain, nested
from legato.schedule.bound.sides import TwoSides, sides
from legato.simulator.collective import iteration_time


def bound_of(workload, cluster, compute="one", order="captured", beat_s=1e-3):
    """The bound of this argument alone, and what it claims; None if it proves nothing."""
    times, line = heads_tails(workload, compute, order), cheapest_line(cluster, workload.nbytes)
    found = sides(times, [tensor.nbytes for tensor in workload.tensors], line, beat_s=beat_s)
    return found and Bound(found.seconds, Certificate("sides", found.tensors, 0.0, found.seconds, 0.0, sets=found.sets))


def layers(seed):
    """Two or three layers with gradients of three units in all, and updates."""
    draw = random.Random(seed)
    units = draw.choice([(1, 1), (1, 2), (2, 1), (1, 1, 1)])
    backward, forward, updates = ([float(draw.randint(0, most)) for _ in units] for most in (3, 3, 4))
    return chain(backward, forward, units, updates), units


def read_anywhere(workload, seed):
    """Without updates, each gradient read by any of the layers, by two, or by none."""
    draw, plain = random.Random(seed), without_updates(workload)
    readers = [tuple(sorted(draw.sample(plain.phase_ops("forward"), draw.randint(0, 2)))) for _ in plain.tensors]
    tensors = [replace(tensor, readers=of) for tensor, of in zip(plain.tensors, readers, strict=True)]
    return replace(plain, tensors=tuple(tensors))


@pytest.mark.parametrize("order", ["captured", "any"])
@pytest.mark.parametrize("seed", range(30))
def test_no_plan_is_faster_and_the_checker_agrees(seed, order):
    workload, _ = layers(seed)
    cluster = cluster_of(random.Random(seed).choice([0.25, 1.0, 4.0]), 2.0)
    best = best_with_halves(workload, cluster, "pairs")
    bound = bound_of(workload, cluster, order=order, beat_s=0.3 * best)
    assert bound.seconds <= best * (1 + 1e-12)
    for sends in ("pairs", "all_reduces"):
        assert verify_bound(bound, workload, cluster, order=order, sends=sends) >= bound.seconds


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_faster_on_several_collectives(seed):
    workload, units = layers(seed)
    workload = read_anywhere(workload, seed)
    draw = random.Random(seed)
    costs = [LinearCost(draw.choice([0.5, 1.0, 3.0]), draw.choice([0.0, 1.0, 3.0]) / UNIT) for _ in range(3)]
    cluster = Cluster(2, {f"c{k}": cost for k, cost in enumerate(costs)})
    best = best_in_pairs(heads_tails(workload, "one", "captured"), units, cluster)
    bound = bound_of(workload, cluster)
    assert bound.seconds <= best * (1 + 1e-12)
    verify_bound(bound, workload, cluster, sends="pairs")


@examples(100)
@given(
    st.data(),
    workloads(),
    clusters(contended=True),
    st.sampled_from([("one", "captured"), ("one", "any"), ("unlimited", "captured")]),
)
def test_no_random_plan_is_faster(data, workload, cluster, setting):
    compute, order = setting
    plan = data.draw(paired_plans(workload, cluster, op_order=op_orders(workload, captured=order == "captured")))
    try:
        seconds = iteration_time(workload, plan, cluster, compute=compute)
    except PlanError:
        assume(False)
    bound = seconds and bound_of(workload, cluster, compute, order, beat_s=0.3 * seconds)
    if bound:
        assert bound.seconds <= seconds * (1 + 1e-12)
        verify_bound(bound, workload, cluster, compute=compute, order=order, sends="pairs")


@pytest.mark.parametrize("seed", range(12))
def test_for_a_chain_of_layers_it_is_the_optimum(seed):
    """Up to its precision: all times are whole and a unit takes two seconds, so halves begin and end between units."""
    draw = random.Random(seed)
    units = draw.choice([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2)])
    backward, forward = ([float(draw.randint(0, 4)) for _ in units] for _ in range(2))
    workload = without_updates(chain(backward, forward, units, [0.0] * len(units)))
    cluster = cluster_of(2.0 * draw.randint(1, 3), 2.0)
    best = Optimum(workload, cluster, sends="pairs").seconds
    assert best * (1 + 1e-12) >= max(bound_of(workload, cluster).seconds, workload.compute_s) >= best * (1 - 1e-3)


#: The second layer's gradient is ready at 2 and read 2 s before the end, the first one's at 6 and 3 s before. Each
#: takes 3 s to scatter and 3 s to gather; both together take 4 s and 4 s.
TWO = without_updates(chain([4.0, 2.0], [1.0, 2.0], [1, 1], [0.0, 0.0]))
SLOW = cluster_of(4.0, 2.0)


def test_two_layers_by_hand():
    """The first layer's gradient, alone, is scattered by 9. Both halves of the other one end before this by 8, and
    3 + 3 + 3 s follow; or one is on each side, and 3 + 3 + 2 s follow 9; or both come after it, later still. Together
    they take 6 + 8 + 3. So 17 is the least. Nested sets count 6 + 6 + 3, and two messages in 2 + 12 + 2."""
    times, line = heads_tails(TWO, "one", "captured"), cheapest_line(SLOW, TWO.nbytes)
    assert (times.release_s, times.tail_s) == ([6.0, 2.0], [3.0, 2.0])
    assert nested(TWO, times, line, "pairs", beat_s=1.0).seconds == pytest.approx(16, rel=1e-6)
    bound = lower_bound(TWO, SLOW, sends="pairs")
    assert bound.certificate.case == "sides" and bound.seconds == pytest.approx(17, rel=1e-3)
    verify_bound(bound, TWO, SLOW, sends="pairs")
    assert best_in_pairs(times, (1, 1), SLOW) == iteration_time(TWO, schedule("legato", TWO, SLOW), SLOW) == 17


layered_net = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "random_nets.py"))["layered_net"]


def random_pairs(workload, draw):
    """Neighbours in all-reduces and pairs, in ready order, with each all-gather anywhere after its reduce-scatter."""
    tensors, messages = sorted(workload.tensors, key=lambda tensor: tensor.ready_after), []
    borders = sorted(draw.sample(range(1, len(tensors)), min(draw.randint(1, 9), len(tensors) - 1)))
    for start, stop in itertools.pairwise([0, *borders, len(tensors)]):
        slices = tuple(Slice(tensor.name, 0, tensor.nbytes) for tensor in tensors[start:stop])
        messages.append(Message(slices, draw.choice(["all_reduce", "reduce_scatter"])))
    for message in [message for message in messages if message.kind == "reduce_scatter"]:
        place = draw.randint(messages.index(message) + 1, len(messages))
        messages.insert(place, replace(message, kind="all_gather"))
    return Plan("random", tuple(messages), forward_overlap=True)


@pytest.mark.parametrize("latency_s", [3e-4, 1e-3])
@pytest.mark.parametrize("seed", [1, 3, 5, 7])
def test_no_plan_of_a_layered_net_is_faster(seed, latency_s):
    workload, cluster = layered_net(seed), Cluster.derive(8, 10e9, latency_s, collectives=["ring"])
    ours = iteration_time(workload, schedule("legato", workload, cluster), cluster)
    bound = bound_of(workload, cluster, beat_s=0.5 * ours)
    assert bound.seconds <= ours * (1 + 1e-12)
    assert verify_bound(bound, workload, cluster, sends="pairs") >= bound.seconds
    draw = random.Random(seed)
    for _ in range(50):
        assert bound.seconds <= iteration_time(workload, random_pairs(workload, draw), cluster)


def test_too_few_states_prove_nothing():
    """What no longer can be followed counts as possible, in the bound and in its checker, which then refuses."""
    times, line = heads_tails(TWO, "one", "captured"), cheapest_line(SLOW, TWO.nbytes)
    nested_sets = Chain(times.release_s, times.tail_s, [UNIT, UNIT], line, sends="pairs")
    (order,) = nested_sets.orders()
    sets = nested_sets.sets(order, nested_sets.sizes(order, 2))
    assert [TwoSides(sets, line.alpha_s / 2, 10**6).fits(seconds) for seconds in (16.9, 17.1)] == [False, True]
    for states in (0, 1, 2, 5, 10, 20, 50):
        few = TwoSides(sets, line.alpha_s / 2, states)
        assert few.fits(16.9) == (few.left <= 0)
        assert few.fits(17.1)
    assert TwoSides(sets, line.alpha_s / 2, 1).fits(16.9)


@pytest.mark.parametrize("limit", ["_STATES", "_AFTER_A_SET"])
def test_the_checker_follows_so_many_states(limit, monkeypatch):
    bound = bound_of(TWO, SLOW)
    monkeypatch.setattr(check_sides, limit, 1)
    with pytest.raises(TooLargeError, match="2 sets with too many states of halves to follow"):
        verify_bound(bound, TWO, SLOW, sends="pairs")


def test_the_checker_follows_fewer_moments_at_once_where_there_are_many_states(monkeypatch):
    workload, cluster = layered_net(7), Cluster.derive(8, 10e9, 1e-3, collectives=["ring"])
    bound = bound_of(workload, cluster, beat_s=0.2)
    monkeypatch.setattr(check_sides, "_AFTER_A_SET", 1000)
    assert verify_bound(bound, workload, cluster, sends="pairs") >= bound.seconds


def test_what_it_does_not_hold_for():
    assert bound_of(TWO, cluster_of(1e-3, 2.0), beat_s=TWO.compute_s) is None
    bound = bound_of(TWO, SLOW)
    with pytest.raises(InputError, match="case 'sides' for halves"):
        verify_bound(bound, TWO, SLOW, sends="halves")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"sets": ()}, "rising numbers up to 2"),
        ({"sets": (2, 2)}, "rising numbers up to 2"),
        ({"sets": (0, 2)}, "rising numbers up to 2"),
        ({"sets": (1,)}, "rising numbers up to 2"),
        ({"sets": (2,)}, "halves on both sides of a moment may take"),
        ({"tensors": (1, 0)}, "halves on both sides of a moment may take"),
        ({"network_s": 17.17}, "halves on both sides of a moment may take"),
        ({"network_s": 1e6}, "800 halves take less"),
        ({"network_s": 0.0}, "may take 0.0 s"),
    ],
)
def test_certificates_that_prove_nothing(change, error):
    bound = bound_of(TWO, SLOW)
    certificate = msgspec.structs.replace(bound.certificate, **change)
    with pytest.raises(InputError, match=error):
        verify_bound(Bound(bound.seconds, certificate), TWO, SLOW, sends="pairs")
