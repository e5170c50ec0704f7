"""Parameter servers on real processes: the weights are DDP's, whatever the servers, plan, and order.

A gradient is divided by the number of workers and added up in their order. For
two workers that is the one possible sum, so the weights must be DDP's bit for
bit.
"""

import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import PATIENCE_S, serving
from support.ranks import Ranks

from legato.core.errors import InputError
from legato.pytorch.servers.held import check_optimizer
from legato.pytorch.servers.server import Sender
from legato.pytorch.servers.shards import Arena, Shard
from legato.pytorch.servers.worker.arrivals import Arrivals, out_of_order

pytestmark = pytest.mark.processes


@given(st.permutations(range(8)), st.permutations(range(8)))
def test_transfers_are_handed_over_by_number_whenever_they_are_offered(order, offered):
    sent, counters = [], []
    sender = Sender(sent.append)
    sender.begin(order)
    for transfer in offered:
        sender.offer(transfer)
        counters.append(sender.counter)
        # No transfer that could go out is held back.
        done = set(offered[: len(counters)])
        assert len(sent) == next((k for k, t in enumerate(order) if t not in done), len(order)) == sender.counter
    assert sent == list(order)


def test_what_is_out_of_order():
    one, two = dict.fromkeys(range(4), 0), {0: 0, 1: 1, 2: 0, 3: 1}
    assert out_of_order([0, 1, 2, 3], [[0], [1], [2], [3]], one) == 0
    assert out_of_order([0, 1, 2, 3], [[0, 1, 2, 3]], one) == 0  # seen together
    assert out_of_order([0, 1, 2, 3], [[1], [0], [3], [2]], one) == 2
    assert out_of_order([0, 1, 2, 3], [[1], [3], [0], [2]], two) == 0  # no order between servers


def test_every_transfer_is_observed_even_if_it_arrives_between_two_polls():
    shards = [Shard(i, f"p{i}", 0, 3, True, i % 2, torch.float32) for i in range(5)]
    arena = Arena(shards)
    arrivals = Arrivals(arena, shards)
    order = [4, 2, 0, 1, 3]
    for pull in range(200):
        arrivals.begin(order)
        assert len(arrivals.previous[1]) == (5 if pull else 0)
        for index in order:
            arena.trailer[index][0] = pull // 2  # agents may receive the same iteration twice
    arrivals.stop()


@pytest.fixture(scope="module")
def four_ranks():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("placement", ["round-robin", "equal"])
@pytest.mark.parametrize("optimizer", sorted(serving.OPTIMIZERS))
def test_weights_are_those_of_ddp(four_ranks, optimizer, placement):
    assert four_ranks.run(serving.against_ddp, 2, optimizer, (("placement", placement),)) == [0.0] * 4


@pytest.mark.parametrize("run", ["loop_with_schedule", "loop_with_accumulation", "loop_with_evaluation"])
def test_habits_of_training_scripts(four_ranks, run):
    assert four_ranks.run(serving.against_ddp, 2, "momentum", (), run) == [0.0] * 4


@pytest.mark.parametrize("seed", range(3))
def test_any_plan(four_ranks, seed):
    assert four_ranks.run(serving.by_plan, 2, seed) == [0.0] * 4


def test_pulls_in_random_orders(four_ranks):
    assert four_ranks.run(serving.against_ddp, 2, "adamw", (("plan", "random"),)) == [0.0] * 4


@pytest.mark.parametrize("servers", [1, 3])
def test_one_process_on_the_whole_batch(four_ranks, servers):
    """Three workers add in another order than one process, and one worker in the same."""
    assert all(d <= 1e-6 for d in four_ranks.run(serving.against_one_process, servers))


@pytest.mark.parametrize(("before", "after", "optimizer"), [(1, 2, "adamw"), (2, 1, "momentum")])
def test_a_checkpoint_goes_on_with_other_servers(four_ranks, before, after, optimizer):
    assert four_ranks.run(serving.resumed, before, after, optimizer) == [0.0] * 4


@pytest.mark.parametrize("placement", ["round-robin", "equal"])
def test_the_optimizer_state_is_that_of_one_process(four_ranks, placement):
    assert four_ranks.run(serving.state_of_one_process, 3, placement) == [True] * 4


def test_values_are_waited_for_where_they_are_read(two_ranks):
    worker, _ = two_ranks.run(serving.deferral)
    assert worker == (True, (5, 8), True, True, True, True)


def test_transfers_arrive_in_the_order_of_the_plan(two_ranks):
    worker, _ = two_ranks.run(serving.measured, None)
    parameters = len(list(serving.build()[0].parameters()))
    assert len(worker) == 7 and all(transfers == parameters for transfers, _, _ in worker[1:])
    assert sum(late for _, late, _ in worker) == 0 and all(fine for _, _, fine in worker)


