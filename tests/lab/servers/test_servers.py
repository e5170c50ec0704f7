"""Parameter servers on real processes: the weights are DDP's, whatever the servers, plan, and order.

A gradient is divided by the number of workers and added up in their order. For
two workers that is the one possible sum, so the weights must be DDP's bit for
bit.
"""

import itertools
import os
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support import PATIENCE_S
from support.ranks import Ranks, gathered, on_ranks
from support.serving import (
    OPTIMIZERS,
    SHORT_S,
    STEPS,
    backward,
    batch,
    build,
    distance,
    from_ddp,
    loop,
    serve,
    values,
)
from torch import nn

from legato.core.errors import InputError, LegatoError
from legato.core.plan import Message, Plan, Slice
from legato.lab.servers.held import check_optimizer
from legato.lab.servers.server import Sender
from legato.lab.servers.shards import Arena, Shard
from legato.lab.servers.worker.arrivals import Arrivals, out_of_order
from legato.pytorch.runtime.waiting.gate import GatedParameter

pytestmark = pytest.mark.slow

# ---- transfers -----------------------------------------------------------------------


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


@on_ranks(2)
def test_transfers_arrive_in_the_order_of_the_plan():
    model, optimizer = build()

    def train(model, optimizer):
        with model.measure() as record:
            loop(model, optimizer, model.workers, model.worker, steps=8)
        return record

    record = serve(model, optimizer, train)
    if dist.get_rank() == 0:
        assert len(record) == 7 and all(i.transfers == len(list(model.parameters())) for i in record[1:])
        assert all(i.out_of_order == 0 and i.seconds > i.waited_s >= 0 for i in record)


# ---- weights -------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("placement", ["round-robin", "equal"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_weights_are_those_of_ddp(optimizer, placement):
    assert from_ddp(optimizer, placement=placement) == 0.0


def scheduling(model, optimizer, parts, part):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        loop(model, optimizer, parts, part, steps=1, first=step)
        scheduler.step()


def accumulating(model, optimizer, parts, part):
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            backward(model, 2 * step, parts, part)
        backward(model, 2 * step + 1, parts, part)
        optimizer.step()


def evaluating(model, optimizer, parts, part):
    for step in range(3):
        loop(model, optimizer, parts, part, steps=1, first=step)
        model.eval()
        with torch.no_grad():
            model(batch(50)[0])
        model.train()


@on_ranks(4)
@pytest.mark.parametrize("run", [scheduling, accumulating, evaluating])
def test_habits_of_training_scripts(run):
    assert from_ddp(run=run) == 0.0


@on_ranks(4)
@pytest.mark.parametrize("seed", range(3))
def test_any_plan(seed):
    """One that cuts, pushes and pulls in random orders."""
    draw, pieces = random.Random(seed), []
    for name, p in build()[0].named_parameters():
        cuts = sorted({0, p.nbytes, *(4 * draw.randrange(p.numel()) for _ in range(draw.randint(0, 2)))})
        pieces += [(Slice(name, a, b), draw.randrange(2)) for a, b in itertools.pairwise(cuts)]
    draw.shuffle(pieces)
    messages = [Message((piece,), "push", server=server) for piece, server in pieces]
    draw.shuffle(pieces)
    messages += [Message((piece,), "pull", server=server) for piece, server in pieces]
    assert from_ddp("adamw", plan=Plan("any", tuple(messages), True)) == 0.0


@on_ranks(4)
def test_pulls_in_random_orders():
    assert from_ddp("adamw", plan="random") == 0.0


def served(optimizer="momentum", **options):
    """The values of the trained model on workers, None on servers."""

    def train(model, optimizer):
        loop(model, optimizer, model.workers, model.worker)
        return values(model)

    return serve(*build(optimizer), train, **options)


@on_ranks(4)
@pytest.mark.parametrize("servers", [1, 3])
def test_one_process_on_the_whole_batch(servers):
    """Three workers add in another order than one process, and one worker in the same."""
    ours = served("sgd", servers=servers)
    if ours is not None:
        model, optimizer = build("sgd")
        loop(model, optimizer)
        assert distance(values(model), ours) <= 1e-6


