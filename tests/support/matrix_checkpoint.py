"""Checkpoints of sharded optimizers, made and read by `torch.distributed.checkpoint`. Everything here runs on ranks."""

import copy
import functools

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

from legato.core.errors import LegatoError
from legato.pytorch import attachment
from legato.pytorch.runtime.sharding.checkpoint import LocalShards, OptimizerState
from support.matrix_sharded import Mixed
from support.training import wrap

STEPS = 5

#: Optimizers of several groups.
MAKE = {
    "sgd": lambda ps, lr=0.1: torch.optim.SGD(ps, lr=lr),
    "momentum": lambda ps, lr=0.05: torch.optim.SGD(ps, lr=lr, momentum=0.9, dampening=0.1, weight_decay=1e-2),
    "adam": lambda ps, lr=1e-2: torch.optim.Adam(ps, lr=lr),
    "adamw": lambda ps, lr=1e-2: torch.optim.AdamW(ps, lr=torch.tensor(lr), amsgrad=True),
    "adagrad": lambda ps, lr=1e-2: torch.optim.Adagrad(ps, lr=lr),
    "nadam": lambda ps, lr=1e-2: torch.optim.NAdam(ps, lr=lr),
    "slow": lambda ps: Slow(ps, lr=0.1),
    "asgd": lambda ps, lr=1e-2: torch.optim.ASGD(ps, lr=lr),
}


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


def made(kind, name, seed, init=7, make=Various):
    torch.manual_seed(init)
    model = make()
    parameters = list(model.parameters())
    optimizer = MAKE[name]([{"params": parameters[:3], "weight_decay": 1e-3}, {"params": parameters[3:]}])
    wrapped, optimizer = wrap(
        kind, model, optimizer, seed, **({"find_unused_parameters": True} if kind == "ddp" else {})
    )
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


def save(path, name, kind="legato", rank=None, how="save", make=Various):
    """Train, save, and train on; what it leads to is beside the checkpoint."""
    model, *training = made(kind, name, seed=0, make=make)
    wrapped, optimizer, scheduler = training
    train(*training, rank=rank)
    before = copy.deepcopy({"weights": model.state_dict(), "optimizer": optimizer.state_dict()})
    state = {"model": wrapped, "optimizer": OptimizerState(wrapped, optimizer), "scheduler": scheduler}
    model.uses_later = True
    if how == "save":
        dcp.save(state, checkpoint_id=path)
        train(*training, seed=4, rank=rank)
    else:
        saved = dcp.async_save(state, checkpoint_id=path)
        train(*training, seed=4, rank=rank)
        saved.result()
    after = model.state_dict()
    if dist.get_rank() == 0:
        torch.save({"before": before, "after": after}, f"{path}.pt")
    dist.barrier()


