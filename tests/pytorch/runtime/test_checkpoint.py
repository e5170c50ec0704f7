"""Checkpoints of sharded optimizers: every rank saves its shards, and anybody can load them."""

import copy
import functools
import math
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import gathered, on_ranks
from support.rows import in_mode
from support.strategies import examples
from support.training import Mixed, same, wrap
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

import legato
from legato.core.errors import LegatoError
from legato.pytorch import attachment
from legato.pytorch.runtime.sharding.checkpoint import LocalShards, OptimizerState, boxes
from legato.pytorch.runtime.sharding.shards import ELEMENTWISE

pytestmark = pytest.mark.slow

STEPS = 5
SHARDED = ["sharded optimizer"]


@examples(40)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_range_of_elements_is_few_boxes(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    whole = torch.arange(size).view(shape)
    found = list(boxes(shape, start, stop))
    parts = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in found]
    assert torch.cat(parts).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_tensor_of_shards_shows_nothing_else():
    tensor = LocalShards((2, 3), torch.float32, "cpu", [(0, 2)], [torch.ones(2)])
    assert tensor.shape == (2, 3) and "ranges=[(0, 2)]" in repr(tensor)
    with pytest.raises(legato.InputError, match="only this rank's shards of the tensor are here"):
        tensor + 1


class Various(Mixed):
    """Weights of several shapes, one number, tied, frozen and unused ones, and one that is used later only."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(10, 10, bias=False)
        self.tied = nn.Linear(10, 10)
        self.tied.weight = self.again.weight
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.never = nn.Parameter(torch.randn(3, 5, 7, 11))
        self.cube = nn.Parameter(torch.randn(4, 3, 130))
        self.later, self.uses_later = nn.Linear(10, 10), False

    def forward(self, x):
        x = self.frozen(self.tied(self.again(super().forward(x)))) + self.cube.mean()
        return self.later(x) if self.uses_later else x


class Slow(torch.optim.SGD):
    """Keeps something of matrices only, and more of them from its second step on."""

    steps_elements_alone = True

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.shard_of.dim() > 1:
                    if "first" in self.state[p]:
                        self.state[p]["second"] = torch.zeros_like(p)
                    self.state[p]["first"] = torch.zeros_like(p)


MAKE = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=1e-2),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2), amsgrad=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=1e-2),
    "slow": lambda ps: Slow(ps, lr=0.1),
}


def made(kind, name, seed, init=7, make=Various):
    """A model, and it wrapped with an optimizer of two groups and a scheduler."""
    torch.manual_seed(init)
    model = make()
    parameters = list(model.parameters())
    optimizer = MAKE[name]([{"params": parameters[:3], "weight_decay": 1e-3}, {"params": parameters[3:]}])
    options = {"find_unused_parameters": True} if kind == "ddp" else {}
    wrapped, optimizer = wrap(kind, model, optimizer, seed, **options)
    return model, wrapped, optimizer, StepLR(optimizer, 2, 0.5)


def train(wrapped, optimizer, scheduler, seed=3, rank=None):
    """Some steps, on this rank's data, or on that of `rank`."""
    generator = torch.Generator().manual_seed(1000 * seed + (dist.get_rank() if rank is None else rank))
    for _ in range(STEPS):
        x, y = Mixed.batch(None, generator)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        scheduler.step()


def save(path, name, kind="legato", rank=None, in_background=False, make=Various):
    """Train, save, and train on; what it leads to is beside the checkpoint."""
    model, *training = made(kind, name, seed=0, make=make)
    wrapped, optimizer, scheduler = training
    train(*training, rank=rank)
    before = copy.deepcopy({"weights": model.state_dict(), "optimizer": optimizer.state_dict()})
    state = {"model": wrapped, "optimizer": OptimizerState(wrapped, optimizer), "scheduler": scheduler}
    model.uses_later = True
    saved = (dcp.async_save if in_background else dcp.save)(state, checkpoint_id=path)
    train(*training, seed=4, rank=rank)
    if in_background:
        saved.result()
    if dist.get_rank() == 0:
        torch.save({"before": before, "after": model.state_dict()}, f"{path}.pt")
    dist.barrier()