@on_ranks(4)
@pytest.mark.parametrize(("before", "after", "optimizer"), [(1, 2, "adamw"), (2, 1, "momentum")])
def test_a_checkpoint_goes_on_with_other_servers(before, after, optimizer):
    """Two workers that were saved and go on end where those do that were not."""
    groups = {servers: dist.new_group(range(2 + servers)) for servers in (1, 2)}
    through = served(optimizer, servers=2)

    def save(model, optimizer):
        loop(model, optimizer, 2, model.worker, steps=3)
        saved = values(model), optimizer.state_dict(), model.module.calls
        loop(model, optimizer, 2, model.worker, steps=1, first=50)  # is lost
        return saved

    def go_on(model, optimizer):
        loop(model, optimizer, 2, model.worker, steps=STEPS - 3, first=3)
        return values(model)

    saved = None
    if dist.get_rank() < 2 + before:
        saved = serve(*build(optimizer), save, servers=before, process_group=groups[before])
    state, optimizer_state, calls = gathered(saved)[0]
    if dist.get_rank() < 2 + after:
        model, chosen = build(optimizer)
        model.load_state_dict(state)
        chosen.load_state_dict(optimizer_state)
        model.calls = calls
        ours = serve(model, chosen, go_on, servers=after, placement="equal", process_group=groups[after])
        assert ours is None or distance(through, ours) == 0.0


@on_ranks(4)
@pytest.mark.parametrize("placement", ["round-robin", "equal"])
def test_the_optimizer_state_is_that_of_one_process(placement):
    """In its very form, and about its values."""

    def train(model, optimizer):
        loop(model, optimizer, model.workers, model.worker)
        return optimizer.state_dict()

    ours = serve(*build("adamw"), train, servers=3, placement=placement)
    if dist.get_rank() == 0:
        model, optimizer = build("adamw")
        loop(model, optimizer)
        theirs = optimizer.state_dict()
        assert ours["param_groups"] == theirs["param_groups"] and ours["state"].keys() == theirs["state"].keys()
        for i, state in theirs["state"].items():
            assert list(state) == list(ours["state"][i])
            assert all(torch.allclose(state[k], ours["state"][i][k], atol=1e-4) for k in state)


@on_ranks(2)
def test_values_are_waited_for_where_they_are_read():
    def train(model, optimizer):
        loop(model, optimizer, model.workers, model.worker, steps=1)
        net = model.module
        assert all(isinstance(p, GatedParameter) for p in net.parameters())
        assert net.out.weight.shape == (5, 8)  # no question about shape waits
        net.conv.weight.sum()
        assert type(net.conv.weight) is nn.Parameter and isinstance(net.out.weight, GatedParameter)
        optimizer.zero_grad()  # nor does this
        assert isinstance(net.out.weight, GatedParameter)
        model.flush()
        assert type(net.out.weight) is nn.Parameter

    serve(*build(), train)


@on_ranks(4)
def test_an_agent_sees_the_parameters_of_one_moment():
    def train(model, optimizer):
        seen = [values(model)]
        for step in range(6):
            loop(model, optimizer, model.workers, model.worker, steps=1, first=step)
            seen.append(values(model))
        return seen

    def infer(model):
        seen = []
        while model.training_goes_on:
            model.pull()
            with torch.no_grad():
                model(batch(3)[0])
            seen.append((model.iteration, values(model)))
        return seen

    one, two, server, agent = gathered(serve(*build(), train, infer=infer, agents=1))
    assert server is None and agent and agent[-1][0] == 6
    for iteration, seen in agent:
        assert distance(seen, one[iteration]) == distance(seen, two[iteration]) == 0.0


# ---- what is refused -----------------------------------------------------------------


