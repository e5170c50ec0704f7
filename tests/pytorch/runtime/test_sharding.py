"""Sharded optimizers and gradients: weights are DDP's bit for bit on two ranks, or there is one clear line."""

import pytest
import torch
from support import matrix_ends, matrix_models, matrix_sharded, matrix_steps, training
from support import runtime_cases as cases
from support.pairwise import covering

from legato.pytorch.runtime.sharding.shards import ELEMENTWISE

pytestmark = pytest.mark.processes

SHARDS = pytest.mark.parametrize("shard", ["optimizer", "gradients"])


@pytest.mark.parametrize(
    ("model", "optimizer", "shard"),
    covering((sorted(training.MODELS), sorted(training.OPTIMIZERS), ("optimizer", "gradients"))),
)
def test_models_and_optimizers(two_ranks, model, optimizer, shard):
    found = two_ranks.run(training.sharded, shard, cases.equality, model, optimizer, 0, model == "Partial")
    assert found == [0.0, 0.0]


@SHARDS
@pytest.mark.parametrize("name", sorted(kind.__name__ for kind in ELEMENTWISE))
def test_every_elementwise_optimizer_of_torch_in_all_its_variants(two_ranks, name, shard):
    for found in two_ranks.run(training.sharded, shard, matrix_steps.optimizer_variants, name):
        assert all("'differentiable': True" in variant for variant in found)  # which are refused


@SHARDS
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero", ["before", "between", "after"])
def test_zeroing(two_ranks, zero, set_to_none, shard):
    assert two_ranks.run(training.sharded, shard, cases.equality_zeroing, zero, set_to_none) == [0.0, 0.0]


ROWS = [
    cases.equality_skipped_steps,
    cases.equality_own_hooks,
    cases.equality_schedule,
    cases.equality_accumulation,
    matrix_sharded.clipped_by_value,
    matrix_sharded.scaled,
    matrix_sharded.several_optimizers,
    matrix_sharded.copied_between,
    matrix_sharded.left_out,
    matrix_sharded.left_out_last,
    matrix_sharded.added_to_the_optimizer,
]


@SHARDS
@pytest.mark.parametrize("case", ROWS, ids=lambda f: f.__name__)
def test_row(two_ranks, case, shard):
    assert two_ranks.run(training.sharded, shard, case) == [0.0, 0.0]


@SHARDS
@pytest.mark.parametrize("seed", range(4))
def test_random_trainings(two_ranks, seed, shard):
    assert two_ranks.run(training.sharded, shard, matrix_sharded.random_model, seed) == [0.0, 0.0]


@SHARDS
def test_random_trainings_on_four_ranks(four_ranks, shard):
    found = four_ranks.run(training.in_double, training.sharded, shard, matrix_sharded.random_model, 5)
    assert max(found) < 1e-9


@pytest.mark.parametrize(("name", "dtype"), [("adam-fused", torch.float32), ("momentum", torch.bfloat16)])
def test_tensors_are_cut_where_vectors_end(two_ranks, name, dtype):
    assert two_ranks.run(training.sharded, "optimizer", matrix_sharded.whole_tensors, name, dtype) == [0.0, 0.0]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_by_norm(two_ranks, norm_type):
    # The norm of all gradients is added up in another order, and so may differ in its last bits.
    assert max(two_ranks.run(training.sharded, "optimizer", matrix_sharded.clipped, norm_type)) < 1e-4


@SHARDS
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("plans", [("sharded",), ("whole", "sharded")], ids=len)
def test_a_plan_that_comes_between_a_step_and_zero_grad(two_ranks, plans, set_to_none, shard):
    case = training.sharded, shard, matrix_sharded.plan_between, plans, set_to_none
    assert two_ranks.run(*case) == [0.0, 0.0]
    assert two_ranks.run(training.lent, *case) == [0.0, 0.0]


@SHARDS
def test_compiled_again_with_parameters_that_no_optimizer_has(two_ranks, shard):
    case = training.compiled, training.sharded, shard, matrix_sharded.evaluated
    assert two_ranks.run(*case) == [0.0, 0.0]


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_nan_of_one_rank_is_in_the_norm_of_all(two_ranks, norm_type):
    assert two_ranks.run(training.sharded, "optimizer", matrix_sharded.not_finite, norm_type) == [True, True]


def test_a_rank_that_clips_alone_says_so(two_ranks):
    said = two_ranks.run(training.sharded, "optimizer", matrix_sharded.clipped_on_one_rank)
    assert "rank 0: clipping gradients by their norm after backward pass 3: " in said[0]
    assert "of backward pass 3 failed" in said[1]
    two_ranks.close(force=True)
    two_ranks._start()


