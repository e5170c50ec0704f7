"""What is fitted to measurements of messages beside computation, and that two ranks measure the same."""

import pytest
import torch
from support.ranks import gathered, on_ranks

from legato.core import files
from legato.core.cluster import Contention, LinearCost
from legato.pytorch import calibrate
from legato.pytorch.network.contention import Contended, fit_contention

ALONE = LinearCost(2e-4, 1e-9)
SIZES = (2**16, 2**20, 2**24)


def sampled(contention, alone_s=0.25):
    """Messages that are in flight all the while, which the contention's own formulas delay and make expensive."""
    for nbytes in SIZES:
        message_s = ALONE.cost(nbytes) + contention.delay.cost(nbytes)
        pace = 1 - contention.overhead.cost(nbytes) / message_s
        yield Contended(nbytes, alone_s, alone_s / pace, message_s, contention.overhead.cost(nbytes))


def close(cost):
    return pytest.approx((cost.alpha_s, cost.beta_s_per_byte), rel=1e-6, abs=1e-15)


@pytest.mark.parametrize(
    ("delay", "overhead"),
    [
        (LinearCost(5e-3, 2e-9), LinearCost(4e-4, 1e-9)),  # loopback
        (LinearCost(5e-3, 2e-10), LinearCost(4e-4, 2e-10)),  # a link of 1 Gbit
    ],
)
def test_the_contention_that_made_the_measurements_is_found(delay, overhead):
    found = fit_contention(list(sampled(Contention(delay, overhead))), ALONE, 1e-10)
    assert (found.delay.alpha_s, found.delay.beta_s_per_byte) == close(delay)
    assert (found.overhead.alpha_s, found.overhead.beta_s_per_byte) == close(overhead)
    assert found.pack_s_per_byte == 1e-10


def test_processors_that_have_nothing_else_to_do_cost_computation_nothing():
    found = fit_contention([Contended(n, 0.25, 0.25, ALONE.cost(n), ALONE.cost(n)) for n in SIZES], ALONE)
    assert (found.delay.alpha_s, found.delay.beta_s_per_byte) == pytest.approx((0, 0), abs=1e-12)
    assert found.overhead == LinearCost(0.0, 0.0)


def test_computation_that_was_faster_beside_messages_has_no_negative_cost():
    found = fit_contention([Contended(n, 0.25, 0.2, ALONE.cost(n) / 2, 0.0) for n in SIZES], ALONE)
    assert min(found.delay.alpha_s, found.delay.beta_s_per_byte) >= 0 and found.overhead == LinearCost(0.0, 0.0)


def test_one_size_is_enough():
    found = fit_contention([Contended(1024, 0.25, 0.5, 0.01, 0.005)], LinearCost(1e-3, 0.0))
    assert found.delay.cost(1024) == pytest.approx(0.009) and found.overhead.cost(1024) == pytest.approx(0.005)


@pytest.mark.slow
@on_ranks(2)
def test_every_rank_measures_beside_its_own_computation_and_all_agree():
    matrix, calls = torch.randn(128, 128), 0

    def compute():
        nonlocal calls
        calls += 1
        for _ in range(20):
            matrix @ matrix

    found = calibrate(sizes=(1024, 2**20), compute=compute)
    measured = files.identity(found.cluster), found.cluster.contention, found.compute_s, calls
    assert gathered(measured) == [measured] * 2
    assert found.cluster.contention.pack_s_per_byte > 0 and found.cluster.contention.overhead.startup_s > 0
    assert found.compute_s > 0 and calls > 20
