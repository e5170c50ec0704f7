"""Compiled models: messages leave while the backward graph runs, and weights are DDP's bit for bit on two ranks."""

import functools
import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.automatic import short_tournaments
from support.ranks import on_ranks
from support.rows import AUTO, in_mode, row
from support.strategies import shuffled
from support.training import (
    STEPS,
    Dense,
    adam,
    build,
    distance,
    random_plan,
    same,
    sgd,
    train,
    trained,
    wrap,
)
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.nn import functional as F

import legato
from legato.auto import distribute
from legato.core.errors import RankError
from legato.core.plan import Message, Plan, Slice
from legato.pytorch import attach, attachment
from legato.pytorch.compiled.functions import GraphFunction
from legato.pytorch.parameters import OwnHook, trained_parameters
from legato.pytorch.recording.capture import capture
from legato.pytorch.runtime.attached.graph_sender import GraphSender
from legato.pytorch.runtime.sharding.checkpoint import OptimizerState
from legato.schedule.basics.compose import with_node_order

pytestmark = pytest.mark.slow

# ---- models --------------------------------------------------------------------------


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


class Inside(Layers):
    """An eager forward pass that calls a compiled function, which has to be one graph."""

    def __init__(self):
        super().__init__(2)
        self.body = torch.compile(lambda x: self.layers[1](self.layers[0](x)), backend="aot_eager", fullgraph=True)

    def forward(self, x):
        return self.head(self.body(x))


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


def compiled(model, backend="aot_eager"):
    """The model, compiled in place."""
    torch._dynamo.reset()
    model.compile(backend=backend)
    return model


def per_tensor(model, forward_overlap=False):
    """A message per tensor, the last layer's first; with forward overlap, the first layer's."""
    slices = [Slice(n, 0, p.numel() * p.element_size()) for n, p in trained_parameters(model).items()]
    slices = slices if forward_overlap else slices[::-1]
    return Plan("per tensor", tuple(Message((s,)) for s in slices), forward_overlap=forward_overlap)


# ---- how a model is compiled ---------------------------------------------------------


@row()
@pytest.mark.parametrize(
    ("when", "backend"),
    [*((when, "aot_eager") for when in ("before", "after", "in place", "around")), ("in place", "eager")],
)
def test_wherever_it_is_compiled(kind, when, backend):
    """Before or after the model is distributed, in place, or a function around it; other backends are left alone."""
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


@row()
@pytest.mark.parametrize("model", ["Attention", "Checkpointed", "Convolutional", "Partial"])
def test_any_model(kind, model):
    return trained(kind, compiled(build(model)), "adam")


