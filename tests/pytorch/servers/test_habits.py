"""Training scripts that touch gradients, parameters or the optimizer: DDP's weights, or one clear line.

Two workers: the servers' sums are DDP's bit for bit (`test_parameter_servers.py`), so all else must be, too.
"""

import pytest
import torch
from support import serving_habits
from support.ranks import Ranks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def four_ranks():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def three_ranks():
    ranks = Ranks(3)
    yield ranks
    ranks.close(force=True)


@pytest.mark.parametrize(
    "habit",
    [
        "clips_the_norm", "clips_values", "edits_gradients", "logs_on_one_worker", "scales", "drops_gradients",
        "zeroes_without_none", "freezes", "uses_a_closure", "keeps_the_memory",
    ],
)  # fmt: skip
def test_weights_are_those_of_ddp(four_ranks, habit):
    assert four_ranks.run(serving_habits.against_ddp, habit) == [0.0] * 4


@pytest.mark.parametrize(
    ("habit", "options"),
    [
        ("clips_the_norm", ("Net", "equal")),
        ("edits_gradients", ("Net", "equal")),
        ("plain", ("Odd",)),
        ("clips_values", ("Odd",)),
        ("plain", ("Reentrant",)),
        ("plain", ("Net", "round-robin", True)),
    ],
    ids=["clipping, cut", "editing, cut", "frozen, tied, recomputed", "the same, clipped", "reentrant", "scheduler"],
)
def test_weights_are_those_of_ddp_on(four_ranks, habit, options):
    assert four_ranks.run(serving_habits.against_ddp, habit, *options) == [0.0] * 4


def test_gradients_add_up_over_steps_where_nobody_zeroes_them(four_ranks):
    """Sums of averages, and averages of sums, are rounded differently."""
    assert all(d <= 1e-6 for d in four_ranks.run(serving_habits.against_ddp, "keeps_gradients"))


def test_a_worker_alone_clips_as_one_process(four_ranks):
    assert four_ranks.run(serving_habits.one_worker_clips) == [0.0] * 4


def test_gradients_are_averages_where_they_are_read(four_ranks):
    first, *others, _ = four_ranks.run(serving_habits.averages_seen)
    assert len(others) == 2 and all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_the_optimizer_has_its_state_when_training_is_over(four_ranks):
    assert four_ranks.run(serving_habits.state_afterwards) == [True] * 4


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("_after_it_was_sent", "the gradient of 'out.weight' was changed after it went to the servers"),
        ("_from_a_reference", "was changed after it went to the servers"),
        ("_weights", "parameter 'conv.weight' was changed on this worker, but the servers hold it"),
        ("_weights_unseen", "parameter 'conv.weight' was changed on this worker, but the servers hold it"),
        ("_weights_before_step", "parameter 'out.bias' was changed on this worker, but the servers hold it"),
        ("_a_checkpoint", "was changed on this worker, but the servers hold it"),
        ("_another_layer", "the model has other modules or parameters now, which the servers do not know"),
        ("_state", "InputError: the optimizer's state is on the servers"),
        ("_hooks", "InputError: the optimizer has hooks on its step"),
        ("_two_backward_passes", "a backward pass began before the gradients of the previous one were used"),
        ("_fused_and_scaled", "InputError: GradScaler lets a fused optimizer scale its gradients"),
    ],
)
def test_what_the_servers_could_not_follow_is_refused(three_ranks, case, expected):
    texts = [text for ok, text in three_ranks.outcomes(serving_habits.refused, case) if not ok]
    assert any(expected in text.splitlines()[0] for text in texts), texts


#: What is refused where the other ranks are waited for until patience ends.
AWAITED = {
    "_half_a_backward_pass": "the last backward pass did not finish",
    "_one_drops": "rank 1 (worker 1): optimizer.step() after the backward pass, but zero_grad() on rank 0",
    "_one_clips": "rank 1 (worker 1): changed other gradients before optimizer.step() than rank 0",
}


@pytest.fixture(scope="module")
def awaited():
    """Their outcomes, by case; all wait at once."""
    trainings = {case: Ranks(3) for case in AWAITED}
    try:
        for case, ranks in trainings.items():
            ranks.begin(serving_habits.refused, case)
        yield {case: [ranks.answer(rank, case) for rank in range(3)] for case, ranks in trainings.items()}
    finally:
        for ranks in trainings.values():
            ranks.close(force=True)


@pytest.mark.parametrize(("case", "expected"), AWAITED.items())
def test_what_the_servers_could_not_follow_is_refused_though_nobody_answers(awaited, case, expected):
    texts = [text for ok, text in awaited[case] if not ok]
    assert any(expected in text.splitlines()[0] for text in texts), texts


def test_a_checkpoint_that_one_rank_alone_has_loaded_is_noticed(four_ranks):
    for error in four_ranks.errors(serving_habits.other_state):
        assert "rank 1: optimizer's state: state" in error and "load the same checkpoint on every rank" in error
