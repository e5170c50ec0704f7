"""What is particular to sharded optimizers and gradients. Everything here runs on the ranks."""

import copy
import io
import json
import random
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from legato.core.errors import InputError, RankError
from legato.core.plan import Message, Plan, Slice
from legato.pytorch import GradScaler
from legato.pytorch.parameters import trained_parameters
from legato.pytorch.runtime.attached.attach import attach, attachment, attachment_of
from legato.pytorch.runtime.waiting import gate
from support.matrix_rows import STEPS, Dense, adam, compared, sgd
from support.training import OPTIMIZERS, SHARD, distance, random_plan, train, under_both, wrap


class Mixed(nn.Module):
    """Weights of both memory formats, one number, and one that is large."""

    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(12, 300), nn.Parameter(torch.tensor(1.0))
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(180, 10)

    def forward(self, x):
        x = x.to(self.scale.dtype)
        return self.head(F.gelu(self.conv(self.body(x * self.scale).view(-1, 3, 10, 10)[:, :, :8, :8])).flatten(1))

    batch = Dense.batch


def per_tensor(model):
    """A message for each tensor, and another one for the rest of a large one."""
    slices = []
    for name, p in trained_parameters(model).items():
        cut = 1000 if p.nbytes > 8192 else p.nbytes
        slices += [Slice(name, a, b) for a, b in ((0, cut), (cut, p.nbytes)) if a < b]
    return Plan("per tensor", tuple(Message((s,)) for s in reversed(slices)))


@under_both
def whole_tensors(kind, name, dtype=torch.float32):
    """An optimizer whose vectorized update rounds what does not fill a vector differently."""
    model = Mixed().to(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        wrapped, optimizer = attach(model, optimizer, per_tensor(model), shard=SHARD[-1])
    return train(wrapped, optimizer, STEPS)


def clipped(norm_type, max_norm=0.01):
    """Clipping by norm: the distance of the weights, relative to that of a run that is not clipped."""

    def clip(model, optimizer, i):
        if (attached := attachment_of(model)) is not None:
            norms.append(attached.clip_grad_norm_(max_norm, norm_type))
        else:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type))

    norms = []
    found = compared(Dense, adam, inner=clip)
    expected, ours = norms[:STEPS], norms[STEPS:]
    assert all(torch.isclose(a, b, rtol=1e-5) for a, b in zip(expected, ours, strict=True)), (expected, ours)
    assert all(norm > max_norm for norm in expected)
    return found


def clip_value(model, value):
    if (attached := attachment_of(model)) is not None:
        attached.clip_grad_value_(value)
    else:
        nn.utils.clip_grad_value_(model.parameters(), value)


def clipped_by_value():
    def clip(model, optimizer, i):
        clip_value(model, 0.01)

    return compared(Dense, adam, inner=clip)


def scaled(scaler_of=GradScaler):
    """fp16 autocast with a scaler and clipping by value; now and then the gradients of one rank overflow."""
    trained = []
    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = Mixed()
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
        scaler = (torch.amp.GradScaler if kind == "ddp" else scaler_of)("cpu", init_scale=2.0**10, growth_interval=4)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for i in range(STEPS):
            x, y = model.batch(generator)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(wrapped(x), y)
            if i % 5 == 2 and dist.get_rank() == 1:
                loss = loss + model.head.bias.sum() * float("inf")  # in the shards of one rank
            scaler.scale(loss).backward()
            if i % 2:
                scaler.unscale_(optimizer)
                clip_value(wrapped, 0.01)
            scaler.step(optimizer)
            scaler.update()
        trained.append((wrapped, scaler.get_scale()))
    (ddp, scale), (ours, same) = trained
    return distance(ddp, ours) if scale == same and scale != 2.0**10 else (scale, same)


def several_optimizers():
    """Two optimizers of different kinds; the second steps in every other iteration only."""

    def training_of(kind):
        torch.manual_seed(7)
        model = Mixed()
        first = adam([*model.body.parameters(), model.scale])
        second = sgd([*model.conv.parameters(), *model.head.parameters()])
        wrapped, first = wrap(kind, model, first)
        if kind == "legato":
            attachment(wrapped).manage(second)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for i in range(STEPS):
            x, y = model.batch(generator)
            F.cross_entropy(wrapped(x), y).backward()
            for optimizer in (second, first) if i % 2 else (first,):
                optimizer.step()
            first.zero_grad()
            second.zero_grad()
        return wrapped

    return distance(training_of("ddp"), training_of("legato"))