def test_an_agent_sees_the_parameters_of_one_moment(four_ranks):
    one, two, server, agent = four_ranks.run(serving.watched_by_an_agent)
    assert server is None and agent and agent[-1][0] == 6
    for iteration, seen in agent:
        assert serving.distance(seen, one[iteration]) == serving.distance(seen, two[iteration]) == 0.0


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("other parameters", "RankError: rank 1: parameter 'out.weight': (6, 8)"),
        ("lbfgs on one rank", "optimizer: LBFGS (expected one that updates"),
        ("no worker", "no rank is left for a worker"),
        ("lbfgs", "InputError: optimizer: LBFGS (expected one that updates each parameter independently)"),
        ("strangers", "InputError: the optimizer has a parameter that does not belong to the model"),
        ("all-reduces", "PlanError: messages[0].kind: 'all_reduce' (expected 'push' or 'pull'"),
        ("no agents' work", "InputError: 1 agent without infer="),
    ],
)
def test_refusals_reach_every_rank(four_ranks, case, expected):
    for error in four_ranks.errors(serving.refused, case):
        assert expected in error


def test_only_an_optimizer_that_treats_elements_alone_may_have_a_part_of_a_parameter():
    """Classes decide, not their names: another optimizer called Adam may use the norm of a parameter."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    halves = [Shard(k, "p", 2 * k, 2 * k + 2, False, k, torch.float32) for k in range(2)]
    whole = [Shard(0, "p", 0, 4, True, 0, torch.float32)]

    def named_adam(**attributes):
        return type("Adam", (torch.optim.Optimizer,), {"__module__": "torch.optim.adam", **attributes})

    for optimizer, shards in [
        (torch.optim.Adam([parameter]), halves),
        (named_adam(steps_elements_alone=True)([parameter], {}), halves),
        (named_adam(steps_parameters_alone=True)([parameter], {}), whole),
        (torch.optim.Adafactor([parameter]), whole),
    ]:
        check_optimizer(optimizer, {"p": parameter}, shards)
    for kind, shards, message in [
        (named_adam(), whole, "expected one that updates each parameter independently"),
        (named_adam(steps_parameters_alone=True), halves, "Adam needs whole parameters, but 'p' is partitioned"),
    ]:
        with pytest.raises(InputError, match=message):
            check_optimizer(kind([parameter], {}), {"p": parameter}, shards)


#: What the workers do differently, and the error that it ends in; the rank that fails, and how.
DISAGREEMENTS = {
    "other settings": "rank 1 (worker 1): settings of the optimizer",
    "uneven": "left after 2 steps, but other workers continue",
    "step twice": "optimizer.step() without a backward pass before it",
}
FATES = list(itertools.product((1, 2), ("killed", "stopped")))  # a worker, a server


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Trainings that fail, all at once: the (ok, result or error text) of every rank that is left, by case."""
    folder = tmp_path_factory.mktemp("begun")
    trainings = {case: Ranks(3) for case in DISAGREEMENTS} | {case: Ranks(4) for case in (*FATES, "late")}
    found = {}
    try:
        trainings["late"].begin(serving.late)
        for case, ranks in trainings.items():
            if case in DISAGREEMENTS:
                ranks.begin(serving.refused, case)
            elif case in FATES:
                ranks.begin(serving.for_ever, 2, serving.PATIENCE_S, str(folder / "-".join(map(str, case))))
        deadline = time.monotonic() + PATIENCE_S
        for victim, fate in FATES:
            while not (folder / f"{victim}-{fate}").exists():
                assert time.monotonic() < deadline, f"rank {victim} {fate}: training does not begin"
                time.sleep(0.05)
            trainings[victim, fate].strike(victim, fate)
        for case, ranks in trainings.items():
            left = [rank for rank in range(ranks.size) if case not in FATES or rank != case[0]]
            found[case] = [ranks.answer(rank, str(case)) for rank in left]
    finally:
        for ranks in trainings.values():
            ranks.close(force=True)
    return found


@pytest.mark.parametrize(("case", "expected"), DISAGREEMENTS.items())
def test_disagreements_in_training(failures, case, expected):
    texts = [text for ok, text in failures[case] if not ok]
    assert any(expected in text for text in texts), texts
    assert all(text.startswith("RankError") for text in texts)


@pytest.mark.parametrize(("victim", "fate"), FATES)
def test_everybody_stops_when_one(failures, victim, fate):
    """All others raise an error that names the rank, and a parameter, and nobody waits for ever."""
    parameters = [repr(name) for name, _ in serving.build()[0].named_parameters()]
    for ok, text in failures[victim, fate]:
        first = text.splitlines()[0]
        assert not ok and first.startswith("RankError") and f"rank {victim}" in first, text
        assert any(name in first for name in parameters), text


def test_a_rank_that_does_not_come_is_named(failures):
    *waited, late = failures["late"]
    assert late == (True, None)
    for ok, text in waited:
        assert not ok and text.startswith(f"RankError: rank 3 did not join within {serving.PATIENCE_S:g} s")


def test_training_goes_on_without_its_agent():
    ranks = Ranks(3)
    try:
        ranks.begin(serving.survives_its_agent)
        assert ranks.answer(0) == (True, "trained") and ranks.answer(1) == (True, None)
    finally:
        ranks.close(force=True)
