"""Plans that take turns, by a clock that the tests set."""

import itertools
import random

import pytest

from legato.core.plan import Message, Plan, Slice
from legato.pytorch.runtime.attached.tournament import (
    FEWEST_ROUNDS,
    FEWEST_STEPS,
    FIRST_UNTIMED,
    MOST_STEPS,
    UNTIMED,
    Tournament,
    most_steps,
)

PLANS = [Plan(name, (Message((Slice("w", 0, 4),)),)) for name in ("ddp", "few", "many", "most")]


class Clock:
    time_s = 0.0

    def now(self):
        return self.time_s

    def settle(self):
        pass

    def seconds(self, start, stop):
        return stop - start


def play(seconds, plans=PLANS, gather=lambda numbers: [numbers], switch_s=100.0):
    """The plans of all steps, and the tournament at its end; step number n under a plan takes `seconds(name, n)`."""
    clock, used = Clock(), []
    tournament = Tournament(plans, gather, clock)
    while tournament.goes_on:
        name = tournament.plan.scheduler
        clock.time_s += seconds(name, len(used)) + switch_s * (used[-1:] != [name])
        used.append(name)
        tournament.step_ended()
    return used, tournament


def always(**seconds):
    return lambda name, step: seconds[name]


def test_the_fastest_wins_and_what_was_measured_is_known():
    _, tournament = play(always(ddp=1.0, few=0.9, many=0.8, most=1.5))
    assert tournament.plan.scheduler == "many"
    assert {name: found.seconds for name, found in tournament.measured.items()} == pytest.approx(
        {"ddp": 1.0, "few": 0.9, "many": 0.8, "most": 1.5}
    )
    assert all(found.steps == FEWEST_ROUNDS * FEWEST_STEPS for found in tournament.measured.values())


def test_turns_alternate_and_begin_with_untimed_steps():
    used, _ = play(always(ddp=1.0, few=0.9, many=0.8, most=1.5))
    names = [plan.scheduler for plan in PLANS]
    first = [name for name in names for _ in range(FIRST_UNTIMED + FEWEST_STEPS)]
    later = [name for name in (*names[::-1], *names, *names[::-1]) for _ in range(UNTIMED + FEWEST_STEPS)]
    assert used == ["ddp"] * (UNTIMED + FEWEST_STEPS) + first + later


def test_after_each_round_it_is_known_how_many_steps_may_come():
    clock, left = Clock(), {}
    tournament = Tournament(PLANS, lambda numbers: [numbers], clock)
    steps = 0
    while tournament.goes_on:
        left.setdefault(tournament.rounds, steps + tournament.most_left)
        clock.time_s += {"ddp": 1.0, "few": 2.0, "many": 1.0, "most": 2.0}[tournament.plan.scheduler]
        tournament.step_ended()
        steps += 1
    assert list(left) == list(range(tournament.rounds)) and tournament.rounds >= FEWEST_ROUNDS
    assert all(later <= sooner for sooner, later in itertools.pairwise(list(left.values())[1:]))
    assert min(left.values()) >= steps


def test_of_equals_the_first_wins_and_the_tournament_is_short():
    used, tournament = play(always(ddp=1.0, few=0.997, many=1.0, most=1.003))
    assert tournament.plan.scheduler == "ddp"
    turns = 1 + FEWEST_ROUNDS * len(PLANS)
    assert len(used) == turns * (UNTIMED + FEWEST_STEPS) + len(PLANS) * (FIRST_UNTIMED - UNTIMED)


def test_within_the_scatter_plans_are_equal_and_a_tournament_has_an_end():
    for seed in range(20):
        noise = random.Random(seed)
        used, _ = play(lambda name, step, noise=noise: noise.gauss(0.97 if name == "many" else 1.0, 0.2), switch_s=0.0)
        assert len(used) <= most_steps(len(PLANS), 1.0) == 173
    assert most_steps(len(PLANS), 0.002) < 1000  # in two seconds


def test_slow_plans_are_out_and_a_close_race_goes_on():
    def seconds(name, step):
        return {"ddp": 1.0, "few": 0.98 + 0.03 * (-1) ** (step // 40), "many": 2.0, "most": 3.0}[name]

    _, tournament = play(seconds)
    assert tournament.measured["many"].steps == tournament.measured["most"].steps == FEWEST_ROUNDS * FEWEST_STEPS
    assert tournament.measured["few"].steps > FEWEST_ROUNDS * FEWEST_STEPS
    assert tournament.plan.scheduler == "ddp"


def test_single_disturbances_do_not_decide():
    def seconds(name, step):
        return (0.9 if name == "few" else 1.0) + 50.0 * (step % 11 == 0) + 9.0 * (60 <= step < 65)

    _, tournament = play(seconds)
    assert tournament.plan.scheduler == "few"
    assert tournament.measured["few"].seconds == pytest.approx(0.9)


def test_what_slows_the_machine_slows_all_plans():
    _, tournament = play(lambda name, step: (0.95 if name == "few" else 1.0) * (1 + step / 50))
    assert tournament.plan.scheduler == "few"


@pytest.mark.parametrize(("step_s", "steps"), [(1.0, FEWEST_STEPS), (0.01, 20), (1e-6, MOST_STEPS)])
def test_fast_steps_have_long_turns(step_s, steps):
    _, tournament = play(lambda name, step: step_s, switch_s=0.0)
    assert tournament.measured["ddp"].steps == FEWEST_ROUNDS * steps


def test_the_slowest_rank_counts():
    """The other rank is as fast, but under `few`, which is in the second place of a round."""

    def gather(numbers):
        return [numbers, [2 * s if s == pytest.approx(0.5) else s for s in numbers]]

    _, tournament = play(always(ddp=0.9, few=0.5, many=1.2, most=1.2), gather=gather)
    assert tournament.plan.scheduler == "ddp"
    assert tournament.measured["few"].seconds == pytest.approx(1.0)


def test_all_ranks_exchange_numbers_after_each_turn():
    counts = []
    play(
        always(ddp=1.0, few=1.004, many=2.0, most=3.0), gather=lambda numbers: counts.append(len(numbers)) or [numbers]
    )
    assert counts == [1] * (1 + FEWEST_ROUNDS * len(PLANS))


def test_what_was_measured_scatters():
    _, tournament = play(lambda name, step: 1.0 + 0.1 * (step % 2), switch_s=0.0)
    assert all(found.scatter < 0.1 for found in tournament.measured.values())


def test_a_single_plan_needs_no_tournament():
    used, tournament = play(always(), PLANS[:1])
    assert used == [] and tournament.plan is PLANS[0] and tournament.measured == {}
