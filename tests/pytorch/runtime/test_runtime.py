"""The runtime on real processes: the weights are DDP's, whatever the plan.

On two ranks a sum has one order only, so the weights must be equal bit for
bit. On three, the order of a sum depends on where a number lies in its
message; there one gradient is held against the exact sum with the bound of
rounding analysis, and many steps against the distance that DDP has from itself.
"""

import multiprocessing

import pytest
from support import PATIENCE_S, runtime_cases, training

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("model", ["Convolutional", "Attention", "Recurrent", "Checkpointed"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_weights_are_those_of_ddp(two_ranks, model, optimizer):
    assert two_ranks.run(runtime_cases.equality, model, optimizer) == [0.0, 0.0]


@pytest.mark.parametrize("optimizer", sorted(training.OPTIMIZERS))
def test_any_optimizer(two_ranks, optimizer):
    assert two_ranks.run(runtime_cases.equality, "Attention", optimizer) == [0.0, 0.0]


@pytest.mark.parametrize("seed", range(5))
def test_any_plan(two_ranks, seed):
    assert two_ranks.run(runtime_cases.equality, "Convolutional", "adam", 100 + seed) == [0.0, 0.0]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_parameters_without_gradient(two_ranks, optimizer):
    assert two_ranks.run(runtime_cases.equality, "Partial", optimizer, 3, True) == [0.0, 0.0]


@pytest.mark.parametrize("zero", ["before", "between", "after"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_anywhere(two_ranks, zero, set_to_none):
    assert two_ranks.run(runtime_cases.equality_zeroing, zero, set_to_none) == [0.0, 0.0]


@pytest.mark.parametrize(
    "case",
    [
        runtime_cases.equality_clipping,
        runtime_cases.equality_value_clipping,
        runtime_cases.equality_gradients_changed,
        runtime_cases.equality_skipped_steps,
        runtime_cases.equality_two_steps,
        runtime_cases.equality_own_hooks,
        runtime_cases.equality_schedule,
        runtime_cases.equality_accumulation,
        runtime_cases.equality_synced_accumulation,
        runtime_cases.equality_lbfgs,
        runtime_cases.adopting,
    ],
    ids=lambda f: f.__name__,
)
def test_habits_of_training_scripts(two_ranks, case):
    assert two_ranks.run(case) == [0.0, 0.0]


def test_parameter_groups_and_strangers(two_ranks):
    assert two_ranks.run(runtime_cases.equality_groups) == [(0.0, True)] * 2


def test_hooks_on_the_optimizer_run_once_a_step(two_ranks):
    assert two_ranks.run(runtime_cases.equality_hooked_optimizer) == [(0.0, 8)] * 2


def test_evaluation_and_checkpoints_see_the_update(two_ranks):
    assert two_ranks.run(runtime_cases.equality_evaluation) == [True, True]


def test_models_that_are_gone_leave_no_groups_and_no_threads(two_ranks):
    for groups, threads in two_ranks.run(runtime_cases.left_behind):
        assert groups == 0 and threads <= 0


def test_a_change_of_plan_frees_the_buckets(two_ranks):
    assert two_ranks.run(runtime_cases.freed) == [[0, 0, 0]] * 2


def test_two_backward_passes_before_a_step(two_ranks):
    assert two_ranks.run(runtime_cases.sending_twice) == [0.0, 0.0]


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("what", ["whole", "halves", "optimizer", "gradients"])
def test_passes_become_ddps_and_legatos_again(two_ranks, what, views):
    assert two_ranks.run(runtime_cases.to_and_fro, what, views) == [(0.0, 6)] * 2


def test_an_optimizer_of_another_model_is_left_alone(two_ranks):
    assert two_ranks.run(runtime_cases.foreign_optimizer) == [True, True]


@pytest.mark.parametrize("seed", range(3))
def test_gradient_within_the_rounding_bound(three_ranks, seed):
    assert all(error <= 1 for error in three_ranks.run(runtime_cases.reduced_gradient, seed))


def test_many_steps_within_the_noise_of_ddp(three_ranks):
    for own, ours in three_ranks.run(runtime_cases.own_distance, "Attention", "momentum"):
        assert ours <= 10 * own + 1e-6


def test_updates_wait_until_they_are_read(two_ranks):
    for gated, shape, still_gated, plain, moved in two_ranks.run(runtime_cases.deferral):
        assert gated and shape == (10, 256) and still_gated and plain and moved


def test_updates_wait_where_gradients_are_views_of_buckets(two_ranks):
    for gated, *_ in two_ranks.run(training.lent, runtime_cases.deferral):
        assert gated


def test_what_a_rank_sends_last_arrives_where_it_ends_at_once(tmp_path):
    context = multiprocessing.get_context("forkserver")  # its processes end by `os._exit()`
    ranks = [context.Process(target=runtime_cases.leave, args=(rank, str(tmp_path))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE_S)
    assert [rank.exitcode for rank in ranks] == [0, 0] and (tmp_path / "model").exists()


def test_gradients_that_are_sent_in_halves_wait(two_ranks):
    assert two_ranks.run(runtime_cases.waiting_in_halves) == [[True] * 3] * 2


def test_copies_and_pickles(two_ranks):
    assert two_ranks.run(runtime_cases.copies) == [(True, 0.0, True, True)] * 2


def test_a_plan_without_overlap_leaves_nothing_pending(two_ranks):
    assert two_ranks.run(runtime_cases.whole_without_overlap) == [True, True]


def test_measured_timelines(two_ranks):
    for count, messages, planned, kinds, seconds, shortest in two_ranks.run(runtime_cases.tracing):
        assert count == 4 and all(s > 0 for s in seconds)
        assert shortest > 0  # what ends as an iteration begins is not in it
        assert all(m >= planned for m in messages)
        assert kinds == ["backward", "forward", "message", "optimizer"]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (runtime_cases.other_plan_on_rank_1, "RankError: rank 1: plan: random"),
        (runtime_cases.plan_of_another_model, "PlanError: the plan is for another model"),
        (
            runtime_cases.plan_that_cuts_an_element,
            "PlanError: messages[0]: 'weight' is split inside an element of 4 bytes",
        ),
        (runtime_cases.other_model_on_rank_1, "RankError: rank 1: parameter 'left.weight': (4, 8, 1, 1)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refusals_reach_every_rank(case, expected):
    from support.ranks import Ranks

    ranks = Ranks(2)  # of their own: a failed backward pass leaves them out of step
    try:
        for error in ranks.errors(case):
            assert expected in error
    finally:
        ranks.close()