def states(optimizer_name):
    """Sharded and unsharded plans in turns, and states that are saved from one kind of optimizer into the other."""
    shard, trained = SHARD.pop(), []
    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = Mixed()
        wrapped, optimizer = wrap(kind, model, OPTIMIZERS[optimizer_name](model.parameters()))
        for i in range(6):
            train(wrapped, optimizer, 2, seed=i)
            if kind == "legato":
                SHARD[:] = [shard] * (i % 2 == 0)
                attachment(wrapped).adopt(random_plan(model, seed=i))
            saved = optimizer.state_dict()
            again = OPTIMIZERS[optimizer_name](model.parameters())
            again.load_state_dict(saved)
            if not SHARD or kind == "ddp":
                optimizer.load_state_dict(again.state_dict())
            else:
                elements = sum(v.numel() for e in optimizer.state.values() for v in e.values() if v.dim())
                whole = sum(v.numel() for e in again.state.values() for v in e.values() if v.dim())
                assert elements < 0.75 * whole
                optimizer.load_state_dict(again.state_dict())
                assert elements == sum(v.numel() for e in optimizer.state.values() for v in e.values() if v.dim())
        SHARD.clear()
        trained.append((wrapped, again.state_dict()["state"]))
    (a, expected), (b, found) = trained
    assert expected.keys() == found.keys()
    for i, entries in expected.items():
        assert entries.keys() == found[i].keys()
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(found[i][key])), (i, key)
    return distance(a, b)


def first_half(path):
    """Train under a sharded plan; all ranks make the checkpoint, and rank 0 writes it."""
    torch.manual_seed(7)
    model = Dense()
    wrapped, optimizer = wrap("legato", model, adam(model.parameters()))
    train(wrapped, optimizer, 10)
    state = {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def released():
    """Messages that have memory, and gradients that parameters have, after a backward pass, and after a step."""
    torch.manual_seed(7)
    model = Dense()
    wrapped, optimizer = wrap("legato", model, adam(model.parameters()))
    train(wrapped, optimizer, 3)
    found = []

    def look():
        attachment(wrapped).flush()
        kept = sum(bucket.buffer.untyped_storage().nbytes() > 0 for bucket in attachment(wrapped).reducer.buckets)
        with gate.invisible():
            found.append((kept, sum(not slot.is_spent for slot in attachment(wrapped).reducer.slots)))

    x, y = model.batch(torch.Generator().manual_seed(0))
    optimizer.zero_grad()
    F.cross_entropy(wrapped(x), y).backward()
    attachment(wrapped).clip_grad_value_(1.0)
    look()
    optimizer.step()
    look()
    return found


def most_held(path):
    """The bytes of all gradients, and how many more than before are allocated at most in a step."""
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12)))
    wrapped, optimizer = attach(model, sgd(model.parameters()), per_tensor(model), shard=SHARD[-1])
    x = torch.randn(4, 128)

    def step():
        optimizer.zero_grad()
        wrapped(x).sum().backward()
        optimizer.step()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    path = f"{path}{dist.get_rank()}"
    profile.export_chrome_trace(path)
    events = json.loads(Path(path).read_text())["traceEvents"]
    most = max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")
    return sum(p.nbytes for p in model.parameters()), most


def plan_between(plans, set_to_none=False):
    """Plans that come between a step and `zero_grad()`, sharded or not, in turns."""
    shard = SHARD[-1]

    def step(optimizer, i):
        optimizer.step()
        if wrapped := optimizers.get(optimizer):
            SHARD[:] = [shard] * (plans[i % len(plans)] == "sharded")
            attachment(wrapped).adopt(random_plan(wrapped.module, seed=i))
            SHARD[:] = [shard]

    optimizers = {}

    def after(kind, wrapped, optimizer):
        if kind == "legato":
            optimizers[optimizer] = wrapped

    return compared(Dense, adam, after=after, step=step, set_to_none=set_to_none)


