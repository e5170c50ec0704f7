"""Updates wait for whole tensors: what the bounds "whole" and "sequences" prove with that, against brute force.

`PYTHONPATH=tests python tests/schedule/bound/test_whole.py 400` prints how far the bound and legato are from the
optimum of 400 small cases.
"""

import itertools
import random
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.updated_chains import best_of_all, best_with_halves, case, chain, cluster_of

from legato.core.errors import InputError
from legato.schedule import schedule
from legato.schedule.bound.check import verify_bound
from legato.schedule.bound.lower_bound import Bound, lower_bound
from legato.schedule.bound.waiting_updates import WHOLE, WaitingUpdates
from legato.simulator.collective import iteration_time


@pytest.mark.parametrize("seed", range(40))
def test_against_brute_force(seed):
    workload, cluster = case(seed)
    best = best_of_all(workload, cluster)
    for order, sends in itertools.product(("captured", "any"), ("halves", "pairs", "all_reduces")):
        bound = lower_bound(workload, cluster, order=order, sends=sends)
        assert bound.seconds <= best * (1 + 1e-12)
        verify_bound(bound, workload, cluster, order=order, sends=sends)


@pytest.mark.parametrize("sends", ["halves", "pairs"])
@pytest.mark.parametrize("seed", range(25))
def test_against_brute_force_with_halves(seed, sends):
    draw = random.Random(seed)
    units = draw.choice([[1, 1], [1, 2], [2, 1], [1, 1, 1]])
    times = [[float(draw.randint(0, most)) for _ in units] for most in (2, 3, 5)]
    workload, cluster = chain(times[0], times[1], units, times[2]), cluster_of(draw.choice([0.5, 2.0, 6.0]), 2.0)
    best = best_with_halves(workload, cluster, sends)
    for order in ("captured", "any"):
        bound = lower_bound(workload, cluster, order=order, sends=sends)
        assert bound.seconds <= best * (1 + 1e-12)
        verify_bound(bound, workload, cluster, order=order, sends=sends)


def survey(count):
    """How far from the optimum of all-reduces the bound and legato are."""
    below, above = [], []
    for seed in range(count):
        workload, cluster = case(seed)
        best = best_of_all(workload, cluster)
        below.append(1 - lower_bound(workload, cluster, sends="all_reduces").seconds / best)
        above.append(iteration_time(workload, schedule("legato", workload, cluster), cluster) / best - 1)
    for name, far in (("bound below", below), ("legato above", above)):
        near = sum(x <= 0.005 for x in far) / count
        print(
            f"{name} the optimum: within 0.5% in {near:.0%}, {sum(far) / count:.1%} on average, {max(far):.1%} at most"
        )


#: The gradients of two layers are ready after 1 s. The second layer's is 8 s on the network and 4 s to update, the
#: first one's 1 s each.
LARGE = chain([0.0, 1.0], [1.0, 1.0], [1, 8], [1.0, 4.0])
QUICK = cluster_of(0.0, 1.0)


def test_a_large_tensor_by_hand():
    """If the large tensor arrives last, at 10, its update and a forward op follow; if first, at 9, everything does."""
    bound = lower_bound(LARGE, QUICK, sends="all_reduces")
    assert bound.seconds == pytest.approx(15.0, rel=1e-6)
    assert iteration_time(LARGE, schedule("legato", LARGE, QUICK), QUICK) == pytest.approx(15.0)


def two_large():
    """Two large tensors, of which either can come first, and a forward pass that needs both late."""
    return chain([0.0, 0.0, 1.0], [1.0, 0.0, 1.0], [1, 6, 6], [1.0, 5.0, 5.0])


def test_the_order_of_large_tensors_is_what_the_stream_waits_for():
    """The stream has nothing to do until the first large tensor comes, and too little until the second does."""
    workload = two_large()
    bound = lower_bound(workload, QUICK, sends="all_reduces")
    assert bound.certificate.case == "whole"
    seconds = iteration_time(workload, schedule("legato", workload, QUICK), QUICK)
    assert bound.seconds == pytest.approx(seconds, rel=1e-6)
    verify_bound(bound, workload, QUICK, sends="all_reduces")
    more = 0.001 * bound.seconds
    claims = msgspec.structs.replace(bound.certificate, network_s=bound.certificate.network_s + more)
    with pytest.raises(InputError, match="may take less than"):
        verify_bound(Bound(bound.seconds + more, claims), workload, QUICK, sends="all_reduces")
    with pytest.raises(InputError, match="on one stream"):
        verify_bound(bound, workload, QUICK, compute="unlimited", sends="all_reduces")


@pytest.mark.parametrize("alpha_s", [20.0, 40.0])
def test_what_one_dear_message_brings_is_updated_after_it(alpha_s):
    """One message is the best: backward pass, message, all updates and the forward pass follow one another."""
    workload, cluster = chain([1.0] * 4, [0.5] * 4, [1] * 4, [2.0] * 4), cluster_of(alpha_s, 0.5)
    bound = lower_bound(workload, cluster, sends="all_reduces")
    at_once = 4 + alpha_s + 4 * 0.5 + 4 * 2.0 + 4 * 0.5
    assert iteration_time(workload, schedule("single", workload, cluster), cluster) <= at_once
    assert bound.seconds == pytest.approx(
        iteration_time(workload, schedule("legato", workload, cluster), cluster), rel=2e-3
    )
    verify_bound(bound, workload, cluster, sends="all_reduces")


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 60), st.booleans()
)
def test_updates_that_wait_against_all_sets_of_tensors(tensors, amount, one_never):
    share, nbytes = np.array([float(s) for s, _ in tensors]), [n for _, n in tensors]
    never = [0] if one_never else []
    done = max(
        share[list(of)].sum()
        for size in range(len(tensors) + 1)
        for of in itertools.combinations([t for t in range(len(tensors)) if t not in never], size)
        if sum(nbytes[t] for t in of) <= amount
    )
    found = WaitingUpdates(share, nbytes).least_s(np.array([float(amount)]), never=never)
    assert found[0] == pytest.approx(share.sum() - done)


def test_of_many_tensors_parts_count_too():
    """Of equal tensors, the first ten are complete or not; of the others, parts are."""
    updates = WaitingUpdates(np.ones(WHOLE + 2), [2] * (WHOLE + 2))
    assert updates.least_s(np.array([1.0, 4.0, 5.0])).tolist() == [WHOLE + 1.5, WHOLE, WHOLE - 0.5]


if __name__ == "__main__":
    survey(int(sys.argv[1]))
