"""Ranks that do not all do the same: what one rank alone knows never decides when all ranks communicate."""

import contextlib
import io
import logging
import os
import sys
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.automatic import DECIDED, as_by_ddp, hasty, made, short_tournaments
from support.differing import Around
from support.ranks import gathered, on_ranks
from support.training import OPTIMIZERS, Dense, build, distance, first_passes, random_plan, train, wrap
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import legato
import legato.auto
from legato.pytorch import attachment
from legato.pytorch.logger import logger
from legato.schedule import SCHEDULERS

pytestmark = pytest.mark.slow


def dense():
    torch.manual_seed(1)
    return Dense()


def on(rank, this, other):
    """`this` on one rank, and `other` on the others."""
    return this if dist.get_rank() == rank else other


# ---- steps and optimizers of one rank alone ---------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("moment", [4, 15, 24])
def test_a_step_that_one_rank_leaves_out(moment):
    """While steps are observed, as the network is measured, in the tournament."""

    def run(kind):
        def step(optimizer, i):
            if i not in on(1, range(moment, moment + 2), ()):
                optimizer.step()

        return train(*made(kind, build("Attention"), "momentum"), DECIDED, step=step)

    ours = attachment(as_by_ddp(run))
    assert len(ours.tournament) > 2 and gathered(ours.plan) == [ours.plan] * 2


@on_ranks(2)
def test_an_optimizer_that_takes_no_step_on_one_rank():
    """Its steps are counted where they are taken."""

    def run(kind):
        return train(*made(kind, build("Attention"), "sgd"), DECIDED, step=lambda o, _: on(0, o.step, int)())

    assert len(attachment(as_by_ddp(run)).tournament) > 2


@on_ranks(2)
@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_of_one_rank_alone(given):
    """Rank 0 updates the weights and broadcasts them, whether the optimizer is `given` to legato or not."""

    def run(kind):
        model = build("Attention")
        optimizer = on(0, OPTIMIZERS["adam"](model.parameters()), None)
        wrapped = DDP(model)
        if kind == "auto":
            legato.distribute(wrapped, optimizer if given else None)

        def step(_, i):
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
            for p in model.parameters():
                dist.broadcast(p.data, 0)

        return train(wrapped, torch.optim.SGD([nn.Parameter(torch.zeros(1))]), DECIDED, step=step)

    with redirected(io.StringIO()):
        ours = attachment(as_by_ddp(run))
    assert ours.reason == ("rank 1: optimizer: none here, Adam on rank 0" if given else "")


@on_ranks(2)
@pytest.mark.parametrize("moment", [4, 15, 24])
def test_parameters_that_one_rank_gives_its_optimizer_earlier(moment):
    """Messages carry the same tensors on both ranks, whichever of them a rank updates meanwhile."""

    def run(kind):
        model = build("Attention")
        *most, last = model.parameters()
        optimizer, wrapped = OPTIMIZERS["momentum"](most), DDP(model)
        if kind == "auto":
            legato.distribute(wrapped, optimizer)

        def step(_, i):
            optimizer.step()
            if i == on(1, moment, moment + 3):
                optimizer.add_param_group({"params": [last]})

        return train(wrapped, optimizer, DECIDED, step=step)

    assert len(attachment(as_by_ddp(run)).tournament) > 2


# ---- models of one rank alone ---------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("moment", [4, 24, DECIDED])
def test_a_module_that_one_rank_adds(moment):
    """While steps are observed, in the tournament, and under the plan that has stayed."""

    def run(kind):
        wrapped, optimizer = made(kind, build("Attention"), "momentum")
        train(wrapped, optimizer, moment)
        wrapped.module.probe = on(1, nn.Identity(), None)
        return train(wrapped, optimizer, DECIDED)

    ours = attachment(as_by_ddp(run))
    assert len(ours.tournament) > 2 and not ours.reason


