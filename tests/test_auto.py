"""`plan="auto"`: the plan comes from the training's own first steps, none lost or run twice."""

import io
import itertools
import re
from contextlib import redirect_stderr

import pytest
import torch
import torch.distributed as dist
from support.automatic import DECIDED, OBSERVED, as_by_ddp, made, short_tournaments
from support.ranks import gathered, on_ranks
from support.training import OPTIMIZERS, build, random_plan, train, wrap
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import legato
import legato.auto
from legato.core import files
from legato.core.errors import CaptureError
from legato.core.plan import Plan
from legato.pytorch import attachment, calibrate
from legato.pytorch.network import agreement
from legato.pytorch.private.groups import default_store
from legato.pytorch.recording.observed import StepObserver
from legato.schedule import SCHEDULERS

pytestmark = pytest.mark.slow


def automatic(model, steps=DECIDED, loop=train, again=False, **options):
    """Train to DDP's weights; the plans of all passes, the hooks that are left, and what was measured."""
    plans, hooks = [], []

    def run(kind):
        wrapped, optimizer = made(kind, build(model), "momentum", **options)
        if kind == "auto":
            wrapped.module.register_forward_pre_hook(lambda *_: plans.append(attachment(wrapped).plan.scheduler))
        loop(wrapped, optimizer, steps)
        hooks[:] = wrapped._forward_pre_hooks, optimizer._optimizer_step_post_hooks
        return wrapped

    ours = attachment(as_by_ddp(run, again))
    return [*plans, ours.plan.scheduler], sum(map(len, hooks)) - 1, ours.tournament  # one hook is legato's own


# ---- ways to train for a number of steps ---------------------------------------------


def skipping(model, optimizer, steps):
    train(model, optimizer, 2 * steps, step=lambda o, i: None if i % 3 == 1 else o.step(), zero="after")