def copied_between():
    """Copies of a model between the backward pass and the step are copies of its weights."""

    def look(wrapped, optimizer, i):
        file = io.BytesIO()
        torch.save(wrapped.module, file)
        file.seek(0)
        for copied in (copy.deepcopy(wrapped.module), torch.load(file, weights_only=False)):
            for a, b in zip(copied.parameters(), wrapped.module.parameters(), strict=True):
                assert type(a) is nn.Parameter and not vars(a) and a.grad is None and torch.equal(a, b.detach())

    return compared(Dense, adam, inner=look)


def left_out():
    """Parameters that no optimizer has take part in the norm, and need no `zero_grad()`."""

    def head(parameters):
        return adam(list(parameters)[2:])

    def norm(wrapped, optimizer, i):
        if (attached := attachment_of(wrapped)) is not None:
            norms.append(attached.clip_grad_norm_(1e9))
        else:
            norms.append(nn.utils.clip_grad_norm_(wrapped.parameters(), 1e9))
            wrapped.zero_grad()

    norms = []
    found = compared(Dense, head)
    compared(Dense, head, step=lambda o, i: None, inner=norm, steps=1)
    assert torch.isclose(*norms, rtol=1e-6), norms
    return found


@under_both
def left_out_last(kind):
    """Parameters that no optimizer has, whose gradients go out after the all-gathers of the others."""
    model = nn.Sequential(Dense(), nn.Linear(10, 100_000), nn.Linear(100_000, 10))
    model.batch = model[0].batch
    optimizer = adam(model[0].parameters())
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        whole = [Message((Slice(name, 0, p.nbytes),)) for name, p in model.named_parameters()]
        halves = [msgspec.structs.replace(m, kind=kind) for m in whole for kind in ("reduce_scatter", "all_gather")]
        plan = Plan("in turns", tuple(halves), forward_overlap=True, shard=SHARD[-1])
        wrapped, optimizer = attach(model, optimizer, plan)
    return train(wrapped, optimizer, 4)


def evaluated():
    """Evaluation between the steps, of a model with parameters that no optimizer has."""

    def evaluate(optimizer, i):
        optimizer.step()
        if i > 1:
            with torch.no_grad():
                models[-1].eval()(torch.ones(i, 12))
            models[-1].train()

    models = []
    return compared(
        Dense,
        lambda parameters: adam(list(parameters)[2:]),
        after=lambda kind, wrapped, optimizer: models.append(wrapped),
        step=evaluate,
    )


def added_to_the_optimizer():
    """Parameters of the model that the optimizer gets in the middle, with a state that it had before."""

    def training_of(kind):
        torch.manual_seed(7)
        model = Dense()
        first, *others = model.parameters()
        wrapped, optimizer = wrap(kind, model, adam(others))
        train(wrapped, optimizer, 3)
        wrapped.zero_grad()
        optimizer.add_param_group({"params": [first], "lr": 5e-3})
        train(wrapped, optimizer, 3)
        saved = optimizer.state_dict()
        resumed, optimizer = wrap(kind, wrapped.module, adam(others))
        resumed.zero_grad()
        optimizer.add_param_group({"params": [first], "lr": 5e-3})
        optimizer.load_state_dict(saved)
        return train(resumed, optimizer, 3)

    return distance(training_of("ddp"), training_of("legato"))


def not_finite(norm_type):
    """The norm that each rank returns if there is a NaN in the gradients of the last shard only."""
    torch.manual_seed(7)
    model = Dense()
    wrapped, _ = attach(model, sgd(model.parameters()), per_tensor(model), shard=SHARD[-1])
    model.third.weight.register_hook(lambda grad: torch.cat([grad[:-1], grad[-1:] * float("nan")]))
    x, y = model.batch(torch.Generator().manual_seed(0))
    F.cross_entropy(wrapped(x), y).backward()
    return attachment(wrapped).clip_grad_norm_(1.0, norm_type).isnan().item()


# ---- what must be refused -------------------------------------------------------------------