def resume(path, name, kind="legato", rank=None, partial=False, trains_before=False):
    """Load into an optimizer of other settings, under another plan, and train on: the weights are the same.

    The optimizer is new, or has a state already. On three ranks, they are those of a run that has loaded the whole
    state.
    """
    known = torch.load(f"{path}.pt")
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    ends = [known["after"]]
    for whole in [False, True][: 1 + (dist.get_world_size() == 3)]:
        model, *training = made(kind, name, seed=5, init=8)
        wrapped, optimizer, scheduler = training
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5
        if trains_before:
            model.uses_later = True
            train(*training, seed=9)
        weights = copy.deepcopy(model.state_dict())
        if whole:
            optimizer.load_state_dict(known["before"]["optimizer"])
            dcp.load({"scheduler": scheduler}, checkpoint_id=path)
        else:
            state = {"optimizer": OptimizerState(wrapped, optimizer), "scheduler": scheduler}
            dcp.load(state, checkpoint_id=path, planner=planner)
        assert same(model.state_dict(), weights)
        assert same(optimizer.state_dict(), known["before"]["optimizer"])
        dcp.load({"model": wrapped}, checkpoint_id=path)
        assert same(model.state_dict(), known["before"]["weights"])
        model.uses_later = True
        train(*training, seed=4, rank=rank)
        ends.append(model.state_dict())
    assert same(*ends[-2:])


@on_ranks(2)
@pytest.mark.parametrize("name", ["adam", "adamw", "momentum", "sgd", "adagrad", "nadam", "asgd"])
def test_training_goes_on_as_if_it_had_not_been_interrupted(name, tmp_path):
    path = tmp_path / "checkpoint"
    in_mode(SHARDED, save, path, name)
    for trains_before in (False, True):
        in_mode(["sharded gradients"], functools.partial(resume, path, name, trains_before=trains_before))


@pytest.mark.parametrize("name", ["adam", "momentum", "adagrad"])
def test_other_numbers_of_ranks_load_it(ranks_of, name, tmp_path):
    path = tmp_path / "checkpoint"
    ranks_of(2).run(in_mode, ["sharded gradients"], save, path, name, "legato", 0)
    for ranks in (1, 3):
        ranks_of(ranks).run(in_mode, SHARDED, resume, path, name, "legato", 0)


@on_ranks(2)
@pytest.mark.parametrize("name", ["adam", "adamw", "momentum"])
def test_from_sharded_to_unsharded_and_back(name, tmp_path):
    path = tmp_path / "sharded"
    in_mode(SHARDED, save, path, name)
    for kind in ("ddp", "legato"):
        resume(path, name, kind)
    for kind in ("ddp", "legato"):
        save(tmp_path / kind, name, kind)
        in_mode(SHARDED, functools.partial(resume, tmp_path / kind, name, partial=True))


@on_ranks(2)
def test_several_optimizers_of_a_compiled_model(tmp_path):
    """Two optimizers of one model in one checkpoint."""

    def states(i):
        torch.manual_seed(i)
        model = Mixed()
        first = torch.optim.Adam([*model.body.parameters(), model.scale], lr=0.01 * (i + 1))
        second = torch.optim.SGD([*model.conv.parameters(), *model.head.parameters()], lr=0.1, momentum=0.9 - 0.1 * i)
        wrapped, first = wrap("legato", torch.compile(model, backend="eager"), first, seed=i)
        attachment(wrapped).manage(second)
        state = {key: OptimizerState(wrapped, o) for key, o in (("first", first), ("second", second))}
        if i:
            dcp.load(state, checkpoint_id=tmp_path)
        else:
            x, y = model.batch(torch.Generator().manual_seed(dist.get_rank()))
            F.cross_entropy(wrapped(x), y).backward()
            first.step()
            second.step()
            dcp.save(state, checkpoint_id=tmp_path)
        return copy.deepcopy((first.state_dict(), second.state_dict()))

    saved, loaded = (in_mode(SHARDED, states, i) for i in (0, 1))
    names = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {"first.state.body.weight.exp_avg", "second.state.conv.bias.momentum_buffer"} < names.keys()
    assert all(state["state"] for state in saved)
    assert same(saved, loaded)