def closures(model, optimizer, steps):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x, y = model.module.batch(generator)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def accumulating(model, optimizer, steps, sending=False):
    """Three backward passes a step; all but the last are under `no_sync()`, or none."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        for i in range(3):
            x, y = model.module.batch(generator)
            model.require_backward_grad_sync = sending or i == 2
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulating_averages(model, optimizer, steps):
    accumulating(model, optimizer, steps, sending=True)


def evaluating(model, optimizer, steps):
    """Between steps the weights are read, and a module runs."""
    x, _ = model.module.batch(torch.Generator().manual_seed(0))
    for i in range(steps):
        train(model, optimizer, 1, seed=i)
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        model.state_dict()


# ---- weights are DDP's ---------------------------------------------------------------


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("model", ["Convolutional", "Attention", "Recurrent"])
def test_weights_are_those_of_ddp_through_all_plans(model):
    plans, hooks, measured = automatic(model, again=True)
    assert plans[:OBSERVED] == ["ddp"] * OBSERVED and hooks == 0
    assert set(measured) == set(plans[OBSERVED:]) <= set(SCHEDULERS)
    assert len(measured) > 2 and all(m.seconds > 0 and m.steps == 2 for m in measured.values())


@on_ranks(2)
@pytest.mark.parametrize("steps", [20, 22, 25])
def test_weights_in_the_middle_of_the_tournament(steps):
    plans, _, measured = automatic("Convolutional", steps)
    assert len(set(plans)) > 2 and measured == {}


@on_ranks(2)
@pytest.mark.parametrize("loop", [train, skipping, closures, accumulating, accumulating_averages, evaluating])
def test_every_way_to_train(loop):
    plans, hooks, measured = automatic("Convolutional", loop=loop)
    assert hooks == 0 and len(measured) > 2
    assert gathered(plans) == [plans] * 2  # the same plan in every pass


@on_ranks(2)
def test_a_step_of_the_tournament_has_all_its_backward_passes():
    plans, _, _ = automatic("Convolutional", loop=accumulating_averages)
    turns = [len(list(same)) for _, same in itertools.groupby(plans[OBSERVED - 1 :])]
    assert len(turns) > 3 and all(passes % 3 == 0 for passes in turns[:-1])


@on_ranks(2)
def test_gradients_that_are_lent():
    _, _, measured = automatic("Attention", gradient_as_bucket_view=True)
    assert len(measured) > 2


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize(("model", "loop"), [("Attention", train), ("Convolutional", evaluating)])
def test_sharded_plans_compete(shard, model, loop):
    plans, hooks, measured = automatic(model, loop=loop, shard=shard)
    assert hooks == 0 and len(measured) > 2 and "ddp" in plans


@on_ranks(2)
def test_plans_of_all_kinds_compete():
    names = []

    def run(kind):
        model = build("Partial")
        optimizer = OPTIMIZERS["adam"](model.parameters())
        wrapped, optimizer = wrap("ddp" if kind == "ddp" else "legato", model, optimizer, find_unused_parameters=True)
        train(wrapped, optimizer, 3)
        if kind == "auto":
            attachment(wrapped).compete([Plan(f"p{i}", random_plan(model, i).messages, i > 0) for i in range(3)])
            model.register_forward_pre_hook(lambda *_: names.append(attachment(wrapped).plan.scheduler))
        return train(wrapped, optimizer, 17, seed=12)

    ours = attachment(as_by_ddp(run))
    assert names[:14] == ["p0"] * 4 + ["p1"] * 2 + ["p2"] * 4 + ["p1"] * 2 + ["p0"] * 2
    assert set(names[14:]) == {ours.plan.scheduler} and set(ours.tournament) == {"p0", "p1", "p2"}
    assert len(set(gathered(ours.plan.scheduler))) == 1


@on_ranks(2)
def test_before_there_is_a_plan_the_buckets_do():
    plans, _, _ = automatic("Convolutional", 6)
    assert set(plans) == {"ddp"}


@on_ranks(2)
@pytest.mark.parametrize("steps", [1, 6, 18, 21])
def test_join_while_plans_are_tried(steps):
    """Ranks run out of batches while the steps are watched, or in the tournament; passes are DDP's from then on."""

    def run(kind):
        wrapped, optimizer = made(kind, build("Convolutional"), "sgd")
        train(wrapped, optimizer, steps)
        with wrapped.join():
            train(wrapped, optimizer, 1 + 2 * dist.get_rank())
        return train(wrapped, optimizer, 3)

    assert attachment(as_by_ddp(run)).reason == "join() was used"


@on_ranks(2)
@pytest.mark.parametrize("steps", [1, 6, 18, 21])
def test_a_communication_hook_while_plans_are_tried(steps):
    """It is registered while the steps are watched, or in the tournament; the ranks tell each other when these end."""

    def all_reduce(state, bucket):
        buffer = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])

    def run(kind):
        wrapped, optimizer = made(kind, build("Convolutional"), "sgd")
        train(wrapped, optimizer, steps)
        wrapped.register_comm_hook(None, all_reduce)
        return train(wrapped, optimizer, DECIDED)

    assert attachment(as_by_ddp(run)).reason == "the model uses a communication hook"


@on_ranks(2)
def test_two_models_that_are_trained_together():
    """An encoder and a decoder, each with its own wrapper and optimizer, are observed in the same steps."""

    def run(kind):
        torch.manual_seed(7)
        pair = []
        for layers in ((8, 16, 4), (4, 16, 8)):
            model = nn.Sequential(nn.Linear(*layers[:2]), nn.GELU(), nn.Linear(*layers[1:]))
            pair.append(made(kind, model, "momentum"))
        (encoder, first), (decoder, second) = pair
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(DECIDED):
            x = torch.randn(4, 8, generator=generator)
            first.zero_grad()
            second.zero_grad()
            F.mse_loss(decoder(encoder(x)), x).backward()
            first.step()
            second.step()
        return nn.ModuleList([encoder, decoder])

    for model in as_by_ddp(run):
        assert attachment(model).plan.scheduler in SCHEDULERS and not attachment(model).observed


# ---- steps that are hard to plan for, or not at all ------------------------------------


