"""The equality matrix: weights after ten steps are DDP's bit for bit on two ranks, or there is one clear line."""

import itertools

import pytest
import torch
from support import matrix_ddp, matrix_ends, matrix_floor, matrix_models, matrix_readers, matrix_steps, training
from support.pairwise import covering

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", sorted(set(matrix_steps.OPTIMIZERS) - set(matrix_steps.OTHERWISE)))
def test_every_optimizer_of_torch_in_all_its_variants(two_ranks, name):
    assert two_ranks.run(matrix_steps.optimizer_variants, name) == [{}, {}]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("name", sorted(matrix_steps.PER_STEP))
def test_schedulers_per_step(two_ranks, name, early):
    assert two_ranks.run(matrix_steps.scheduler_per_step, name, early) == [(0.0, True)] * 2


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adafactor", "Muon"])
def test_autocast(two_ranks, name):
    assert two_ranks.run(matrix_steps.autocast, name) == [0.0, 0.0]


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling(two_ranks, fused):
    assert two_ranks.run(matrix_steps.scaled, fused) == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(two_ranks, dtype):
    assert two_ranks.run(matrix_steps.precision, dtype) == [0.0, 0.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite(two_ranks, value):
    assert two_ranks.run(matrix_steps.not_finite, value) == [True, True]


@pytest.mark.parametrize("which", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
def test_reentrant_checkpointing(two_ranks, which):
    assert two_ranks.run(matrix_models.reentrant, which) == [0.0, 0.0]


ROWS = [
    matrix_steps.several_optimizers,
    matrix_steps.scheduler_per_epoch,
    matrix_steps.mixed,
    matrix_steps.complex_weights,
    matrix_models.wandering,
    matrix_models.unfrozen,
    matrix_models.added,
    matrix_models.compiled_function,
    matrix_models.own_hooks,
    matrix_models.late_hooks,
    matrix_models.missing_gradient,
    matrix_models.zeroed_after_backward,
    matrix_models.complex_on_one_rank,
    matrix_models.local_after_sending,
    matrix_models.averaged,
    matrix_models.inference,
    matrix_models.closures,
    matrix_steps.scaled,
    matrix_models.uneven_inputs,
    matrix_ends.caught,
    matrix_ends.replaced,
    *matrix_readers.ROWS,
    *matrix_ddp.ROWS,
    *matrix_floor.ROWS,
]

#: Those about gradients that have memory of their own, or have not.
COPIED = (matrix_readers.gradients_held, matrix_floor.kept_gradients, matrix_floor.scaled_gradients)
#: Those that compare more than weights, bit for bit, or compute in less than float64 whatever the default is.
ON_TWO_RANKS = (
    matrix_floor.kept_gradients, matrix_floor.post_hooks, matrix_steps.mixed, matrix_steps.complex_weights,
    matrix_ddp.fp16_hook, matrix_ddp.wrapped_hook, matrix_ddp.hook_of_a_users_ddp,
    matrix_floor.adafactor_of_several_dtypes,
)  # fmt: skip
#: Those that mean the same for optimizers and gradients that are sharded.
SHARDED = (
    matrix_steps.scheduler_per_epoch, matrix_steps.complex_weights, matrix_models.wandering, matrix_models.unfrozen,
    matrix_models.added, matrix_models.compiled_function, matrix_models.own_hooks, matrix_models.late_hooks,
    matrix_models.missing_gradient, matrix_models.averaged, matrix_models.inference, matrix_models.closures,
    *(row for row in matrix_readers.ROWS if row.__name__ not in ("gradients_held", "optimizer_without_init")),
    matrix_ddp.static_graph, matrix_ddp.ignored, matrix_models.zeroed_after_backward,
)  # fmt: skip
#: Each row runs once as it is; then, with every value of these, in cases in which every two of them meet too.
DIMENSIONS = ROWS, ("own", "views"), (2, 4), ("none", "optimizer", "gradients")
PLAIN = [(row, "own", 2, "none") for row in ROWS]


def makes_sense(row, gradients, ranks, shard):
    """Whether a row has a meaning with these."""
    unfit = (gradients == "views" and row in COPIED, ranks == 4 and row in ON_TWO_RANKS)
    return not any(unfit) and (shard == "none" or row in SHARDED)


VARIANTS = covering(DIMENSIONS, makes_sense, PLAIN)


def words(value):
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("row", "gradients", "ranks", "shard"), PLAIN + VARIANTS, ids=words)
def test_row(two_ranks, four_ranks, row, gradients, ranks, shard):
    case = (row,) if shard == "none" else (training.sharded, shard, row)
    case = (training.lent, *case) if gradients == "views" else case
    if ranks == 2:
        assert two_ranks.run(*case) == [0.0, 0.0]
    else:  # whose sums are added up in other orders
        assert max(four_ranks.run(training.in_double, *case)) < 1e-9


def test_every_two_values_that_go_together_meet_in_a_case():
    cases = {frozenset(enumerate(case)) for case in PLAIN + VARIANTS}
    possible = [case for case in itertools.product(*DIMENSIONS) if makes_sense(*case)]
    for values in possible:
        for two in itertools.combinations(enumerate(values), 2):
            assert any(case >= set(two) for case in cases), two
    assert set(VARIANTS) <= set(possible) and len(VARIANTS) < len(possible) / 2


@pytest.mark.parametrize("name", ["Adadelta", "Adam", "Adamax", "NAdam", "RAdam", "Rprop", "SGD"])
def test_optimizers_on_four_ranks(four_ranks, name):
    for found in four_ranks.run(training.in_double, matrix_steps.optimizer_variants, name):
        assert all(value < 1e-9 for value in found.values())


def test_resuming_on_another_number_of_ranks(two_ranks, three_ranks, tmp_path):
    path = str(tmp_path / "checkpoint.pt")
    two_ranks.run(matrix_ends.first_half, path)
    assert two_ranks.run(matrix_ends.second_half, path) == [0.0, 0.0]
    assert max(three_ranks.run(matrix_ends.second_half, path)) < 1e-5


def test_hooks_on_an_optimizer_that_loaded_a_state_run_once(two_ranks):
    assert two_ranks.run(matrix_ends.hooks_after_loading) == [3, 3]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_one_process_on_the_whole_batch(three_ranks, optimizer):
    assert max(three_ranks.run(matrix_ends.whole_batch, optimizer)) < 1e-9


@pytest.mark.parametrize("what", ["parameters of two models", "backward passes in forward passes"])
def test_what_is_left_to_ddp(two_ranks, what):
    expected = {
        "parameters of two models": "it has a parameter of another model",
        "backward passes in forward passes": "backward passes run inside forward passes",
    }
    assert two_ranks.run(matrix_floor.left_to_ddp, what) == [expected[what]] * 2


def test_functions_are_scripted_while_updates_wait(two_ranks):
    assert two_ranks.run(matrix_readers.scripted_while_updates_wait) == [(True, 3.0)] * 2


def test_models_that_are_garbage_on_one_rank_only(two_ranks):
    assert two_ranks.run(matrix_floor.wrapped_before) == ["", ""]


@pytest.mark.parametrize(
    ("case", "arguments", "expected"),
    [
        (matrix_readers.unseen_reader_in_debug_mode, (), "first.weight is read by aten.t.default, which its gate"),
        (matrix_floor.stale, (), "first.weight was read before its last update, by something that legato cannot see; "),
        (matrix_ends.step_inside_the_backward_pass, (), "optimizer.step() inside a backward pass"),
        (matrix_ends.caught_in_the_backward_pass, (), "the last backward pass did not finish"),
        (matrix_ends.synchronized_batch_norm, (), "SyncBatchNorm layers only work with GPU modules"),
        (matrix_ends.other_settings, ("lr",), "rank 1: group 0 of the optimizer: 3 parameters"),
        (matrix_ends.other_settings, ("optimizer",), "rank 1: optimizer: Adam here, SGD on rank 0"),
        (
            matrix_ends.other_settings,
            ("dtype",),
            "rank 1: parameter 'third.weight': (10, 16) torch.float64 on cpu here",
        ),
        (matrix_ends.other_settings, ("frozen",), "rank 1: parameter 'third.weight': "),
        (matrix_ends.other_settings, ("torch",), "rank 1: torch.are_deterministic_algorithms_enabled(): True here"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refusals(two_ranks, case, arguments, expected):
    for error in two_ranks.errors(case, *arguments):
        assert expected in error
