"""The best shifts of jobs, against closed forms and shifts that are tried one by one."""

from dataclasses import replace

import numpy as np
import pytest
from support.flows import job

from legato.core.errors import InputError, TooLargeError
from legato.simulator.flow import Disturbance, Network, SharedJob, SharedNetwork, best_shifts
from legato.simulator.flow.shared.phases import DRIFTS, GRID, _longest_row

SECOND = 125_000_000  # bytes that a link of 1 Gbit/s carries in a second
FAIR = Network(workers=2, bandwidth_bps=1e9, sharing="fair")


def on_off(name, compute, send, **options):
    """A job that computes for some seconds, and then keeps all links of two hosts busy for others (test_jobs.py)."""
    return SharedJob(
        name=name, workload=job((round(send * SECOND),), forward=0.0, backward=compute), hosts=(0, 1), **options
    )


def lost(period, first, second, d):
    """Seconds by which iterations are longer that share a link fairly (derived in test_jobs.py)."""
    return max(0.0, min(first - d, second), min(second - (period - d), first))


def test_two_jobs_that_fit_have_a_shift_without_a_slowdown():
    """16 s, of which 4 and 6 s communicate. The second one begins to communicate 2 s before the first one if it has no
    shift; from 4 to 10 s after it, they do not meet: shifts of 6 to 12 s. The middle of these, 9 s, may be off by 3 s,
    that is by 18% of a period."""
    shared = SharedNetwork([on_off("a", 12, 4), on_off("b", 10, 6)], FAIR, iterations=8)
    found = best_shifts(shared)
    assert found.shift_s == pytest.approx((0.0, 9.0)) and found.times.slowdown == pytest.approx(1.0)
    assert [share for share, _ in found.drift] == list(DRIFTS)
    assert [slowdown for _, slowdown in found.drift] == pytest.approx([1.0] * len(DRIFTS))
    moments = [(shift - 2) % 16 for shift, _ in found.phases]
    assert len(moments) == GRID
    wanted = [1 + lost(16, 4, 6, d) / 16 for d in moments]
    assert [slowdown for _, slowdown in found.phases] == pytest.approx(wanted, rel=1e-6)
    assert found.worst == pytest.approx(1.25) and found.mean == pytest.approx(np.mean(wanted), rel=1e-6)
    # A period of 16.16 s: the phase moves by 0.16 s in an iteration, through all of them, and the mean is that of all,
    # up to where they have met: while they do, neither moves.
    assert 1.0 < found.longer < found.worst


def test_two_jobs_that_do_not_fit_have_none():
    """10 and 10 of 16 s. Nothing is better than 20 s each."""
    found = best_shifts(SharedNetwork([on_off("a", 6, 10), on_off("b", 6, 10)], FAIR, iterations=8))
    assert 20 / 16 * (1 - 1e-6) <= found.times.slowdown <= found.worst * (1 + 1e-12)


def test_a_shift_that_is_the_only_good_one_is_found_by_halves():
    """8 and 8 of 16 s fit exactly, 8 s apart; what is off by x % of a period costs x %."""
    found = best_shifts(SharedNetwork([on_off("a", 8, 8), on_off("b", 8, 8)], FAIR, iterations=8))
    assert found.shift_s[1] == pytest.approx(8.0, abs=16 / GRID / 8) and found.times.slowdown < 1.005
    assert [slowdown for _, slowdown in found.drift] == pytest.approx([1 + share for share in DRIFTS], abs=0.005)


def test_three_jobs_share_a_period():
    """4 of 16 s each: all fit, and no pair of them meets."""
    jobs = [on_off(name, 12, 4) for name in "abc"]
    found = best_shifts(SharedNetwork(jobs, FAIR, iterations=6))
    assert found.times.slowdown == pytest.approx(1.0)
    apart = [(a - b) % 16 for a, b in zip(found.shift_s, (*found.shift_s[1:], found.shift_s[0]), strict=True)]
    assert all(4 <= gap <= 12 for gap in apart)


def test_a_pace_keeps_the_best_shift_up():
    """With a pace of 17 s, a period that is 1% longer (16.16 s) changes nothing: no job drifts."""
    jobs = [on_off("a", 12, 4, pace_s=17.0), on_off("b", 10, 6, pace_s=17.0)]
    found = best_shifts(SharedNetwork(jobs, FAIR, iterations=8))
    assert found.times.slowdown == pytest.approx(17 / 16)
    # The slowdown of the longer job is over its own, longer time alone.
    assert found.longer == pytest.approx((17 / 16 + 17 / 16.16) / 2, rel=1e-3)


def test_jobs_that_do_not_meet_are_left_where_they_are():
    """On hosts of their own: all shifts are equally good."""
    jobs = [on_off("a", 8, 8), replace(on_off("b", 8, 8), hosts=(2, 3))]
    found = best_shifts(SharedNetwork(jobs, replace(FAIR, workers=4), iterations=6))
    assert found.shift_s == (0.0, 0.0) and found.worst == pytest.approx(1.0)


def test_what_is_urgent_is_not_moved_by_what_is_not():
    found = best_shifts(SharedNetwork([on_off("a", 8, 8), on_off("b", 8, 8)], FAIR, iterations=8), priority=[2, 1])
    assert found.times.jobs[0].slowdown == pytest.approx(1.0)


def test_the_longest_row_goes_round():
    assert _longest_row([1.0, 2.0, 1.0, 1.0]) == (2, 3)
    assert _longest_row([3.0, 1.0, 2.0, 1.0005]) == (1, 1)
    assert _longest_row([1.0, 1.0]) == (0, 2)


def test_there_is_no_best_shift_where_links_change():
    slow = Disturbance(kind="link", number=0, factor=2.0, start_s=1.0)
    shared = SharedNetwork([on_off("a", 12, 1)] * 2, replace(FAIR, disturbances=(slow,)))
    with pytest.raises(InputError, match="expected no disturbances"):
        best_shifts(shared)


@pytest.mark.slow
def test_a_search_that_takes_too_long_is_refused_before_it_begins(monkeypatch):
    jobs = [on_off(str(j), 12, 1) for j in range(8)]
    shared = SharedNetwork(jobs, FAIR, iterations=400)
    monkeypatch.setattr(SharedNetwork, "run", None)
    with pytest.raises(TooLargeError, match=r"simulations of .* transfers and computations .*20,000,000"):
        best_shifts(shared)