@on_ranks(2)
def test_a_checkpoint_in_the_background_is_of_the_moment_at_which_it_was_begun(tmp_path):
    path = tmp_path / "checkpoint"
    in_mode(SHARDED, functools.partial(save, path, "adam", in_background=True))
    in_mode(SHARDED, resume, path, "adam")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_it_by_its_own_means(two_ranks, tmp_path):
    path = tmp_path / "checkpoint"
    two_ranks.run(in_mode, SHARDED, save, path, "adam", "legato", None, False, Mixed)
    model = Mixed()
    parameters = list(model.parameters())
    optimizer = MAKE["adam"]([{"params": parameters[:3]}, {"params": parameters[3:]}])
    StepLR(optimizer, 2, 0.5)
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load({"optimizer": state}, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, state)
    expected = torch.load(f"{path}.pt")["before"]["optimizer"]
    assert same(optimizer.state_dict(), expected) and expected["state"]


#: Settings with which optimizers keep more.
SETTINGS = {
    "SGD": {"momentum": 0.9, "dampening": 0.1},
    "AdamW": {"amsgrad": True},
    "Adam": {"fused": True},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adagrad": {"initial_accumulator_value": 0.3},
}


@on_ranks(2)
@pytest.mark.parametrize("name", sorted(kind.__name__ for kind in ELEMENTWISE))
def test_torch_goes_on_with_parameters_that_had_got_no_gradient(name, tmp_path):
    """From `state_dict()`, which is DDP's bit for bit, and from the sharded checkpoint."""
    make = functools.partial(getattr(torch.optim, name), lr=0.01, **SETTINGS.get(name, {}))

    def go_on(model, optimizer):
        generator = torch.Generator().manual_seed(3)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator) if p.requires_grad else None
        optimizer.step()
        return model.state_dict()

    def trained(kind):
        torch.manual_seed(7)
        model = Various()
        options = {"find_unused_parameters": True} if kind == "ddp" else {}
        wrapped, optimizer = wrap(kind, model, make(model.parameters()), **options)
        train(wrapped, optimizer, StepLR(optimizer, 2, 0.5))
        return model, wrapped, optimizer, optimizer.state_dict()

    model, _, optimizer, ddps = trained("ddp")
    ddps = copy.deepcopy(ddps)
    expected = go_on(model, optimizer)
    model, wrapped, optimizer, legatos = in_mode(SHARDED, trained, "legato")
    assert same(ddps["state"], legatos["state"])
    dcp.save({"optimizer": OptimizerState(wrapped, optimizer)}, checkpoint_id=tmp_path)
    weights = model.state_dict()
    for loads in ("state_dict", "checkpoint"):
        model = Various()
        model.load_state_dict(weights)
        optimizer = make(model.parameters())
        if loads == "state_dict":
            optimizer.load_state_dict(legatos)
        else:
            StepLR(optimizer, 2, 0.5)
            state = get_optimizer_state_dict(model, optimizer)
            dcp.load({"optimizer": state}, checkpoint_id=tmp_path)
            set_optimizer_state_dict(model, optimizer, state)
        assert same(go_on(model, optimizer), expected)


# ---- memory ------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most numbers in the memory of any tensor that an operator gives back (ranks exchange plans, as bytes)."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and type(tensor) is not LocalShards:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return found


