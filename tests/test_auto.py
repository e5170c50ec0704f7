"""`plan="auto"`: the plan comes from the training's own first steps, none lost or run twice."""

import pytest
from support import automatic

from legato.schedule import SCHEDULERS

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("model", ["Convolutional", "Attention", "Recurrent"])
def test_weights_are_those_of_ddp_before_and_after_the_plan(two_ranks, model):
    for difference, before, after, hooks in two_ranks.run(automatic.automatic, model):
        assert difference == 0.0
        assert before == "default-buckets" and after in SCHEDULERS
        assert hooks == 0


def test_before_there_is_a_plan_the_buckets_do(two_ranks):
    for difference, _, after, _ in two_ranks.run(automatic.automatic, "Convolutional", 6):
        assert difference == 0.0 and after == "default-buckets"


def test_steps_that_cannot_be_planned_for(two_ranks):
    assert two_ranks.run(automatic.automatic_with_changing_steps) == [(0.0, "default-buckets")] * 2


def test_a_recorder_that_refuses_every_step(two_ranks):
    assert two_ranks.run(automatic.automatic_that_cannot_be_recorded) == ["default-buckets"] * 2


def test_inputs_that_cannot_be_recorded(two_ranks):
    assert two_ranks.run(automatic.automatic_with_sparse_inputs) == [(0.0, "default-buckets")] * 2


def test_two_models_that_are_trained_together(two_ranks):
    for difference, plans in two_ranks.run(automatic.automatic_for_two_models):
        assert difference == 0.0 and set(plans) <= set(SCHEDULERS)


def test_calibration_is_the_same_on_every_rank(two_ranks):
    first, second = two_ranks.run(automatic.calibrated)
    assert first == second
    _, workers, fitted, seconds = first
    assert workers == 2 and fitted > 0 and len(seconds) == 3 and min(seconds) > 0
