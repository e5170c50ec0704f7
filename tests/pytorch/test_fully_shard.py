"""`legato.fully_shard` does what the code of a plan says, and trains what torch's own wrapping trains."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import legato
from legato.core.errors import InputError
from legato.core.wrapping import Group, Wrapping

slow = pytest.mark.slow
#: The calls by which a plan is applied, beside `fully_shard`.
SETTERS = [name for name in dir(FSDPModule) if name.startswith("set_")]
#: As many buffers as this torch can have.
BUFFERS = 2 if "set_reduce_scatter_max_input_buffers" in SETTERS else 1

# ---- calls ---------------------------------------------------------------------------


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


# ---- training ------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width, rank):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        if rank:
            self.low, self.high = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.down(F.gelu(self.up(h)))
        return x + self.high(self.low(h)) if hasattr(self, "low") else x


class Net(nn.Module):
    """A language model in small; `variant` says what is special."""

    def __init__(self, variant):
        super().__init__()
        self.variant = variant
        self.embed, self.norm, self.head = nn.Embedding(13, 7), nn.LayerNorm(7), nn.Linear(7, 13, bias=False)
        self.blocks = nn.ModuleList(Block(7, 2 if variant == "lora" else 0) for _ in range(6))
        if variant == "tied":
            self.head.weight = self.embed.weight
        if variant == "frozen":
            for module in (self.embed, *self.blocks[:3]):
                module.requires_grad_(False)
        if variant == "lora":
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".low." in name or ".high." in name)
        if variant == "compiled":
            for block in self.blocks:
                block.compile(backend="aot_eager")

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.variant == "checkpointed" else block(h)
        return self.head(self.norm(h))


def wrapping_of(variant, node=True, **settings):
    """Uneven groups, some of them kept, one resharded to `node` ranks."""
    ends = (("embed", "head"),) if variant == "tied" else (("embed",), ("norm", "head"))
    first = Group(ends[0], True, in_backward=variant in ("tied", "checkpointed"))
    inner = (
        Group(("blocks.0", "blocks.1", "blocks.2"), False),
        Group(("blocks.3",), node),
        Group(("blocks.4", "blocks.5")),
    )
    return Wrapping("test", (first, *inner, *(Group(group, False) for group in ends[1:])), **settings)


def by_legato(model, wrapping, options):
    assert legato.fully_shard(model, wrapping, **options) is model

    def before(k):
        last = k == wrapping.micro_batches - 1
        if wrapping.sync == "last":
            model.set_requires_gradient_sync(last)
        elif wrapping.sync == "all-reduce-last":
            model.set_requires_all_reduce(last)
        elif wrapping.sync == "gathered-once":
            model.set_reshard_after_backward(last)

    return before


def by_code(model, wrapping, options):
    code = wrapping.as_code().replace('"cuda"', '"cpu"').replace("options = {}", "options = given")
    wraps, _, loop = code.partition("\n# In each step")
    exec(wraps, {"model": model, "given": options})
    setting = [line.removeprefix("# ").strip() for line in loop.splitlines() if "model.set_" in line]
    return lambda k: exec("\n".join(setting), {"model": model, "k": k})


def by_block(model, wrapping, options):
    for block in model.blocks:
        torch_fully_shard(block, **options)
    torch_fully_shard(model, **options)
    return lambda k: model.set_requires_gradient_sync(k == wrapping.micro_batches - 1)


def seeded(variant):
    torch.manual_seed(0)
    return Net(variant)


def trained(wrap, variant, wrapping):
    """The weights after three steps, whole."""
    model = seeded(variant)
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if variant == "bf16" else {}
    before = wrap(model, wrapping, options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        for k in range(wrapping.micro_batches):
            before(k)
            tokens = torch.randint(13, (4, 5), generator=generator)
            F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
        if variant == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def assert_as_trained(others, variant, **settings):
    """Legato trains all that is to be trained, to the bits of other ways to wrap."""
    wrapping = wrapping_of(variant, **settings)
    ours = trained(by_legato, variant, wrapping)
    for name, parameter in seeded(variant).named_parameters():
        assert not (parameter.requires_grad and torch.equal(ours[name], parameter)), name
    for other in others:
        theirs = trained(other, variant, wrapping)
        assert theirs.keys() == ours.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == [], other


@slow
@on_ranks(2)
@pytest.mark.parametrize(
    "variant",
    ["plain", "tied", "frozen", "lora", "checkpointed", "clipped", "bf16", "compiled"],
)
def test_two_ranks_train_what_the_code_and_blocks_train(variant):
    others = [by_code] if variant == "tied" else [by_code, by_block]
    assert_as_trained(others, variant, forward_prefetch=2, backward_prefetch=2, micro_batches=2, sync="last")


@slow
@on_ranks(3)
@pytest.mark.parametrize("sync", ["each", "last", "gathered-once"])
def test_three_ranks_accumulate_as_the_code_does(sync):
    assert_as_trained([by_code], "plain", micro_batches=3, sync=sync, buffers=BUFFERS, backward_prefetch=1)


@slow
@on_ranks(4)
@pytest.mark.parametrize("variant", ["plain", "lora"])
def test_four_ranks_with_replicas_train_what_the_code_trains(variant):
    settings = {"replicas": 2, "micro_batches": 2, "sync": "all-reduce-last", "forward_prefetch": 1}
    assert_as_trained([by_code], variant, **settings)


@slow
@on_ranks(4)
def test_four_ranks_reshard_to_pairs():
    assert_as_trained([by_code], "plain", node=2)


@slow
@on_ranks(4)
def test_a_plan_loads_the_checkpoint_of_another(tmp_path):
    model, other = seeded("plain"), Net("plain")
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    legato.fully_shard(model, wrapping_of("plain"))
    legato.fully_shard(other, Wrapping("other", (Group(("blocks.1", "blocks.2")), Group(("norm", "head"), False))))
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(other, state)
    assert all(torch.equal(p.full_tensor(), whole[name]) for name, p in other.named_parameters())


# ---- what is refused -----------------------------------------------------------------


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