def resume(path, name, kind="legato", rank=None, partial=False, trains_before=False):
    """Load into an optimizer of other settings, under another plan, and train on: the distance of the weights.

    The optimizer is new, or has a state already. On three ranks, the distance is that from a run that has loaded the
    whole state.
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
    return distance_of(*ends[-2:])


#: Settings with which optimizers keep more.
SETTINGS = {
    "SGD": {"momentum": 0.9, "dampening": 0.1},
    "AdamW": {"amsgrad": True},
    "Adam": {"fused": True},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adagrad": {"initial_accumulator_value": 0.3},
}


def torch_goes_on(path, name):
    """What torch alone makes of a sharded state, when a parameter gets its first gradient: the distance from DDP.

    That of `state_dict()`, which is DDP's bit for bit, and that of the sharded checkpoint.
    """
    known, ends = {}, []
    make = functools.partial(getattr(torch.optim, name), lr=0.01, **SETTINGS.get(name, {}))

    def go_on(model, optimizer):
        generator = torch.Generator().manual_seed(3)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator) if p.requires_grad else None
        optimizer.step()
        ends.append(model.state_dict())

    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = Various()
        options = {"find_unused_parameters": True} if kind == "ddp" else {}
        wrapped, optimizer = wrap(kind, model, make(model.parameters()), **options)
        train(wrapped, optimizer, StepLR(optimizer, 2, 0.5))
        known[kind] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if kind == "ddp":
            go_on(model, optimizer)
    assert same(known["ddp"][1]["state"], known["legato"][1]["state"])
    dcp.save({"optimizer": OptimizerState(wrapped, optimizer)}, checkpoint_id=path)
    for loads in ("state_dict", "checkpoint"):
        model = Various()
        model.load_state_dict(known["legato"][0])
        optimizer = make(model.parameters())
        if loads == "state_dict":
            optimizer.load_state_dict(known["legato"][1])
        else:
            StepLR(optimizer, 2, 0.5)
            state = get_optimizer_state_dict(model, optimizer)
            dcp.load({"optimizer": state}, checkpoint_id=path)
            set_optimizer_state_dict(model, optimizer, state)
        go_on(model, optimizer)
    return [distance_of(ends[0], end) for end in ends[1:]]


def several(path):
    """Two optimizers of a compiled model in one checkpoint."""
    found = []
    for i in (0, 1):
        torch.manual_seed(i)
        model = Mixed()
        first = torch.optim.Adam([*model.body.parameters(), model.scale], lr=0.01 * (i + 1))
        second = torch.optim.SGD([*model.conv.parameters(), *model.head.parameters()], lr=0.1, momentum=0.9 - 0.1 * i)
        wrapped, first = wrap("legato", torch.compile(model, backend="eager"), first, seed=i)
        attachment(wrapped).manage(second)
        state = {key: OptimizerState(wrapped, o) for key, o in (("first", first), ("second", second))}
        if i:
            dcp.load(state, checkpoint_id=path)
        else:
            x, y = model.batch(torch.Generator().manual_seed(dist.get_rank()))
            F.cross_entropy(wrapped(x), y).backward()
            first.step()
            second.step()
            dcp.save(state, checkpoint_id=path)
        found.append(copy.deepcopy((first.state_dict(), second.state_dict())))
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert {"first.state.body.weight.exp_avg", "second.state.conv.bias.momentum_buffer"} < names.keys()
    assert all(state["state"] for state in found[0])
    return same(*found)


def distance_of(a, b):
    assert a.keys() == b.keys()
    return max((a[key].double() - b[key].double()).abs().max().item() for key in a)


def same(a, b):
    """Whether two states are equal bit for bit, in everything."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    return a == b


# ---- memory -----------------------------------------------------------------------------------


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


def largest(path):
    """The elements of the weight's shard, and of the largest tensor while it is saved, and while it is loaded."""
    model, wrapped, optimizer, scheduler = made("legato", "adam", seed=0, make=Large)
    train(wrapped, optimizer, scheduler)
    attachment(wrapped).flush()
    with Largest() as saving:
        dcp.save({"optimizer": OptimizerState(wrapped, optimizer)}, checkpoint_id=path)
    model, wrapped, optimizer, scheduler = made("legato", "adam", seed=1, make=Large)
    with Largest() as loading:
        dcp.load({"optimizer": OptimizerState(wrapped, optimizer)}, checkpoint_id=path)
    entries = OptimizerState(wrapped, optimizer).state_dict()["state"]["weight"]
    held = {sum(flat.numel() for flat in entries[key].flats) for key in ("exp_avg", "exp_avg_sq")}
    assert len(held) == 1 and entries["exp_avg"].shape == model.weight.shape
    return held.pop(), saving.elements, loading.elements


# ---- what cannot be loaded, or saved -------------------------------------------------------------


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


class Wide(Various):
    """With another shape of one weight."""

    def __init__(self):
        super().__init__()
        self.cube = nn.Parameter(torch.randn(4, 3, 131))


def said(what, path):
    """What is said where a checkpoint is not for the optimizer, or an optimizer cannot be saved."""
    saver, loader, make, partial = {
        "entry": ("sgd", "momentum", Various, False),
        "part of the state": ("adam", "adamw", Various, True),
        "settings": ("momentum", "sgd", Various, False),
        "shape": ("adam", "adam", Wide, False),
        "groups": ("adamw", "adamw", Various, False),
        "others": ("adam", "adam", Various, False),
        "later": ("slow", "slow", Various, False),
    }[what]
    try:
        _, *training = made("legato", saver, seed=0)
        train(*training)
        dcp.save({"optimizer": OptimizerState(*training[:2])}, checkpoint_id=path)
        _, wrapped, optimizer, _ = made("legato", loader, seed=1, make=make)
        if what == "groups":
            first, second = optimizer.param_groups
            second["params"].append(first["params"].pop())
        elif what == "others":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        planner = DefaultLoadPlanner(allow_partial_load=partial)
        before = copy.deepcopy(optimizer.state_dict()) if what != "others" else None
        dcp.load({"optimizer": OptimizerState(wrapped, optimizer)}, checkpoint_id=path, planner=planner)
    except (LegatoError, dcp.api.CheckpointException) as error:
        if what in ("part of the state", "settings", "groups"):
            assert same(optimizer.state_dict(), before) and not before["state"]
        return str(error)
    return "nothing"