class Large(nn.Module):
    """One weight of 6,400 elements."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 40, 10))

    def forward(self, x):
        return x[:, :10] * self.weight.mean((0, 1))

    batch = Mixed.batch


@on_ranks(2)
def test_no_rank_has_more_than_its_shards_in_memory(tmp_path):
    _, *training = in_mode(SHARDED, functools.partial(made, "legato", "adam", seed=0, make=Large))
    train(*training)
    wrapped, optimizer, _ = training
    attachment(wrapped).flush()
    with Largest() as saving:
        dcp.save({"optimizer": OptimizerState(wrapped, optimizer)}, checkpoint_id=tmp_path)
    model, wrapped, optimizer, _ = in_mode(SHARDED, functools.partial(made, "legato", "adam", seed=1, make=Large))
    with Largest() as loading:
        dcp.load({"optimizer": OptimizerState(wrapped, optimizer)}, checkpoint_id=tmp_path)
    entries = OptimizerState(wrapped, optimizer).state_dict()["state"]["weight"]
    first, second = (sum(flat.numel() for flat in entries[key].flats) for key in ("exp_avg", "exp_avg_sq"))
    assert first == second and entries["exp_avg"].shape == model.weight.shape
    shards = gathered(first)
    assert sum(shards) == 6400
    assert 0 < saving.elements <= max(shards) and 0 < loading.elements <= max(shards)


# ---- what cannot be loaded, or saved -----------------------------------------------


class Wide(Various):
    """With another shape of one weight."""

    def __init__(self):
        super().__init__()
        self.cube = nn.Parameter(torch.randn(4, 3, 131))


def save_and_load(path, saver, loader, make=Various, change=None, partial=False):
    """Save what one optimizer has, and load it into another one, which stays as it was if it is not for it."""
    _, *training = made("legato", saver, seed=0)
    train(*training)
    dcp.save({"optimizer": OptimizerState(*training[:2])}, checkpoint_id=path)
    _, wrapped, optimizer, _ = made("legato", loader, seed=1, make=make)
    if change:
        change(optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    try:
        dcp.load({"optimizer": OptimizerState(wrapped, optimizer)}, checkpoint_id=path, planner=planner)
    finally:
        assert same(optimizer.state_dict(), before) and not before["state"]


def move_a_parameter(optimizer):
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


@on_ranks(2)
@pytest.mark.parametrize(
    ("saver", "loader", "options", "line"),
    [
        ("sgd", "momentum", {}, "Missing key in checkpoint state_dict: optimizer.state."),
        ("adam", "adamw", {"partial": True}, "the checkpoint has 'exp_avg' of its state, and no 'max_exp_avg_sq'"),
        (
            "momentum",
            "sgd",
            {},
            "with the checkpoint's settings, the optimizer keeps 'momentum_buffer', and with its own it does",
        ),
        (
            "adam",
            "adam",
            {"make": Wide},
            "Size mismatch between saved torch.Size([4, 3, 130]) and current: torch.Size([4, 3, 131]) for",
        ),
        (
            "adamw",
            "adamw",
            {"change": move_a_parameter},
            "group 0 of the optimizer: 2 parameters, ['scale'] ...; in the checkpoint 3 parameters, ['scale']",
        ),
        ("slow", "slow", {}, "its state 'second' is not there after a first step, and could not be loaded; save"),
    ],
)
def test_what_cannot_be_loaded_or_saved_is_said_on_every_rank(saver, loader, options, line, tmp_path):
    with pytest.raises((LegatoError, dcp.api.CheckpointException), match=re.escape(line)):
        in_mode(SHARDED, functools.partial(save_and_load, tmp_path, saver, loader, **options))


@on_ranks(2)
def test_parameters_of_no_model_have_no_name_in_a_checkpoint(tmp_path):
    _, wrapped, optimizer, _ = in_mode(SHARDED, made, "legato", "adam", 0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(
        (LegatoError, dcp.api.CheckpointException),
        match="optimizer: it has parameters that are not the model's, and have no name in a checkpoint",
    ):
        dcp.load({"optimizer": OptimizerState(wrapped, optimizer)}, checkpoint_id=tmp_path)