def compiled_in(how):
    """A model that is not compiled, compiled as a whole, in one of its parts, or in both ways."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    model = Layers(3)
    if how in ("part", "both"):
        model.layers[1] = torch.compile(model.layers[1], backend="aot_eager")
    return torch.compile(model, backend="aot_eager") if how in ("whole", "both") else model


@on_ranks(2)
@pytest.mark.parametrize("mode", [(), ("sharded optimizer",)])
@pytest.mark.parametrize(("first", "second"), [("", "whole"), ("whole", ""), ("", "part"), ("part", "both")])
def test_plans_and_checkpoints_fit_however_the_model_is_compiled(first, second, mode, tmp_path):
    """A plan of a model that is compiled in one way trains another, whose checkpoint fits the first."""
    plan = in_mode(mode, random_plan, compiled_in(first), 3)
    models = []
    for kind in ("ddp", "legato"):
        model = compiled_in(second)
        optimizer = adam(model.parameters())
        wrapped = nn.parallel.DistributedDataParallel(model)
        if kind == "legato":
            wrapped, optimizer = attach(wrapped, optimizer, plan)
        models.append(train(wrapped, optimizer, 3))
    assert distance(*models) == 0.0
    dcp.save({"optimizer": OptimizerState(wrapped, optimizer)}, checkpoint_id=tmp_path)
    model = compiled_in(first)
    wrapped, again = attach(model, adam(model.parameters()), plan)
    dcp.load({"optimizer": OptimizerState(wrapped, again)}, checkpoint_id=tmp_path)
    assert same(optimizer.state_dict(), again.state_dict())


# ---- graphs in pieces ----------------------------------------------------------------

CUT = pytest.mark.parametrize(
    ("make", "backend"), [(Layers, "aot_eager"), (Layers, "inductor"), (Convolutions, "inductor")]
)


@on_ranks(2)
@CUT
def test_messages_leave_before_the_graph_has_ended(make, backend):
    """Each message of a step goes out before autograd has added any gradient."""
    model = compiled(make(), backend)
    wrapped, optimizer = attach(model, sgd(model.parameters()), per_tensor(model))
    arrived, found = [], []
    for accumulator in attachment(wrapped).reducer.accumulator_of.values():
        accumulator._node.register_hook(OwnHook(lambda *_: arrived.append(1)))
    messages = attachment(wrapped).reducer.messages
    launch = messages.launch

    def noted(bucket):
        found.append(len(arrived))
        launch(bucket)

    messages.launch = noted
    for _ in range(5):
        arrived.clear()
        found.clear()
        train(wrapped, optimizer, 1)
    assert found == [0] * len(list(model.parameters()))


@on_ranks(2)
@CUT
def test_updates_are_waited_for_between_the_pieces_of_the_forward_graph(make, backend):
    """They change nothing against the same pieces when nothing waits."""
    waited, cut, models = [], [], []
    hide, run = GraphSender.hide_gates, GraphFunction.run

    def noted(self):
        waited.append(len(self.waiting()))
        hide(self)

    def counted(self, *args, **kwargs):
        cut.append(self.phase)
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphSender, "hide_gates", noted)
        patch.setattr(GraphFunction, "run", counted)
        for waits in (False, True):
            torch.manual_seed(7)
            model = compiled(make(), backend)
            wrapped, optimizer = attach(model, adam(model.parameters()), per_tensor(model, forward_overlap=True))
            flush = (lambda: None) if waits else attachment(wrapped).flush
            models.append(train(wrapped, optimizer, STEPS, step=lambda o, _, flush=flush: (o.step(), flush())))
    assert distance(*models) == 0.0
    assert waited[-1] == len(list(model.parameters()))  # when the last forward pass began
    assert cut.count("forward") == 2 * (STEPS - 2)  # the first two passes are watched


@on_ranks(2)
@CUT
def test_pieces_compute_what_eager_mode_computes(make, backend):
    """Gradients of cut graphs, in the last of a few steps of no length."""
    gradients = []
    for prepare in (lambda model: model, functools.partial(compiled, backend=backend)):
        torch.manual_seed(7)
        model = prepare(make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        trained = train(*attach(model, optimizer, per_tensor(model, True)), 5)
        gradients.append([p.grad.clone() for p in trained.parameters()])
    for expected, found in zip(*gradients, strict=True):
        assert (expected - found).abs().max() < 1e-4 * expected.abs().max()


@on_ranks(2)
@pytest.mark.parametrize(("backend", "seed"), [("aot_eager", 1), ("aot_eager", 2), ("inductor", 3)])
def test_gradients_appear_in_the_order_of_the_plan(backend, seed):
    """It shuffles the backward graph."""
    torch.manual_seed(7)
    model = compiled(Towers(), backend)
    x, y = model.batch(torch.Generator().manual_seed(0))
    workload = capture(model, sgd(model.parameters()), lambda: F.cross_entropy(model(x), y), runs=1, warmup=1)
    order = shuffled(workload, seed)
    place = {op: k for k, op in enumerate(order)}
    tensors = sorted(workload.tensors, key=lambda t: (place[t.ready_after], t.name))
    messages = tuple(Message((Slice(t.name, 0, t.nbytes),)) for t in tensors)
    plan = with_node_order(Plan("shuffled", messages, op_order=order), workload)
    assert plan.node_order
    wrapped, optimizer = attach(model, sgd(model.parameters()), plan)
    found, hand_over = [], GraphSender.hand_over

    def noted(self, parameter, grad):
        found.append(self.reducer.delivery.by_parameter[id(parameter)].name)
        hand_over(self, parameter, grad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphSender, "hand_over", noted)
        for _ in range(4):
            found.clear()
            train(wrapped, optimizer, 1)
    places = [place[next(t for t in tensors if t.name == name).ready_after] for name in found]
    assert len(set(places)) > 6 and places == sorted(places)


# ---- rows of the equality matrix -----------------------------------------------------


@row("views")
def test_a_broken_graph(kind):
    return trained(kind, compiled(Broken()), adam)


@row(*AUTO)
def test_a_function_that_is_one_graph(kind):
    torch._dynamo.reset()
    return trained(kind, Inside(), adam)


@row()
def test_shapes(kind):
    return trained(kind, compiled(Shapes()), adam)


@row()
def test_shapes_one_by_one(kind):
    """A graph for each shape, until dynamo has compiled too many and leaves the model alone."""
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        return trained(kind, compiled(Shapes()), adam)


@row("views")
def test_two_models(kind):
    """Two compiled models of one class, which share their compiled code, trained in turns."""
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
    return nn.ModuleList(wrapped for wrapped, _ in pairs)


@row("views")
def test_accumulation(kind):
    """Three backward passes a step, the first two under `no_sync()`."""
    model = compiled(build("Convolutional"))
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    for i in range(12):
        x, y = model.batch(generator)
        with nullcontext() if i % 3 == 2 else wrapped.no_sync():
            F.cross_entropy(wrapped(x), y).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return wrapped


@row()
def test_gradients_alone(kind):
    """`torch.autograd.grad` between the steps, which adds to no parameter's gradient."""

    def look(model, optimizer, i):
        x, y = model.module.batch(torch.Generator().manual_seed(i))
        torch.autograd.grad(F.cross_entropy(model.module(x), y), list(model.parameters()))

    return trained(kind, compiled(Layers()), sgd, inner=look)