def said(what):
    """What is said of a step that a sharded optimizer cannot do."""
    torch.manual_seed(7)
    model = Dense()
    wrapped, optimizer = wrap("legato", model, adam(model.parameters()))
    train(wrapped, optimizer, 2)
    x, y = model.batch(torch.Generator().manual_seed(0))

    def backward():
        F.cross_entropy(wrapped(x), y).backward()

    optimizer.zero_grad()
    try:
        if what == "no gradients":
            attachment(wrapped).clip_grad_norm_(1.0)
        elif what == "norm of order 0":
            backward()
            attachment(wrapped).clip_grad_norm_(1.0, 0.0)
        elif what == "added before the step":
            backward()
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
            optimizer.step()
        elif what == "another plan":
            backward()
            optimizer.step()
            attachment(wrapped).adopt(random_plan(model, seed=1))
            backward()
        elif what in ("a plan without shards", "a layer less without shards"):
            backward()
            optimizer.step()
            SHARD.clear()
            attachment(wrapped).adopt(random_plan(model, seed=1))
            if what == "a layer less without shards":
                model.first.weight.grad = model.third.weight.grad = None
                model.second.forward = lambda x: x
            backward()
        elif what == "two optimizers":
            attachment(wrapped).manage(sgd([model.first.weight]))
        elif what == "held":
            kept = []
            model.third.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
            backward()
        elif what == "only no_sync":
            with wrapped.no_sync():
                backward()
            optimizer.step()
        elif what == "one rank steps":
            backward()
            if dist.get_rank() == 0:
                optimizer.step()
            optimizer.zero_grad()
            backward()
        else:
            backward()
            if what == "read":
                model.first.weight.grad.norm()
            elif what == "twice":
                backward()
            elif what == "two steps":
                optimizer.step()
                optimizer.step()
            elif what == "not cleared":
                optimizer.step()
                backward()
    except (RankError, InputError) as error:
        return str(error)
    finally:
        attachment(wrapped).reducer.close()
    return "nothing"


def clipped_on_one_rank():
    """What rank 0 alone does in `clip_grad_norm_`, as its error says, and what the others do."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    torch.manual_seed(7)
    model = Dense()
    wrapped, optimizer = attach(
        model, adam(model.parameters()), random_plan(model, 0), process_group=group, shard=SHARD[-1]
    )
    train(wrapped, optimizer, 2)
    x, y = model.batch(torch.Generator().manual_seed(0))
    optimizer.zero_grad()
    F.cross_entropy(wrapped(x), y).backward()
    try:
        if dist.get_rank() == 0:
            attachment(wrapped).clip_grad_norm_(1.0)
        optimizer.step()
        attachment(wrapped).flush()
    except RankError as error:
        return str(error)
    return "nothing"


def adopted(kind):
    """A sharded plan for an optimizer that cannot be sharded, which has trained under another one."""
    shard, model = SHARD.pop(), Dense()
    wrapped, _ = attach(model, {"LBFGS": torch.optim.LBFGS}[kind](model.parameters()), random_plan(model, 0))
    SHARD.append(shard)
    attachment(wrapped).adopt(random_plan(model, 0))


def refused(what):
    """A model, an optimizer or a plan that cannot be sharded."""
    model = nn.Sequential(nn.Embedding(5, 12, sparse=True), Dense()) if what == "sparse" else Dense()
    kinds = {"LBFGS": torch.optim.LBFGS, "Adafactor": torch.optim.Adafactor}
    optimizer = kinds.get(what, torch.optim.SGD)(model.parameters(), lr=0.1)
    plan = random_plan(model, 0)
    shard = {"other": "gradients", "unknown": "everything"}.get(what, "none")
    attach(model, optimizer, plan, shard=shard)


def random_model(seed):
    """A random plan, optimizer and model, and random calls in between: the distance from DDP."""
    rng = random.Random(seed)
    name, looks = rng.choice(sorted(OPTIMIZERS)), [rng.random() < 0.3 for _ in range(12)]
    accumulates, zero = [rng.randrange(3) for _ in range(12)], rng.choice(["before", "after"])
    trained = []
    for kind in ("ddp", "legato"):
        torch.manual_seed(seed)
        model = Mixed()
        wrapped, optimizer = wrap(kind, model, OPTIMIZERS[name](model.parameters()), seed)
        generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        for look, times in zip(looks, accumulates, strict=True):
            if zero == "before":
                optimizer.zero_grad()
            for i in range(times + 1):
                x, y = model.batch(generator)
                wrapped.require_backward_grad_sync = i == times
                F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            if look:
                with torch.no_grad():
                    wrapped(x)
                    model.head.bias.clamp_(-0.5, 0.5)
            if zero == "after":
                optimizer.zero_grad()
        trained.append(wrapped)
    return distance(*trained)
