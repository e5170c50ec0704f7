"""`legato.fully_shard` does what the code of a plan says, and trains what torch's own wrapping trains."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support import fully_sharded
from support.fully_sharded import Net
from torch import nn
from torch.distributed.fsdp import FSDPModule

import legato
from legato.core.errors import InputError
from legato.core.wrapping import Group, Wrapping

processes = pytest.mark.processes
#: The calls by which a plan is applied, beside `fully_shard`.
SETTERS = [name for name in dir(FSDPModule) if name.startswith("set_")]
#: As many buffers as this torch can have.
BUFFERS = 2 if "set_reduce_scatter_max_input_buffers" in SETTERS else 1


def apply_and_note(apply, wrapping, count):
    """The calls that `apply(model, wrapping)` makes, with paths instead of modules; setters are sorted."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
    path_of = {id(module): path for path, module in model.named_modules()}
    wrapped, told = [], []

    def wrap(modules, **options):
        wrapped.append(([path_of[id(m)] for m in modules] if isinstance(modules, list) else "root", options))
        return modules

    def setter(name):
        def note(module, value):
            value = [path_of[id(m)] for m in value] if isinstance(value, list) else value
            told.append((name, path_of[id(module)], value))

        return note

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.fsdp.fully_shard", wrap)
        patch.setattr("legato.pytorch.fully_shard.wrap", wrap)
        for mesh in ("torch.distributed.device_mesh", "legato.pytorch.fully_shard"):
            patch.setattr(f"{mesh}.init_device_mesh", lambda _device, *args, **kwargs: (args, kwargs))
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda: 24)
        for name in SETTERS:
            patch.setattr(nn.Module, name, setter(name), raising=False)
        apply(model, wrapping)
    return wrapped, sorted(told)


@st.composite
def wrappings(draw):
    count = draw(st.integers(1, 12))
    cuts = sorted(draw(st.sets(st.integers(1, count))) | {0})
    groups = tuple(
        Group(
            tuple(f"layers.{k}" for k in range(a, b)),
            draw(st.sampled_from([True, True, False, 2])),
            draw(st.booleans()),
        )
        for a, b in pairwise(cuts)
    )
    small = st.integers(0, 3)
    return count, Wrapping(
        "random", groups, draw(small), draw(small), draw(st.integers(1, BUFFERS)), draw(st.sampled_from([1, 2, 4])),
        2, draw(st.sampled_from(["each", "gathered-once"])),
    )  # fmt: skip


@given(wrappings())
def test_the_code_makes_the_same_calls(case):
    count, wrapping = case
    by_code = apply_and_note(lambda model, plan: exec(plan.as_code(), {"model": model}), wrapping, count)
    assert apply_and_note(legato.fully_shard, wrapping, count) == by_code
    assert len(by_code[0]) == len(wrapping.groups) + 1
    assert by_code[0][-1][0] == "root"


@processes
@pytest.mark.parametrize("variant", ["plain", "tied", "frozen", "lora", "checkpointed", "clipped", "compiled", "bf16"])
def test_two_ranks_train_what_the_code_and_blocks_train(two_ranks, variant):
    settings = {"forward_prefetch": 2, "backward_prefetch": 2, "micro_batches": 2, "sync": "last"}
    others = ["by_code"] if variant == "tied" else ["by_code", "by_block"]
    assert two_ranks.run(fully_sharded.differences, variant, settings, others) == [[], []]


@processes
@pytest.mark.parametrize("sync", ["each", "last", "gathered-once"])
def test_three_ranks_accumulate_as_the_code_does(three_ranks, sync):
    settings = {"micro_batches": 3, "sync": sync, "buffers": BUFFERS, "backward_prefetch": 1}
    assert three_ranks.run(fully_sharded.differences, "plain", settings, ["by_code"]) == [[], [], []]


@processes
@pytest.mark.parametrize("variant", ["plain", "lora"])
def test_four_ranks_with_replicas_train_what_the_code_trains(four_ranks, variant):
    settings = {"replicas": 2, "micro_batches": 2, "sync": "all-reduce-last", "forward_prefetch": 1}
    assert four_ranks.run(fully_sharded.differences, variant, settings, ["by_code"]) == [[]] * 4


@processes
def test_four_ranks_reshard_to_pairs_and_load_checkpoints_of_other_plans(four_ranks, tmp_path):
    assert four_ranks.run(fully_sharded.differences, "plain", {"node": 2}, ["by_code"]) == [[]] * 4
    assert four_ranks.run(fully_sharded.reloaded, str(tmp_path)) == [[]] * 4


@pytest.fixture
def ranks(monkeypatch):
    """Pretends that there are so many ranks."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    return lambda count: monkeypatch.setattr(dist, "get_world_size", lambda: count)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("blocks.9",)], "groups: 'blocks.9' (expected a module of Net; is it a plan for another model than 'plan'?)"),
        ([("blocks",)], "groups: 'blocks' is a ModuleList, which is never called (expected its elements)"),
        ([("embed",)], "groups: 'embed.weight' is also 'head.weight' (expected tied parameters in one group)"),
        (
            [("head",), ("embed",)],
            "groups: 'embed.weight' is also 'head.weight' (expected tied parameters in one group)",
        ),
        ([("blocks.0",), ("again",)], "groups: a module of 'again' is in another one, too (expected it in one)"),
    ],
)
def test_plans_that_do_not_fit_the_model_are_refused(groups, message):
    model = Net("tied")
    model.again = model.blocks[0]
    with pytest.raises(legato.PlanError) as error:
        legato.fully_shard(model, Wrapping("plan", tuple(map(Group, groups))))
    assert str(error.value) == message
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


@pytest.mark.parametrize(
    ("count", "wrapping", "message"),
    [
        (1, Wrapping("plan", ()), "1 rank: there is nothing to shard (expected at least 2)"),
        (4, Wrapping("plan", (Group(("embed",), 3),)), "reshard: 3 (expected a divisor of the 4 ranks that shard)"),
        (
            4,
            Wrapping("plan", (Group(("embed",), 4),), replicas=2),
            "reshard: 4 (expected a divisor of the 2 ranks that",
        ),
        (4, Wrapping("plan", (), replicas=3), "replicas: 3 (expected a divisor of the 4 ranks)"),
    ],
)
def test_plans_that_do_not_fit_the_ranks_are_refused(ranks, count, wrapping, message):
    ranks(count)
    with pytest.raises(InputError) as error:
        legato.fully_shard(Net("plain"), wrapping)
    assert str(error.value).startswith(message)


def test_a_mesh_that_does_not_fit_the_plan_is_refused(ranks):
    ranks(4)
    mesh = SimpleNamespace(ndim=1, size=lambda dim=None: 4)
    with pytest.raises(legato.PlanError, match="mesh: 1 replica"):
        legato.fully_shard(Net("plain"), Wrapping("plan", (), replicas=2), mesh=mesh)


def test_without_a_process_group():
    with pytest.raises(InputError, match="no process group"):
        legato.fully_shard(Net("plain"), Wrapping("plan", ()))


def test_a_torch_without_the_call_that_a_plan_needs(monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_max_input_buffers", raising=False)
    with pytest.raises(InputError, match="buffers: 2"):
        legato.fully_shard(Net("plain"), Wrapping("plan", (), buffers=2))