@row()
def test_a_forward_hook_that_comes_late(kind):
    """It reads a parameter, and is registered in the sixth step, when updates wait."""
    model = compiled(Layers())
    model.norms = []

    def hook(wrapped, optimizer, i):
        if i == 5:
            model.register_forward_pre_hook(lambda m, _: m.norms.append(m.head.weight.norm().item()))

    trained(kind, model, adam, inner=hook)
    assert model.norms
    return model, [torch.tensor(model.norms)]


@row("views")
def test_hooks_that_come_and_go(kind):
    """A hook that changes a gradient, in the steps 4 to 6 only."""
    model, handles = compiled(Layers()), []

    def change(wrapped, optimizer, i):
        if i == 4:
            handles.append(model.layers[2].weight.register_hook(lambda g: g * 0.5))
        if i == 6:
            handles.pop().remove()

    return trained(kind, model, sgd, inner=change)


@row(*AUTO)
@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "fail_on_recompile"])
@pytest.mark.parametrize("in_place", [True, False])
def test_told_not_to_compile(kind, in_place, stance):
    """`torch.compiler.set_stance` from the sixth step on, when updates wait or plans take turns."""
    model = compiled(Layers()) if in_place else Layers()
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    run = wrapped if in_place else torch.compile(wrapped, backend="aot_eager")

    def tell(model, optimizer, i):
        if i == 5:
            torch.compiler.set_stance(stance)

    try:
        return train(wrapped, optimizer, 20, inner=tell, loss_of=lambda x, y: F.cross_entropy(run(x), y))
    finally:
        torch.compiler.set_stance("default")


@row(*AUTO)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("what", ["forward", "passes", "step"])
def test_compiled_steps(kind, what, backend):
    """A forward pass, a forward and a backward pass, or a whole step is compiled, and no function of legato's is."""
    torch._dynamo.reset()
    clear_compilation_metrics()
    model = Layers(2)
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))

    def forward(x, y):
        return F.cross_entropy(wrapped(x), y)

    def passes(x, y):
        optimizer.zero_grad()
        functions["forward"](x, y).backward()

    def step(x, y):
        functions["passes"](x, y)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    functions = {"forward": forward, "passes": passes, "step": step}
    functions[what] = torch.compile(functions[what], backend=backend)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        functions["step"](*model.batch(generator))
    files = [str(metrics.co_filename) for metrics in get_compilation_metrics()]
    assert __file__ in files and not [f for f in files if f.startswith(os.path.dirname(legato.__file__))]
    return wrapped


@row()
def test_an_automatic_plan(kind):
    """In a compiled wrapper, with its first steps, those that are observed, and plans that take turns."""
    torch._dynamo.reset()
    model = Towers()
    optimizer = adam(model.parameters())
    with short_tournaments():
        wrapped, optimizer = wrap(kind, model, optimizer) if kind == "ddp" else distribute(model, optimizer)
        run = torch.compile(wrapped, backend="aot_eager")
        train(wrapped, optimizer, 24, loss_of=lambda x, y: F.cross_entropy(run(x), y))
        assert kind == "ddp" or len(attachment(wrapped)._tournament.plans) > 1  # they still take turns
    return wrapped


# ---- eager code beside a graph -------------------------------------------------------


@row()
def test_eager_code_adds_to_gradients_too(kind):
    """To those of some parameters, in every step."""
    model = compiled(Layers())
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def loss_of(x, y):
        return F.cross_entropy(wrapped(x), y) + 0.01 * sum(p.square().sum() for p in model.layers.parameters())

    return train(wrapped, optimizer, STEPS, loss_of=loss_of)


@on_ranks(2)
def test_a_gradient_that_was_sent_and_then_changed_is_an_error():
    """Eager code adds to it in the sixth step only."""
    model = compiled(Layers())
    wrapped, optimizer = attach(model, sgd(model.parameters()), per_tensor(model))
    train(wrapped, optimizer, 5)
    x, y = model.batch(torch.Generator().manual_seed(dist.get_rank()))
    optimizer.zero_grad()
    loss = F.cross_entropy(wrapped(x), y) + model.head.weight.sum()
    expected = "head.weight: the gradient that a compiled graph handed out was sent, and another one arrived"
    with pytest.raises(RankError, match=expected):
        loss.backward()