@SHARDS
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "momentum", "adagrad", "rmsprop-foreach"])
def test_states_go_from_sharded_to_whole_and_back(two_ranks, optimizer, shard):
    assert two_ranks.run(training.sharded, shard, matrix_sharded.states, optimizer) == [0.0, 0.0]


def test_resuming_on_another_number_of_ranks(two_ranks, three_ranks, tmp_path):
    path = str(tmp_path / "checkpoint.pt")
    two_ranks.run(training.sharded, "optimizer", matrix_sharded.first_half, path)
    assert two_ranks.run(matrix_ends.second_half, path) == [0.0, 0.0]
    assert two_ranks.run(training.sharded, "gradients", matrix_ends.second_half, path) == [0.0, 0.0]
    assert max(three_ranks.run(training.sharded, "optimizer", matrix_ends.second_half, path)) < 1e-5


def test_sharded_gradients_have_no_memory_of_their_own(two_ranks):
    kept, _ = two_ranks.run(training.sharded, "optimizer", matrix_sharded.released)[0]
    assert kept[0] > 0
    assert two_ranks.run(training.sharded, "gradients", matrix_sharded.released) == [[(0, 0), (0, 0)]] * 2


def test_few_gradients_have_memory_beside_the_messages_into_which_they_are_packed(two_ranks, tmp_path):
    case = training.sharded, "optimizer", matrix_sharded.most_held, str(tmp_path / "memory")
    for gradients, most in two_ranks.run(*case):
        assert most < gradients / 2


@SHARDS
@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("read", "first.weight: the average of its gradient is sharded, and no rank has all of it: clip with"),
        ("twice", "a second backward pass before step() or zero_grad(): the average of its gradient is sharded"),
        ("two steps", "step() without an averaged gradient"),
        ("only no_sync", "step() without an averaged gradient: the last backward pass ran under no_sync()"),
        ("not cleared", "step() has used its gradient up, and nothing can be added to it: call zero_grad()"),
        ("another plan", "step() has used its gradient up, and nothing can be added to it: call zero_grad()"),
        ("a plan without shards", "step() has used its gradient up, and nothing can be added to it: call zero_grad()"),
        ("a layer less without shards", "second.weight: step() has used its gradient up, and nothing can be added to"),
        ("added before the step", "step() of a sharded optimizer that got other parameters since the backward pass"),
        ("norm of order 0", "norm_type: 0 with a sharded plan (expected a positive number)"),
        ("two optimizers", "optimizer: SGD has a parameter of another optimizer, and is sharded (expected one"),
        ("no gradients", "no averaged gradients: a backward pass has to come first"),
        ("held", "third.weight: the average of its gradient is sharded"),
        ("one rank steps", "ranks [0] have called step(), and ranks [1] have not"),
    ],
)
def test_what_cannot_be_done_is_said(two_ranks, what, line, shard):
    for said in two_ranks.run(training.sharded, shard, matrix_sharded.said, what):
        assert line in said


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("LBFGS", "InputError: optimizer: LBFGS cannot be sharded (expected one that treats every element alone: SGD,"),
        ("Adafactor", "InputError: optimizer: Adafactor cannot be sharded"),
        ("sparse", "has sparse gradients"),
        ("other", "InputError: shard: 'gradients', but the plan has 'optimizer'"),
        ("unknown", "InputError: unknown shard 'everything'"),
    ],
)
def test_what_cannot_be_sharded_is_refused(two_ranks, what, line):
    for said in two_ranks.errors(training.sharded, "optimizer", matrix_sharded.refused, what):
        assert line in said


def test_a_sharded_plan_is_refused_for_an_optimizer_that_was_managed_before(two_ranks):
    for said in two_ranks.errors(training.sharded, "optimizer", matrix_sharded.adopted, "LBFGS"):
        assert "InputError: optimizer: LBFGS cannot be sharded" in said


@pytest.mark.parametrize("case", [cases.equality_clipping, matrix_steps.scaled, matrix_models.uneven_inputs])
def test_what_would_be_wrong_is_refused(two_ranks, case):
    for said in two_ranks.errors(training.sharded, "optimizer", case):
        assert "sharded" in said


@pytest.mark.parametrize("model", ["Attention", "Partial"])
def test_gradients_that_are_views_leave_their_parameters_when_they_are_packed(two_ranks, model):
    case = training.lent, training.sharded, "optimizer", cases.equality, model, "adam", 0, model == "Partial"
    assert two_ranks.run(*case) == [0.0, 0.0]