@on_ranks(2)
@pytest.mark.parametrize("moment", [4, 14])
def test_what_one_rank_finds_in_passes_of_ddp_is_told_to_the_others(moment):
    """While steps are observed, and in a turn of DDP's."""

    def run(kind):
        wrapped, optimizer = made(kind, build("Attention"), "momentum")
        train(wrapped, optimizer, moment)
        if dist.get_rank() == 1:
            wrapped.module = Around(wrapped.module)
        return train(wrapped, optimizer, DECIDED)

    with redirected(io.StringIO()):
        assert attachment(as_by_ddp(run)).reason == "it has another module"


# ---- process groups -----------------------------------------------------------------------


def names_of_new_groups(rank):
    """The names of groups that all ranks make in torch's usual way, and each half in its other way."""
    half = [rank & ~1, rank | 1]
    made = [dist.new_group(), dist.new_group(half, use_local_synchronization=True)]
    total = torch.ones(1)
    for group in made:
        dist.all_reduce(total, group=group)
    assert total == 8
    return [group.group_name for group in made]


@on_ranks(4)
def test_models_on_parts_of_the_ranks_and_groups_that_are_made_later():
    """One pair decides much later than the other, and a group is made when only one of them has decided."""
    rank, halves = dist.get_rank(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[rank // 2]

    def run(kind):
        names = []
        model = build("Attention")
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        wrapped = DDP(model, process_group=half)
        if kind == "auto":
            legato.distribute(wrapped, optimizer)
        for round in range(2):
            train(wrapped, optimizer, DECIDED if rank < 2 else 8 + 28 * round)
            names.append(names_of_new_groups(rank))
            found = [None] * 4
            dist.all_gather_object(found, names[-1])
            assert len({each[0] for each in found}) == 1 and found[0] == found[1] and found[2] == found[3]
        return wrapped

    ours = attachment(as_by_ddp(run))
    assert len(ours.tournament) > 2


@on_ranks(4)
def test_two_models_on_crossing_groups():
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def run(kind):
        trained = []
        for model, group in ((build("Attention"), rows[rank // 2]), (dense(), columns[rank % 2])):
            optimizer = OPTIMIZERS["momentum"](model.parameters())
            wrapped = DDP(model, process_group=group)
            trained.append(legato.distribute(wrapped, optimizer) if kind == "auto" else (wrapped, optimizer))
        for i in range(DECIDED):
            for k, (wrapped, optimizer) in enumerate(trained):
                if k or i >= 3 * (rank // 2):  # the rows decide at different times
                    train(wrapped, optimizer, 1, seed=i)
        return nn.ModuleList([wrapped for wrapped, _ in trained])

    for model in as_by_ddp(run):
        assert attachment(model).plan.scheduler in SCHEDULERS


@on_ranks(2)
def test_the_programs_groups_are_named_as_without_legato():
    with hasty("turns"):
        wrapped, optimizer = made("auto", build("Attention"), "momentum")
        usual = [dist.new_group().group_name for _ in range(2)]
        train(wrapped, optimizer, DECIDED)
    assert not attachment(wrapped).observed
    assert int(dist.new_group().group_name) == int(usual[1]) + 1 == int(usual[0]) + 2


# ---- planning that takes long, or fails on one rank ---------------------------------------


@on_ranks(2)
def test_planning_may_take_longer_than_the_timeout_of_the_group():
    seconds = 15
    group = dist.new_group(timeout=timedelta(seconds=seconds))

    def late(contest, limit_s):
        time.sleep(1.5 * seconds)
        assert limit_s <= seconds / 2
        return planned(contest)

    with short_tournaments(), redirected(io.StringIO()):
        planned, model = legato.auto._planned, build("Attention")
        with mock.patch.object(legato.auto, "_planned", late):
            wrapped, optimizer = legato.distribute(
                DDP(model, process_group=group), OPTIMIZERS["sgd"](model.parameters())
            )
            train(wrapped, optimizer, DECIDED)
    assert len(attachment(wrapped).tournament) > 2


@on_ranks(2)
@pytest.mark.parametrize(("what", "rank"), [("calibrate", 1), ("calibrate", 0), ("_products", 1), ("_planned", 0)])
def test_an_error_of_one_rank_while_it_decides(what, rank):
    """All ranks learn of it, and DDP goes on."""
    said = io.StringIO()

    def fails(*arguments, **options):
        raise MemoryError("none left")

    def run(kind):
        with mock.patch.object(legato.auto, what, on(rank, fails, getattr(legato.auto, what))):
            return train(*made(kind, build("Attention"), "sgd"), DECIDED)

    with redirected(said):
        ours = attachment(as_by_ddp(run))
    assert ours.plan.scheduler == "ddp" and not ours.observed
    expected = f"legato: no plan could be made: rank {rank}: MemoryError: none left\n"
    assert (expected in said.getvalue()) == (dist.get_rank() == 0)


# ---- what legato says ----------------------------------------------------------------------


@contextlib.contextmanager
def redirected(stream):
    with mock.patch.object(sys, "stderr", stream):
        yield


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


def without_reader():
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", buffering=1)


@on_ranks(2)
@pytest.mark.parametrize("stream", [type(None), closed, without_reader])
def test_a_training_without_standard_error(stream):
    with redirected(stream()), hasty("turns"):
        wrapped, optimizer = made("auto", build("Attention"), "sgd")
        train(wrapped, optimizer, DECIDED)
    assert attachment(wrapped).tournament


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage().split(":")[0]))


@on_ranks(2)
def test_a_program_replaces_the_handler():
    mine = Kept()
    with mock.patch.object(logger, "handlers", [mine]), redirected(said := io.StringIO()), hasty("plan"):
        wrapped, optimizer = made("auto", build("Attention"), "sgd")
        train(wrapped, optimizer, 10)
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        train(wrapped, optimizer, 1)
    assert said.getvalue() == ""
    expected = [("INFO", "2 steps are observed; then the network is measured, and plans are made and tried")]
    assert mine.lines[:1] == expected * (dist.get_rank() == 0)
    assert mine.lines[-1:] == [("WARNING", "DDP's own passes stay")] * (dist.get_rank() == 0)


# ---- settings that differ --------------------------------------------------------------------


@contextlib.contextmanager
def other_precision(model, optimizer):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(on(0, "high", before))
    yield
    torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def other_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    yield


@contextlib.contextmanager
def other_names(model, optimizer):
    if dist.get_rank() == 0:
        model.third = nn.Sequential(model.third)
    yield


DIFFERENCES = {
    other_rate: "rank 1: group 0 of the optimizer: 3 parameters, {'dampening': 0, 'differentiable': False, 'lr': 0.2",
    other_precision: "rank 1: torch.get_float32_matmul_precision(): highest here, high on rank 0",
    other_names: "rank 1: parameter 'third.0.weight': missing here, (10, 16) torch.float32 on cpu on rank 0",
}


@on_ranks(2)
@pytest.mark.parametrize("differ", DIFFERENCES)
@pytest.mark.parametrize("wrapped", [True, False])
def test_differences_leave_the_passes_to_ddp(differ, wrapped):
    def run(kind):
        model = dense()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with differ(model, optimizer):
            model = model if wrapped and kind == "auto" else DDP(model)
            model, optimizer = legato.distribute(model, optimizer) if kind == "auto" else (model, optimizer)
            return train(model, optimizer, DECIDED)

    with redirected(io.StringIO()):
        assert attachment(as_by_ddp(run)).reason.startswith(DIFFERENCES[differ])


@on_ranks(2)
@pytest.mark.parametrize("differ", DIFFERENCES)
def test_differences_are_refused_under_a_plan_by_hand(differ):
    model = dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with differ(model, optimizer), pytest.raises(legato.RankError) as error:
        legato.distribute(DDP(model), optimizer, random_plan(model, 1))
    assert str(error.value).startswith(DIFFERENCES[differ])


@on_ranks(2)
@pytest.mark.parametrize("kind", ["auto", "legato"])
def test_entries_of_a_group_that_the_optimizer_does_not_know(kind):
    def trained(kind):
        model = dense()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        optimizer.param_groups[0] |= {"rank": dist.get_rank(), "file": f"log-{dist.get_rank()}"}
        return train(*wrap(kind, model, optimizer), DECIDED)

    with hasty("plan") if kind == "auto" else first_passes(0):
        expected, found = trained("ddp"), trained("legato")
    assert distance(expected, found) == 0.0 and not attachment(found).reason