@on_ranks(4)
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
def test_refusals_reach_every_rank(case, expected):
    (model, optimizer), options = build(), {}
    match case:
        case "other parameters" if dist.get_rank() == 1:
            model.out = nn.Linear(8, 6)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        case "lbfgs on one rank" if dist.get_rank() == 1:
            optimizer = torch.optim.LBFGS(model.parameters())
        case "no worker":
            options["servers"] = dist.get_world_size()
        case "lbfgs":
            optimizer = torch.optim.LBFGS(model.parameters())
        case "strangers":
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        case "all-reduces":
            every = (Message((Slice(name, 0, p.nbytes),)) for name, p in model.named_parameters())
            options["plan"] = Plan("a", tuple(every))
        case "no agents' work":
            options["agents"] = 1
    with pytest.raises(LegatoError) as error:
        serve(model, optimizer, loop, **options)
    assert expected in f"{type(error.value).__name__}: {error.value}"


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


# ---- failures ------------------------------------------------------------------------


def other_settings(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + model.worker)
    loop(model, optimizer, steps=2)


def uneven(model, optimizer):
    loop(model, optimizer, steps=2 + 2 * model.worker)


def stepping_twice(model, optimizer):
    loop(model, optimizer, steps=1)
    optimizer.step()


#: What the workers do differently, and the error that it ends in; the rank that fails, and how.
DISAGREEMENTS = {
    other_settings: "rank 1 (worker 1): settings of the optimizer",
    uneven: "left after 2 steps, but other workers continue",
    stepping_twice: "optimizer.step() without a backward pass before it",
}
FATES = list(itertools.product((1, 2), ("killed", "stopped")))  # a worker, a server


def disagree(train):
    serve(*build(), train, patience_s=SHORT_S)


def train_for_ever(begun):
    """Until something fails; the file `begun` says that the first steps are done."""

    def train(model, optimizer):
        for step in itertools.count():
            loop(model, optimizer, model.workers, model.worker, steps=1, first=step)
            if step == 2 and model.worker == 0:
                Path(begun).touch()

    serve(*build(), train, servers=2, patience_s=SHORT_S)


def come_late():
    """The last rank does not come."""
    if dist.get_rank() < dist.get_world_size() - 1:
        serve(*build(), loop, patience_s=SHORT_S)


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Trainings that fail, all at once: the (ok, result or error text) of every rank that is left, by case."""
    folder = tmp_path_factory.mktemp("begun")
    trainings = {case: Ranks(3) for case in DISAGREEMENTS} | {case: Ranks(4) for case in (*FATES, come_late)}
    found = {}
    try:
        trainings[come_late].begin(come_late)
        for case in DISAGREEMENTS:
            trainings[case].begin(disagree, case)
        for case in FATES:
            trainings[case].begin(train_for_ever, str(folder / "-".join(map(str, case))))
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


@pytest.mark.slow
@pytest.mark.parametrize(("case", "expected"), DISAGREEMENTS.items())
def test_disagreements_in_training(failures, case, expected):
    texts = [text for ok, text in failures[case] if not ok]
    assert any(expected in text for text in texts), texts
    assert all(text.startswith("RankError") for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "fate"), FATES)
def test_everybody_stops_when_one(failures, victim, fate):
    """All others raise an error that names the rank, and a parameter, and nobody waits for ever."""
    parameters = [repr(name) for name, _ in build()[0].named_parameters()]
    for ok, text in failures[victim, fate]:
        first = text.splitlines()[0]
        assert not ok and first.startswith("RankError") and f"rank {victim}" in first, text
        assert any(name in first for name in parameters), text


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(failures):
    *waited, late = failures[come_late]
    assert late == (True, None)
    for ok, text in waited:
        assert not ok and text.startswith(f"RankError: rank 3 did not join within {SHORT_S:g} s")


def lose_the_agent():
    """Workers go on for some steps after the agent is gone."""

    def train(model, optimizer):
        loop(model, optimizer, model.workers, model.worker, steps=40)
        return "trained"

    def infer(model):
        model.pull()
        os._exit(1)

    return serve(*build(), train, agents=1, infer=infer)


@pytest.mark.slow
def test_training_goes_on_without_its_agent():
    ranks = Ranks(3)
    try:
        ranks.begin(lose_the_agent)
        assert ranks.answer(0) == (True, "trained") and ranks.answer(1) == (True, None)
    finally:
        ranks.close(force=True)
