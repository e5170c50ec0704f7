"""Rows of the equality matrix: compiled models. Everything here runs on the ranks."""

import random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F

from legato.auto import distribute
from legato.core.errors import RankError
from legato.core.plan import Message, Plan, Slice
from legato.pytorch import attach, attachment
from legato.pytorch.compiled.functions import GraphFunction
from legato.pytorch.parameters import trained_parameters
from legato.pytorch.recording.capture import capture
from legato.pytorch.runtime.attached.graph_sender import GraphSender
from legato.pytorch.runtime.sharding.checkpoint import OptimizerState
from legato.schedule.basics.compose import with_node_order
from support import runtime_cases
from support.automatic import short_tournaments
from support.matrix_checkpoint import same
from support.matrix_rows import Dense, adam, compared, sgd
from support.training import OPTIONS, compiled, distance, random_plan, train, under_both, wrap

STEPS = 8


class Layers(nn.Module):
    """Layers of one width, whose gradients appear one after another."""

    def __init__(self, count=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(count))
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    batch = Dense.batch


class Convolutions(nn.Module):
    """Convolutions, whose tensors inductor lays out channels-last, views of them, and branches."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.mix, self.last = nn.Linear(8, 8), nn.Conv2d(8, 4, 3)
        self.head = nn.Linear(36, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.left(x)) + self.right(x)
        x = self.mix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = F.gelu(x.view(x.shape[0], 4, 2, *x.shape[2:]).transpose(1, 2).reshape(x.shape))
        return self.head(self.last(x).flatten(1))

    def batch(self, generator):
        return torch.randn(4, 3, 11, 11, generator=generator), torch.randint(0, 10, (4,), generator=generator)


class Broken(Layers):
    """A graph break in the middle, and a tied layer on both sides of it."""

    def __init__(self):
        super().__init__(3)

    def forward(self, x):
        x = self.layers[1](torch.tanh(self.layers[0](x)))
        torch._dynamo.graph_break()
        return self.head(self.layers[2](torch.tanh(self.layers[0](x))))


class Shapes(Layers):
    """A batch of another size in each step; rank 1's changes only in the fourth."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def batch(self, generator):
        self.calls += 1
        size = 3 + self.calls if dist.get_rank() == 0 else 4 + (self.calls > 3)
        return torch.randn(size, 12, generator=generator), torch.randint(0, 10, (size,), generator=generator)


class Towers(nn.Module):
    """Two towers of layers, and their product."""

    def __init__(self):
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        a = b = x
        for left, right in zip(self.left, self.right, strict=True):
            a, b = torch.tanh(left(a)), torch.relu(right(b))
        return self.head(a * b)

    batch = Dense.batch


def per_tensor(model, forward_overlap=False):
    """A message per tensor, the last layer's first; with forward overlap, the first layer's."""
    slices = [Slice(n, 0, p.numel() * p.element_size()) for n, p in trained_parameters(model).items()]
    slices = slices if forward_overlap else slices[::-1]
    return Plan("per tensor", tuple(Message((s,)) for s in slices), forward_overlap=forward_overlap)


@under_both
def compiled_when(kind, when, backend):
    """`torch.compile` before or after the model is distributed, in place, or of a function around it."""
    torch._dynamo.reset()
    plain = Layers()
    module = torch.compile(plain, backend=backend) if when == "before" else plain
    wrapped, optimizer = wrap(kind, module, sgd(plain.parameters()))
    if when == "in place":
        plain.compile(backend=backend)
    run = torch.compile(wrapped, backend=backend) if when == "after" else wrapped

    def loss_of(x, y):
        return F.cross_entropy(run(x) * 2, y)

    if when == "around":
        loss_of = torch.compile(loss_of, backend=backend)
    return train(wrapped, optimizer, STEPS, loss_of=loss_of)


def sent_early(kind, backend, steps=5):
    """For each message of the last step, how many gradients autograd had added when it went out."""
    torch._dynamo.reset()
    model = kind()
    model.compile(backend=backend)
    wrapped, optimizer = attach(model, sgd(model.parameters()), per_tensor(model), **OPTIONS)
    arrived, found = [], []
    for accumulator in attachment(wrapped).reducer.accumulator_of.values():
        accumulator._node.register_hook(lambda *_: arrived.append(1))
    messages = attachment(wrapped).reducer.messages
    launch = messages.launch

    def noted(bucket):
        found.append(len(arrived))
        launch(bucket)

    messages.launch = noted
    for _ in range(steps):
        arrived.clear()
        found.clear()
        train(wrapped, optimizer, 1)
    return found