@on_ranks(2)
def test_steps_with_other_ops_each_time():
    """Steps whose ops differ, but not the order of their gradients, can be planned for."""

    def run(kind):
        model, calls = build("Checkpointed"), [0]
        plain = model.forward

        def changing(x):
            calls[0] += 1
            return plain(x) if calls[0] % 3 else plain(x) + torch.sin(x[:, :10])

        model.forward = changing
        return train(*made(kind, model, "momentum"), 14)

    ours = attachment(as_by_ddp(run))
    assert ours.plan.scheduler == "ddp" and ours.observed is True


@on_ranks(2)
def test_a_recorder_that_refuses_every_step():
    """DDP's passes stay, on all ranks, and none hangs."""

    def refuse(*_):
        raise CaptureError("not this one")

    with pytest.MonkeyPatch.context() as patch, short_tournaments():
        patch.setattr(StepObserver, "workload", refuse)
        trained = train(*made("auto", build("Convolutional"), "sgd"), 14)
    assert attachment(trained).plan.scheduler == "ddp"


@on_ranks(2)
def test_inputs_that_cannot_be_recorded():
    """The recorder knows dense tensors only: DDP's passes stay, and training goes on."""

    def run(kind):
        model = build("Checkpointed")
        plain = model.forward
        model.forward = lambda x: torch.sparse.mm(torch.eye(len(x)).to_sparse(), plain(x))
        return train(*made(kind, model, "sgd"), 14)

    assert attachment(as_by_ddp(run)).plan.scheduler == "ddp"


@on_ranks(2)
def test_what_legato_cannot_do_it_undoes():
    def fail(*_):
        raise ZeroDivisionError("no")

    def run(kind):
        legato.auto._planned = fail  # until the tournament ends
        return train(*made(kind, build("Convolutional"), "sgd"), 16)

    with redirect_stderr(io.StringIO()) as said:
        trained = as_by_ddp(run)
    assert attachment(trained).plan.scheduler == "ddp"
    lines = [re.sub("takes .*;", "takes ...;", line) for line in said.getvalue().splitlines()]
    assert lines == (dist.get_rank() == 0) * [
        "legato: 12 steps are observed; then the network is measured, and plans are made and tried",
        "legato: the network is measured",
        "legato: an all-reduce takes ...; plans are made, for at most 300 s",
        "legato: no plan could be made: rank 0: ZeroDivisionError: no",
        "legato: DDP's own passes stay",
    ]


# ---- calls -----------------------------------------------------------------------------


@on_ranks(2)
def test_calibration_is_the_same_on_every_rank():
    found = calibrate(sizes=(1024, 65536, 2**20))
    fitted, seconds = found.cluster.cost("gloo").cost(2**20), [sample.seconds for sample in found.samples]
    shared = files.identity(found.cluster), found.cluster.workers, fitted, seconds
    assert gathered(shared) == [shared] * 2
    assert found.cluster.workers == 2 and fitted > 0 and len(seconds) == 3 and min(seconds) > 0


@on_ranks(2)
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
def test_refusals(what, expected):
    model = build("Checkpointed")
    optimizer, options = OPTIMIZERS["sgd"](model.parameters()), {}
    match what:
        case "sharded":
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        case "meta":
            model = model.to("meta")
        case "scheduler":
            optimizer = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        case "parameters":
            optimizer = list(model.parameters())
        case "option":
            options["shrad"] = "optimizer"
    with pytest.raises(legato.InputError) as error:
        legato.distribute(model, optimizer, **options)
    assert str(error.value).startswith(expected)


@on_ranks(2)
def test_a_rank_that_calls_long_before_another_says_for_whom_it_waits():
    model, store = build("Checkpointed"), default_store()

    class Telling(io.StringIO):
        def write(self, text):
            store.set("told", "")
            return super().write(text)

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(Telling()) as said:
        patch.setattr(agreement, "SAY_S", 0.1)
        if dist.get_rank() == 1:
            store.wait(["told"])
        legato.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
    if dist.get_rank() == 0:
        expected = "legato: rank 0 waits: rank 1 has not called what this rank has (legato.distribute()?)\n"
        assert expected in said.getvalue()
