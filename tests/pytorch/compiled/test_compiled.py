"""Compiled models: messages leave while the backward graph runs, and weights are DDP's bit for bit on two ranks."""

import pytest
from support import matrix_compiled, matrix_models, matrix_steps, runtime_cases, training

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("when", ["before", "after", "in place", "around"])
def test_wherever_it_is_compiled(two_ranks, when):
    assert two_ranks.run(matrix_compiled.compiled_when, when, "aot_eager") == [0.0, 0.0]


def test_other_backends_are_left_alone(two_ranks):
    assert two_ranks.run(matrix_compiled.compiled_when, "in place", "eager") == [0.0, 0.0]


@pytest.mark.parametrize("shard", [None, "optimizer"])
@pytest.mark.parametrize(("planned", "trained"), [("", "whole"), ("whole", ""), ("", "part"), ("part", "both")])
def test_plans_and_checkpoints_fit_however_the_model_is_compiled(two_ranks, planned, trained, shard, tmp_path):
    case = matrix_compiled.made_for_another_way, planned, trained, str(tmp_path / "checkpoint")
    assert two_ranks.run(*((training.sharded, shard) if shard else ()), *case) == [(0.0, True)] * 2


CUT = pytest.mark.parametrize(
    ("kind", "backend"),
    [
        (matrix_compiled.Layers, "aot_eager"),
        (matrix_compiled.Layers, "inductor"),
        (matrix_compiled.Convolutions, "inductor"),
    ],
)


@CUT
def test_messages_leave_before_the_graph_has_ended(two_ranks, kind, backend):
    for found in two_ranks.run(matrix_compiled.sent_early, kind, backend):
        assert len(found) == len(list(kind().parameters()))
        assert not any(found)


@CUT
def test_updates_are_waited_for_between_the_pieces_of_the_forward_graph(two_ranks, kind, backend):
    tensors, steps = len(list(kind().parameters())), matrix_compiled.STEPS
    # The first two passes are watched; both runs are cut from then on.
    assert two_ranks.run(matrix_compiled.late, kind, backend) == [(0.0, tensors, 2 * (steps - 2))] * 2


@CUT
def test_pieces_compute_what_eager_mode_computes(two_ranks, kind, backend):
    assert max(two_ranks.run(matrix_compiled.as_in_eager_mode, kind, backend)) < 1e-4


@pytest.mark.parametrize(("backend", "seed"), [("aot_eager", 1), ("aot_eager", 2), ("inductor", 3)])
def test_gradients_appear_in_the_order_of_the_plan(two_ranks, backend, seed):
    assert two_ranks.run(matrix_compiled.in_order, backend, seed) == [True, True]


@pytest.mark.parametrize("case", matrix_compiled.ROWS, ids=lambda f: f.__name__)
def test_row(two_ranks, case):
    assert two_ranks.run(case) == [0.0, 0.0]


@pytest.mark.parametrize("case", matrix_compiled.AS_VIEWS, ids=lambda f: f.__name__)
def test_row_with_gradients_that_are_views(two_ranks, case):
    assert two_ranks.run(training.lent, case) == [0.0, 0.0]


#: Rows about eager models that mean something else for compiled ones too.
ALSO = [matrix_steps.scaled, matrix_models.own_hooks, matrix_models.late_hooks, matrix_models.inference]


@pytest.mark.parametrize("case", ALSO, ids=lambda f: f.__name__)
def test_other_row(two_ranks, case):
    assert two_ranks.run(training.compiled, case) == [0.0, 0.0]


@pytest.mark.parametrize("model", ["Attention", "Checkpointed", "Convolutional", "Partial"])
def test_other_models(two_ranks, model):
    assert two_ranks.run(training.compiled, runtime_cases.equality, model, "adam", 0, True) == [0.0, 0.0]


def test_autocast(two_ranks):
    assert two_ranks.run(training.compiled, matrix_steps.autocast, "Adam") == [0.0, 0.0]


def test_a_gradient_that_was_sent_and_then_changed_is_an_error(two_ranks):
    for said in two_ranks.run(matrix_compiled.regularized_once):
        assert "head.weight: the gradient that a compiled graph handed out was sent, and another one arrived" in said