def late(kind, backend):
    """Updates that wait for the pieces of the forward graph, against the same pieces when nothing waits.

    Also how many did when the last forward pass began, and in how many forward passes graphs ran in pieces.
    """
    waited, cut, trained = [], [], []
    hide, run = GraphSender.hide_gates, GraphFunction.run

    def noted(self):
        waited.append(len(self.waiting()))
        hide(self)

    def counted(self, *args, **kwargs):
        cut.append(self.phase)
        return run(self, *args, **kwargs)

    GraphSender.hide_gates, GraphFunction.run = noted, counted
    try:
        for waits in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(7)
            model = kind()
            model.compile(backend=backend)
            plan = per_tensor(model, forward_overlap=True)
            wrapped, optimizer = attach(model, adam(model.parameters()), plan, **OPTIONS)

            flush = None if waits else attachment(wrapped).flush

            def step(optimizer, _, flush=flush):
                optimizer.step()
                if flush:
                    flush()

            trained.append(train(wrapped, optimizer, STEPS, step=step))
    finally:
        GraphSender.hide_gates, GraphFunction.run = hide, run
    return distance(*trained), waited[-1], cut.count("forward")


def as_in_eager_mode(kind, backend):
    """How far gradients of cut graphs are from those of eager mode, in the last of a few steps of no length."""
    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(7)
        model = kind()
        if compiles:
            model.compile(backend=backend)
        wrapped, optimizer = attach(model, sgd(model.parameters()), per_tensor(model, True), **OPTIONS)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        found.append([p.grad.clone() for p in train(wrapped, optimizer, 5).parameters()])
    return max((a - b).abs().max().item() / a.abs().max().item() for a, b in zip(*found, strict=True))


def hooked_late():
    """A forward hook that reads a parameter, registered in the sixth step, when updates wait."""

    def hook(model, optimizer, i):
        if i == 5:
            model.module.register_forward_pre_hook(lambda m, _: m.norms.append(m.head.weight.norm().item()))

    trained = []
    for kind in ("ddp", "legato"):
        torch._dynamo.reset()
        torch.manual_seed(7)
        model = Layers()
        model.norms = []
        model.compile(backend="aot_eager")
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
        trained.append(train(wrapped, optimizer, STEPS, inner=hook))
    assert trained[0].module.norms == trained[1].module.norms and trained[0].module.norms
    return distance(*trained)


def told_to_be_eager():
    """`torch.compiler.set_stance` from the sixth step on, when updates wait."""

    def tell(model, optimizer, i):
        if i == 5:
            torch.compiler.set_stance("force_eager")

    try:
        return compiled(compared, Layers, adam, STEPS, None, lambda *_: {"inner": tell})
    finally:
        torch.compiler.set_stance("default")


@short_tournaments()
def planned(steps=24):
    """`plan="auto"` in a compiled wrapper, with its first steps, those that are observed, and plans that take turns."""
    trained = []
    for kind in ("ddp", "legato"):
        torch._dynamo.reset()
        torch.manual_seed(7)
        model = Towers()
        optimizer = adam(model.parameters())
        if kind == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            wrapped, optimizer = distribute(model, optimizer, **OPTIONS)
        run = torch.compile(wrapped, backend="aot_eager")
        trained.append(train(wrapped, optimizer, steps, loss_of=lambda x, y, run=run: F.cross_entropy(run(x), y)))
    assert len(attachment(wrapped)._tournament.plans) > 1  # they still take turns
    return distance(*trained)


def shuffled(workload, seed):
    """A random order of the backward pass that dependencies allow."""
    rng, ops = random.Random(seed), workload.ops
    left, done = set(workload.phase_ops("backward")), []
    while left:
        done.append(rng.choice([i for i in sorted(left) if not left & set(ops[i].deps)]))
        left.remove(done[-1])
    return (*done, *(i for i in workload.iteration_order() if ops[i].phase != "backward"))


