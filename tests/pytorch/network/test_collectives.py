"""Messages by every collective, in chunks and in halves: exact sums, DDP's weights, and what a dead peer does."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import messages
from support.ranks import Ranks

from legato.pytorch.network.rounds import ROUNDS
from legato.pytorch.network.threads import batch_policy_threads

pytestmark = pytest.mark.processes


@given(name=st.sampled_from(sorted(ROUNDS)), ranks=st.integers(1, 40), halves=st.booleans())
def test_rounds_add_everything_once_and_hand_it_to_everybody(name, ranks, halves):
    courses = [ROUNDS[name](rank, ranks) for rank in range(ranks)]
    parts = courses[0].parts
    held = [[{rank} for _ in range(parts)] for rank in range(ranks)]  # whose numbers are in the sum
    for rounds, adds in (([c.reduce for c in courses], True), ([c.distribute for c in courses], False)):
        assert len({len(r) for r in rounds}) == 1
        for step in range(len(rounds[0])):
            before = [[set(part) for part in mine] for mine in held]
            sent = {(r, t.peer, t.start, t.stop) for r in range(ranks) for t in rounds[r][step].sends}
            taken = {(t.peer, r, t.start, t.stop) for r in range(ranks) for t in rounds[r][step].receives}
            assert sent == taken
            for giver, taker, start, stop in sent:
                for part in range(start, stop):
                    if adds:
                        assert not held[taker][part] & before[giver][part]
                        held[taker][part] |= before[giver][part]
                    else:
                        assert len(before[giver][part]) == ranks
                        held[taker][part] = before[giver][part]
    assert all(len(part) == ranks for mine in held for part in mine)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_exact(two_ranks, three_ranks, four_ranks, size):
    for count, wrong in {2: two_ranks, 3: three_ranks, 4: four_ranks}[size].run(messages.sums):
        assert count == 2 * len(messages.SIZES) * (2 + len(ROUNDS) * len(messages.DEPTHS)) and not wrong


def test_sums_of_half_precision(three_ranks):
    assert all(not wrong for _, wrong in three_ranks.run(messages.sums, "bfloat16"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_sums_of_tensors_on_a_gpu(two_ranks):
    assert all(not wrong for _, wrong in two_ranks.run(messages.sums, "float32", "cuda"))


@pytest.mark.parametrize("name", sorted(ROUNDS))
def test_all_ranks_have_the_same_bits(three_ranks, name):
    assert three_ranks.run(messages.same_everywhere, name, 2) == [0.0] * 3


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="not Linux")
def test_the_thread_that_waits_for_bytes_interrupts_nobody(two_ranks):
    assert two_ranks.run(messages.spinning) == [({os.SCHED_BATCH}, os.SCHED_OTHER)] * 2


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="not Linux")
@pytest.mark.parametrize("forbidden", ["sched_getscheduler", "sched_setscheduler"])
def test_where_policies_are_forbidden_threads_keep_theirs(monkeypatch, forbidden):
    def refuse(*_):
        raise PermissionError

    look = os.sched_getscheduler
    monkeypatch.setattr(os, forbidden, refuse)
    with batch_policy_threads():
        assert look(0) == os.SCHED_OTHER


def test_what_is_there_is_updated_while_the_rest_is_waited_for(two_ranks):
    updated, _ = two_ranks.run(messages.updates_while_waiting)
    assert updated == [["early.weight"], ["late.weight"]]


def test_a_gradient_goes_out_while_the_rest_of_it_is_packed(two_ranks):
    assert two_ranks.run(messages.packed_and_sent) == [["packed 0", "sent 0", "packed 1", "sent 1"]] * 2


def test_a_thread_only_where_there_are_steps(two_ranks):
    assert two_ranks.run(messages.threads) == [[0, 1, 0]] * 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", ["Convolutional", "Attention"])
def test_weights_are_those_of_ddp(two_ranks, model, seed):
    assert two_ranks.run(messages.equality, model, "adam", seed, seed != 3) == [0.0, 0.0]


def test_parameters_without_gradient(two_ranks):
    assert two_ranks.run(messages.equality, "Partial", "momentum", 1) == [0.0, 0.0]


def test_gradients_that_are_dropped(two_ranks):
    assert two_ranks.run(messages.dropped_gradients) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("collective", "buffer_bytes"), [("ring", 25 * 2**20), ("halving-doubling", 1), ("shuffle", 999)]
)
def test_dear(two_ranks, collective, buffer_bytes):
    assert two_ranks.run(messages.equality_dear, collective, buffer_bytes) == [0.0, 0.0]


def test_the_plans_of_all_schedulers(two_ranks):
    for distances in two_ranks.run(messages.under, messages.plans()):
        assert {"ddp", "mg-wfbp", "pace", "dear", "legato"} <= set(distances)
        assert not any(distances.values())


@pytest.mark.parametrize("seed", range(2))
def test_gradient_within_the_rounding_bound(three_ranks, seed):
    assert all(error <= 1 for error in three_ranks.run(messages.within_the_rounding_bound, seed))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            messages.unknown_collective,
            "PlanError: messages[0].collective: 'butterfly' (this runtime carries out gloo, ",
        ),
        (messages.depth_of_the_backends_own, "PlanError: messages[0].depth: 2 (expected 1 with gloo's own all-reduce)"),
        (messages.push_and_pull, "PlanError: messages[0].kind: 'push' (expected 'all_reduce', "),
        (messages.push_alone, "PlanError: messages[0].kind: 'push' (expected 'all_reduce', "),
        (messages.gathered_before_scattered, "messages[0]: an all_gather whose slices are not those of one reduce_sc"),
        (messages.gathered_in_pieces, "messages[1]: an all_gather whose slices are not those of one reduce_scatter"),
        (messages.gathered_otherwise, "messages[1]: an all_gather by collective, depth and wire ('tree', 1, None)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refusals_reach_every_rank(two_ranks, case, expected):
    for error in two_ranks.errors(case):
        assert expected in error


def test_a_peer_that_dies():
    ranks = Ranks(3)
    try:
        ranks.begin(messages.peer_dies)
        for rank in (0, 2):
            ok, errors = ranks.answer(rank)
            assert ok and sorted(errors) == sorted(ROUNDS)
    finally:
        ranks.close(force=True)


def test_a_peer_that_dies_in_training():
    ranks = Ranks(2)
    try:
        ranks.begin(messages.peer_dies_in_training)
        ok, error = ranks.answer(0)
        assert ok and error.startswith("rank 0: message ") and " of backward pass 3 " in error
    finally:
        ranks.close(force=True)
