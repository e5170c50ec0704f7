"""The bound "ranges", against brute force and its checker."""

import random

import msgspec
import pytest
from support.updated_chains import best_of_all, case, chain, cluster_of

from legato.core.errors import InputError
from legato.schedule import schedule
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.bound.check import verify_bound
from legato.schedule.bound.lower_bound import Bound, Certificate, cheapest_line, lower_bound
from legato.schedule.bound.range_ends import MOST
from legato.schedule.bound.ranges import ranges
from legato.simulator.collective import iteration_time


def bound_of(workload, cluster, order="captured", beat_s=1e-3):
    """The bound of this argument alone, and what it claims; None if it proves nothing."""
    times = heads_tails(workload, "one", order)
    found = ranges(workload, times, cheapest_line(cluster, workload.nbytes), beat_s=beat_s)
    return found and Bound(
        found.seconds, Certificate("ranges", found.tensors, 0.0, found.seconds, 0.0, sets=found.sets)
    )


@pytest.mark.parametrize("order", ["captured", "any"])
@pytest.mark.parametrize("seed", range(40))
def test_no_plan_is_faster_and_the_checker_agrees(seed, order):
    workload, cluster = case(seed)
    best = best_of_all(workload, cluster)
    bound = bound_of(workload, cluster, order, beat_s=0.3 * best)
    if bound:
        assert bound.seconds <= best * (1 + 1e-12)
        assert verify_bound(bound, workload, cluster, order=order, sends="all_reduces") >= bound.seconds


#: Both gradients are ready at once. The first layer's takes 4 s on the network, the second one's 12 s.
TWO = chain([0.0, 0.0], [1.0, 1.0], [1, 3], [4.0, 4.0])
DEAR = cluster_of(4.0, 4.0)


def test_two_messages_by_hand():
    """The first tensor arrives at 8, the second at 24, and is updated and read. Together they arrive at 20, and both
    updates follow."""
    bound = lower_bound(TWO, DEAR, sends="all_reduces")
    assert bound.certificate.case == "ranges" and bound.seconds == pytest.approx(29, rel=1e-4)
    assert iteration_time(TWO, schedule("legato", TWO, DEAR), DEAR) == best_of_all(TWO, DEAR) == 29


def layers(count, updates_s, forward_s=1.0):
    return chain([2 * forward_s] * count, [forward_s] * count, [1 + k % 3 for k in range(count)], [updates_s] * count)


def test_it_is_above_the_other_arguments_where_updates_and_messages_are_long():
    workload, cluster = layers(12, 2.0), cluster_of(2.0, 2.0)
    quick = lower_bound(workload, cluster, sends="all_reduces", thorough=False)
    bound = lower_bound(workload, cluster, sends="all_reduces")
    assert bound.certificate.case == "ranges" and bound.seconds > 1.03 * quick.seconds
    verify_bound(bound, workload, cluster, sends="all_reduces")
    more = 0.003 * bound.seconds
    claims = msgspec.structs.replace(bound.certificate, network_s=bound.certificate.network_s + more)
    with pytest.raises(InputError, match="bound: ranges of messages may take"):
        verify_bound(Bound(bound.seconds + more, claims), workload, cluster, sends="all_reduces")


@pytest.mark.parametrize("alpha_s", [0.4, 0.7])
def test_more_messages_than_are_counted(alpha_s):
    """Plans of many messages are no faster, and the checker counts as many of them."""
    workload, cluster = layers(60, 1.0, 2.0), cluster_of(alpha_s, 1.0)
    plan = schedule("legato", workload, cluster)
    seconds = iteration_time(workload, plan, cluster)
    assert seconds > (MOST + 1) * alpha_s
    bound = bound_of(workload, cluster)
    assert bound.seconds <= iteration_time(workload, schedule("fifo", workload, cluster), cluster)
    assert bound.seconds <= seconds * (1 + 1e-12)
    verify_bound(bound, workload, cluster, sends="all_reduces")


def test_no_random_plan_is_faster():
    rng = random.Random(0)
    for _ in range(20):
        count = rng.randint(3, 8)
        times = [[rng.uniform(0, most) for _ in range(count)] for most in (2, 2, 4)]
        units = [rng.randint(1, 4) for _ in range(count)]
        workload = chain(times[0], times[1], units, times[2])
        cluster = cluster_of(rng.uniform(0.1, 4), rng.uniform(0.1, 2))
        bound = bound_of(workload, cluster)
        best = min(iteration_time(workload, schedule(name, workload, cluster), cluster) for name in PLANS)
        assert bound is None or bound.seconds <= best * (1 + 1e-12)


#: Schedulers that send all-reduces.
PLANS = ("fifo", "single", "ddp", "merge-optimal", "pace", "p3")


def test_what_it_does_not_hold_for():
    cheap = cluster_of(1e-3, 4.0)
    assert bound_of(TWO, cheap, beat_s=TWO.compute_s) is None
    bound = bound_of(TWO, DEAR)
    with pytest.raises(InputError, match="case 'ranges' for pairs"):
        verify_bound(bound, TWO, DEAR, sends="pairs")
    with pytest.raises(InputError, match="on one stream"):
        verify_bound(bound, TWO, DEAR, compute="unlimited", sends="all_reduces")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"sets": ()}, "rising numbers up to 2"),
        ({"sets": (2, 2)}, "rising numbers up to 2"),
        ({"sets": (0, 2)}, "rising numbers up to 2"),
        ({"sets": (1,)}, "rising numbers up to 2"),
        ({"network_s": 29.1}, "ranges of messages may take"),
        ({"network_s": 0.0}, "may take 0.0 s"),
    ],
)
def test_certificates_that_prove_nothing(change, error):
    bound = bound_of(TWO, DEAR)
    certificate = msgspec.structs.replace(bound.certificate, **change)
    with pytest.raises(InputError, match=error):
        verify_bound(Bound(bound.seconds, certificate), TWO, DEAR, sends="all_reduces")