def in_order(backend, seed):
    """Whether gradients appear in the order of a plan that shuffles the backward graph, and change no weight."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    model = Towers()
    model.compile(backend=backend)
    x, y = model.batch(torch.Generator().manual_seed(0))
    workload = capture(model, sgd(model.parameters()), lambda: F.cross_entropy(model(x), y), runs=1, warmup=1)
    order = shuffled(workload, seed)
    place = {op: k for k, op in enumerate(order)}
    tensors = sorted(workload.tensors, key=lambda t: (place[t.ready_after], t.name))
    messages = tuple(Message((Slice(t.name, 0, t.nbytes),)) for t in tensors)
    plan = with_node_order(Plan("shuffled", messages, op_order=order), workload)
    assert plan.node_order
    wrapped, optimizer = attach(model, sgd(model.parameters()), plan, **OPTIONS)
    found, hand_over = [], GraphSender.hand_over

    def noted(self, parameter, grad):
        found.append(self.reducer.delivery.by_parameter[id(parameter)].name)
        hand_over(self, parameter, grad)

    GraphSender.hand_over = noted
    try:
        for _ in range(4):
            found.clear()
            train(wrapped, optimizer, 1)
    finally:
        GraphSender.hand_over = hand_over
    places = [place[next(t for t in tensors if t.name == name).ready_after] for name in found]
    assert len(set(places)) > 6
    return places == sorted(places)


def broken():
    return compiled(compared, Broken, adam)


def shapes():
    return compiled(compared, Shapes, adam)


def shapes_one_by_one():
    """A graph for each shape, until dynamo has compiled too many and leaves the model alone."""
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        return compiled(compared, Shapes, adam)


def two_models():
    """Two compiled models of one class, which share their compiled code, trained in turns."""
    trained = []
    for kind in ("ddp", "legato"):
        torch._dynamo.reset()
        pairs = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            model = Layers()
            model.compile(backend="aot_eager")
            pairs.append(wrap(kind, model, sgd(model.parameters()), seed))
        for i in range(STEPS):
            for wrapped, optimizer in pairs:
                train(wrapped, optimizer, 1, seed=i)
        trained.append([wrapped for wrapped, _ in pairs])
    return max(distance(a, b) for a, b in zip(*trained, strict=True))


def accumulated():
    """Several backward passes before a step, under `no_sync()` but for the last."""
    return compiled(runtime_cases.equality_accumulation)


def gradients_alone():
    """`torch.autograd.grad` between the steps, which adds to no parameter's gradient."""

    def look(model, optimizer, i):
        x, y = model.module.batch(torch.Generator().manual_seed(i))
        torch.autograd.grad(F.cross_entropy(model.module(x), y), list(model.parameters()))

    trained = []
    for kind in ("ddp", "legato"):
        torch._dynamo.reset()
        torch.manual_seed(7)
        model = Layers()
        model.compile(backend="aot_eager")
        wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
        trained.append(train(wrapped, optimizer, STEPS, inner=look))
    return distance(*trained)


def hooks_that_come_and_go():
    """A hook that changes a gradient, in the steps 4 to 6 only."""

    def change(model, optimizer, i):
        if i == 4:
            model.handle = model.module.layers[2].weight.register_hook(lambda g: g * 0.5)
        if i == 6:
            model.handle.remove()

    return compiled(compared, Layers, sgd, STEPS, None, lambda *_: {"inner": change})


@under_both
def regularized(kind):
    """Eager code adds to the gradients of some parameters too, in every step."""
    torch._dynamo.reset()
    model = Layers()
    model.compile(backend="aot_eager")
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def loss_of(x, y):
        return F.cross_entropy(wrapped(x), y) + 0.01 * sum(p.square().sum() for p in model.layers.parameters())

    return train(wrapped, optimizer, STEPS, loss_of=loss_of)


def regularized_once():
    """Eager code adds to a gradient in the sixth step only, when it was sent already."""
    torch._dynamo.reset()
    model = Layers()
    model.compile(backend="aot_eager")
    wrapped, optimizer = attach(model, sgd(model.parameters()), per_tensor(model), **OPTIONS)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for i in range(STEPS):
        x, y = model.batch(generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(x), y)
        try:
            (loss + model.head.weight.sum() if i == 5 else loss).backward()
        except RankError as error:
            return str(error)
        optimizer.step()
    return ""


ROWS = [
    shapes_one_by_one,
    broken,
    shapes,
    two_models,
    accumulated,
    gradients_alone,
    hooked_late,
    hooks_that_come_and_go,
    planned,
    regularized,
    told_to_be_eager,
]

#: Those that differ where gradients are views of the messages.
AS_VIEWS = [broken, two_models, accumulated, hooks_that_come_and_go]


def _compiled_in(how):
    """A model that is not compiled, compiled as a whole, in one of its parts, or in both ways."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    model = Layers(3)
    if how in ("part", "both"):
        model.layers[1] = torch.compile(model.layers[1], backend="aot_eager")
    return torch.compile(model, backend="aot_eager") if how in ("whole", "both") else model


def made_for_another_way(planned, trained, path):
    """A plan and a checkpoint of a model that is compiled in one way, for one that is compiled in another.

    The distance from DDP, and whether the optimizer's state is that which was saved.
    """
    plan = random_plan(_compiled_in(planned), 3)
    models = []
    for kind in ("ddp", "legato"):
        model = _compiled_in(trained)
        optimizer = adam(model.parameters())
        wrapped = nn.parallel.DistributedDataParallel(model)
        if kind == "legato":
            wrapped, optimizer = attach(wrapped, optimizer, plan)
        models.append(train(wrapped, optimizer, 3))
    dcp.save({"optimizer": OptimizerState(wrapped, optimizer)}, checkpoint_id=path)
    model = _compiled_in(planned)
    wrapped, again = attach(model, adam(model.parameters()), plan)
    dcp.load({"optimizer": OptimizerState(wrapped, again)}, checkpoint_id=path)
    return distance(*models), same(optimizer.state_dict(), again.state_dict())
