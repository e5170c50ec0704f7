"""Trainings with FSDP2, for ranks: a small model in variants, wrapped in three ways."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import legato
from legato.core.wrapping import Group, Wrapping

BLOCKS = 6


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
        self.blocks = nn.ModuleList(Block(7, 2 if variant == "lora" else 0) for _ in range(BLOCKS))
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


def train(wrap, variant, wrapping, steps=3):
    """The weights after some steps, whole."""
    model = _seeded(variant)
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if variant == "bf16" else {}
    before = wrap(model, wrapping, options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(steps):
        for k in range(wrapping.micro_batches):
            before(k)
            tokens = torch.randint(13, (4, 5), generator=generator)
            F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
        if variant == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def differences(variant, settings, others):
    """The parameters whose bits differ from those of other ways to wrap."""
    wrapping = wrapping_of(variant, **settings)
    ours = train(by_legato, variant, wrapping)
    untrained = {name: p.detach() for name, p in _seeded(variant).named_parameters() if p.requires_grad}
    assert all(not torch.equal(ours[name], value) for name, value in untrained.items())
    found = []
    for other in others:
        theirs = train(globals()[other], variant, wrapping)
        assert theirs.keys() == ours.keys()
        found += [(other, name) for name in ours if not torch.equal(ours[name], theirs[name])]
    return found


def _seeded(variant):
    torch.manual_seed(0)
    return Net(variant)


def reloaded(folder):
    """The parameters that differ after a checkpoint of one wrapping was loaded into another."""
    model, other = _seeded("plain"), Net("plain")
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    legato.fully_shard(model, wrapping_of("plain"))
    legato.fully_shard(other, Wrapping("other", (Group(("blocks.1", "blocks.2")), Group(("norm", "head"), False))))
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    return [name for name, p in other.named_parameters() if not torch.equal(p.full_tensor(), whole[name])]
