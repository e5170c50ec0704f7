"""`plan="auto"`: the plan comes from the training's own first steps, none lost or run twice."""

import pytest
from support import automatic, matrix_auto, training

from legato.schedule import SCHEDULERS

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("model", ["Convolutional", "Attention", "Recurrent"])
def test_weights_are_those_of_ddp_through_all_plans(two_ranks, model):
    for difference, plans, hooks, measured in two_ranks.run(
        automatic.automatic, model, automatic.DECIDED, "plain", True
    ):
        assert difference == 0.0 and hooks == 0
        assert plans[: automatic.OBSERVED] == ["ddp"] * automatic.OBSERVED
        assert set(measured) == set(plans[automatic.OBSERVED :]) <= set(SCHEDULERS)
        assert len(measured) > 2 and all(m.seconds > 0 and m.steps == 2 for m in measured.values())


@pytest.mark.parametrize("steps", [20, 22, 25])
def test_weights_in_the_middle_of_the_tournament(two_ranks, steps):
    for difference, plans, _, measured in two_ranks.run(automatic.automatic, "Convolutional", steps):
        assert difference == 0.0 and len(set(plans)) > 2 and measured == {}


@pytest.mark.parametrize("loop", sorted(automatic.LOOPS))
def test_every_way_to_train(two_ranks, loop):
    outcomes = two_ranks.run(automatic.automatic, "Convolutional", automatic.DECIDED, loop)
    for difference, _, hooks, measured in outcomes:
        assert difference == 0.0 and hooks == 0 and len(measured) > 2
    assert outcomes[0][1] == outcomes[1][1]  # the same plan in every pass


def test_gradients_that_are_lent(two_ranks):
    for difference, _, _, measured in two_ranks.run(automatic.automatic_lending, "Attention"):
        assert difference == 0.0 and len(measured) > 2


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize(("model", "loop"), [("Attention", "plain"), ("Convolutional", "evaluating")])
def test_sharded_plans_compete(two_ranks, shard, model, loop):
    outcomes = two_ranks.run(automatic.automatic_sharding, shard, model, automatic.DECIDED, loop)
    for difference, plans, hooks, measured in outcomes:
        assert difference == 0.0 and hooks == 0 and len(measured) > 2 and "ddp" in plans


def test_plans_of_all_kinds_compete(two_ranks):
    first, second = two_ranks.run(automatic.competing)
    for difference, names, measured, winner in (first, second):
        assert difference == 0.0
        assert names[:14] == ["p0"] * 4 + ["p1"] * 2 + ["p2"] * 4 + ["p1"] * 2 + ["p0"] * 2
        assert set(names[14:]) == {winner} and set(measured) == {"p0", "p1", "p2"}
    assert first[3] == second[3]


def test_before_there_is_a_plan_the_buckets_do(two_ranks):
    for difference, plans, _, _ in two_ranks.run(automatic.automatic, "Convolutional", 6):
        assert difference == 0.0 and set(plans) == {"ddp"}


@pytest.mark.parametrize("steps", [1, 6, 18, 21])
def test_join_while_plans_are_tried(two_ranks, steps):
    assert two_ranks.run(automatic.join_while_plans_are_tried, steps) == [(0.0, "join() was used")] * 2


@pytest.mark.parametrize("steps", [1, 6, 18, 21])
def test_a_communication_hook_while_plans_are_tried(two_ranks, steps):
    expected = (0.0, "the model uses a communication hook")
    assert two_ranks.run(automatic.hook_while_plans_are_tried, steps) == [expected] * 2


def test_steps_with_other_ops_each_time(two_ranks):
    assert two_ranks.run(automatic.automatic_with_changing_steps) == [(0.0, "ddp", True)] * 2


def test_a_recorder_that_refuses_every_step(two_ranks):
    assert two_ranks.run(automatic.automatic_that_cannot_be_recorded) == ["ddp"] * 2


def test_inputs_that_cannot_be_recorded(two_ranks):
    assert two_ranks.run(automatic.automatic_with_sparse_inputs) == [(0.0, "ddp")] * 2


def test_two_models_that_are_trained_together(two_ranks):
    for difference, plans, observed in two_ranks.run(automatic.automatic_for_two_models):
        assert difference == 0.0 and set(plans) <= set(SCHEDULERS) and observed == [False, False]


def test_calibration_is_the_same_on_every_rank(two_ranks):
    first, second = two_ranks.run(automatic.calibrated)
    assert first == second
    _, workers, fitted, seconds = first
    assert workers == 2 and fitted > 0 and len(seconds) == 3 and min(seconds) > 0


@pytest.mark.parametrize("contest", ["ddp", "plan", "turns"])
@pytest.mark.parametrize("row", matrix_auto.ROWS, ids=lambda row: row.__name__)
def test_what_people_write(two_ranks, row, contest):
    """DDP's passes stay, another plan does, or they take turns."""
    assert two_ranks.run(automatic.hastily, contest, row) == [0.0, 0.0]


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_gradients_of_sharded_optimizers_that_are_cleared_by_hand(two_ranks, shard):
    assert two_ranks.run(training.sharded, shard, matrix_auto.cleared_by_hand) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("sharded", "model: FSDP shards its parameters, and sends its gradients itself"),
        ("meta", "model: first.weight is on the meta device and has no values"),
        ("scheduler", "optimizer: StepLR is a learning-rate scheduler (expected the optimizer that it schedules)"),
        ("parameters", "optimizer: list has no step() (expected a torch.optim.Optimizer)"),
        ("option", "unknown option 'shrad'; did you mean 'shard'?"),
    ],
)
def test_refusals(two_ranks, what, expected):
    for said in two_ranks.run(automatic.refused, what):
        assert said.startswith(expected)


def test_a_rank_that_calls_before_another_says_for_whom_it_waits(two_ranks):
    first, _ = two_ranks.run(automatic.late_call)
    assert "legato: rank 0 waits: rank 1 has not called what this rank has (legato.distribute()?)\n" in first


def test_what_legato_cannot_do_it_undoes(two_ranks):
    (said, *first), (silent, *second) = two_ranks.run(automatic.said_and_undone)
    assert first == second == [0.0, "ddp"] and silent == ""
    assert said.splitlines() == [
        "legato: 12 steps are observed; then the network is measured, and plans are made and tried",
        "legato: no plan could be made: ZeroDivisionError: no",
        "legato: DDP's own passes stay",
    ]
