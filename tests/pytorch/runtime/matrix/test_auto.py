"""What `plan="auto"` has to survive: trainings as long as it takes until legato has decided (`automatic.hasty`).

Each runs under three contests: DDP's passes stay, another plan does, or they take turns.
"""

import copy
import types

import numpy
import pytest
import torch
import torch.distributed as dist
from support.automatic import hasty
from support.ranks import on_ranks
from support.rows import AUTO, SHARDED, row
from support.training import Dense, adam, sgd, train, wrap
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

import legato

STEPS = 24


@row(*AUTO)
def test_scheduler_made_last(kind):
    """README's order: the scheduler comes after the one line."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    schedule = StepLR(optimizer, 3, 0.5)
    train(wrapped, optimizer, STEPS, inner=lambda *_: None, step=lambda o, i: (o.step(), schedule.step()))
    if kind == "legato":
        legato.attachment(wrapped).detach()
    return train(wrapped, optimizer, 4, step=lambda o, i: (o.step(), schedule.step()))


@row(*AUTO)
def test_hooks_of_the_users(kind):
    """On the step, and on all optimizers' steps, registered before and after."""
    model, seen = Dense(), []
    optimizer = sgd(model.parameters())
    optimizer.register_step_post_hook(lambda *_: seen.append(model.first.weight.sum().item()))
    wrapped, optimizer = wrap(kind, model, optimizer)
    optimizer.register_step_post_hook(lambda *_: seen.append(model.third.weight.sum().item()))
    return train(wrapped, optimizer, STEPS), [torch.tensor(seen)]


@row(*AUTO, *SHARDED)
@pytest.mark.parametrize("moment", [1, 5, 20])
def test_optimizers_that_begin_to_step_in_the_backward_pass(kind, moment):
    """Each has one parameter, and steps in a hook that runs after DDP's."""
    model, seen = Dense(), []
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def inner(model, _, i):
        if i > moment:
            seen.extend(p.grad.clone() for p in model.parameters())
        if i == moment:
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.01})

    return train(wrapped, optimizer, STEPS, inner=inner), seen


@row("auto plan")
@pytest.mark.parametrize("moment", [0, 1, 10])
def test_hooks_of_one_rank_on_the_nodes_of_gradients(kind, moment):
    """They see this rank's own gradients."""
    model, seen = Dense(), []
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def inner(model, _, i):
        if i == moment and dist.get_rank() == 1:
            for p in model.parameters():
                node = torch.autograd.graph.get_gradient_edge(p).node
                node.register_hook(lambda *_, p=p: seen.append(p.grad.clone()))

    return train(wrapped, optimizer, STEPS, inner=inner), seen


@row(*AUTO)
def test_one_optimizer_over_two_models(kind):
    first, second = Dense(), Dense()
    optimizer = adam([*first.parameters(), *second.parameters()])
    pair = [wrap(kind, model, optimizer)[0] for model in (first, second)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x, y = first.batch(generator)
        optimizer.zero_grad()
        F.cross_entropy(pair[0](x) + pair[1](x), y).backward()
        optimizer.step()
    return nn.ModuleList(pair)


@row(*AUTO)
def test_wrapped_again(kind):
    """The module is wrapped and attached again while it is observed."""
    model = Dense()
    optimizer = sgd(model.parameters())
    wrapped, _ = wrap(kind, model, optimizer)
    train(wrapped, optimizer, 2)
    wrapped, _ = wrap(kind, model, optimizer)
    return train(wrapped, optimizer, STEPS, seed=5)


@pytest.mark.slow
@row(*AUTO)
@pytest.mark.parametrize("function", [False, True])
def test_compiled_step(kind, function):
    torch._dynamo.reset()
    model = Dense()
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    step = torch.compile((lambda: optimizer.step()) if function else optimizer.step, backend="aot_eager")
    return train(wrapped, optimizer, STEPS, step=lambda o, i: step())


@pytest.mark.slow
@row(*AUTO)
def test_compiled_ddp_without_an_optimizer(kind):
    torch._dynamo.reset()
    model = Dense()
    wrapped, _ = wrap(kind, model, None)
    optimizer = sgd(model.parameters())
    compiled = torch.compile(wrapped, backend="aot_eager")
    return train(wrapped, optimizer, STEPS, loss_of=lambda x, y: F.cross_entropy(compiled(x), y))


@row(*AUTO)
@pytest.mark.parametrize(
    ("first", "set_to_none", "again"), [(1, False, None), (9, False, None), (1, True, None), (9, False, 14)]
)
def test_clipped_through_kept_gradients(kind, first, set_to_none, again):
    """Gradients are views of buckets and are listed once, early or late.

    They stay where they are, or are dropped: then the next ones have their memory. legato may leave and come `again`.
    """
    model, kept = Dense(), []
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = sgd(model.parameters())
    if kind == "legato":
        wrapped, optimizer = wrap(kind, wrapped, optimizer)

    def clip(_, __, i):
        if i == first:
            kept.extend(p.grad for p in model.parameters())
        for grad in kept:
            grad.clamp_(-0.01, 0.01)

    def step(optimizer, i):
        optimizer.step()
        if i == again and kind == "legato":
            legato.attachment(wrapped).detach()
            wrap(kind, wrapped, optimizer)

    return train(wrapped, optimizer, STEPS, inner=clip, step=step, set_to_none=set_to_none)


@on_ranks(2)
@pytest.mark.parametrize("called", [True, False])
def test_says_that_nothing_calls_the_model(called):
    """A call of `forward` runs no hooks; a second backward pass of a forward pass is something else."""
    with hasty("turns"):
        wrapped, _ = wrap("legato", Dense(), None)
        for _ in range(6):
            x, y = wrapped.module.batch(torch.Generator().manual_seed(dist.get_rank()))
            loss = F.cross_entropy((wrapped if called else wrapped.forward)(x), y)
            loss.backward(retain_graph=True)
            loss.backward()
    said = legato.attachment(wrapped)._said
    assert any("nothing calls the model" in line for line in said) == (dist.get_rank() == 0 and not called)


class Local(torch.optim.Optimizer):
    """One of those that do not call `Optimizer.__init__`."""

    def __init__(self, optimizer):
        self.optim, self.param_groups = optimizer, optimizer.param_groups

    def step(self, closure=None):
        return self.optim.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optim.zero_grad(set_to_none)


@row(*AUTO)
def test_optimizer_without_tables(kind):
    model = Dense()
    wrapped, optimizer = wrap(kind, model, Local(sgd(model.parameters())))
    return train(wrapped, optimizer, STEPS)


@row(*AUTO)
def test_one_rank_runs_alone(kind):
    """One rank runs the model in training mode, drops the output, and all meet elsewhere."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def log(i):
        if i > 3 and dist.get_rank() == i % 2:  # earlier, DDP itself rebuilds its buckets in a forward pass
            wrapped(model.batch(torch.Generator().manual_seed(i))[0])
        dist.barrier()

    def step(o, i):
        o.step()
        log(i + 1)

    return train(wrapped, optimizer, STEPS, inner=lambda _, __, i: log(i), step=step)


@row(*AUTO)
def test_gradients_of_one_rank(kind):
    """One rank asks for gradients of its input, which DDP does not average."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def look(_, __, i):
        if i > 3 and dist.get_rank() == i % 2:
            x = model.batch(torch.Generator().manual_seed(i))[0].requires_grad_()
            torch.autograd.grad(wrapped(x).sum(), x)
        dist.barrier()

    return train(wrapped, optimizer, STEPS, inner=look)


@row(*AUTO, *SHARDED)
def test_other_weights_of_one_rank(kind):
    """One rank calls the model with other weights, with gradients, and DDP averages none of them."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def look(_, __, i):
        if i > 3 and dist.get_rank() == i % 2:
            x, _ = model.batch(torch.Generator().manual_seed(i))
            functional_call(wrapped, {name: 2 * p.detach() for name, p in wrapped.named_parameters()}, x)
        dist.barrier()

    return train(wrapped, optimizer, STEPS, inner=look)


@row(*AUTO)
@pytest.mark.parametrize("holder", ["torch", "module", "frame", "default"])
def test_shown_to_others(kind, holder):
    """`to_dlpack`, by the name in torch, or held since before legato had anything to do with it."""
    model, seen = Dense(), []
    module = types.ModuleType("of_the_user")
    shows = None
    if holder == "module":
        module.to_dlpack = torch.utils.dlpack.to_dlpack
    if holder == "frame":
        shows = torch.utils.dlpack.to_dlpack
    if holder == "default":
        exec("def to_dlpack(p, call=call): return call(p)", {"call": torch.utils.dlpack.to_dlpack}, vars(module))
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def show(o, _):
        o.step()
        for p in reversed(list(model.parameters())):
            show = shows or getattr(module, "to_dlpack", None) or torch.utils.dlpack.to_dlpack
            seen.append(float(torch.utils.dlpack.from_dlpack(show(p)).sum()))

    train(wrapped, optimizer, STEPS, step=show)
    return wrapped, [torch.tensor(seen)]


@row(*AUTO)
def test_memory_of_another_library(kind):
    """From some step on a parameter lies in an array, which is read after each step."""
    model, seen = Dense(), []
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    array = numpy.zeros((16, 12), numpy.float32)

    def step(o, i):
        o.step()
        if i == STEPS // 2:
            array[:] = model.first.weight.detach().numpy()
            model.first.weight.data = torch.from_numpy(array)
        seen.append(float(array.sum()))

    train(wrapped, optimizer, STEPS, step=step)
    return wrapped, [torch.tensor(seen)]


@row(*AUTO, *SHARDED)
def test_cleared_by_hand(kind):
    model = Dense()
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def clear(o, _):
        o.step()
        for p in model.parameters():
            p.grad.detach_()
            p.grad.zero_()

    return train(wrapped, optimizer, STEPS, step=clear, zero="never")


@row(*AUTO)
@pytest.mark.parametrize("at", [2, 9])
def test_moved_and_back(kind, at):
    """torch's DDP no longer averages gradients after this (pytorch#104336), and neither does anything else."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    train(wrapped, optimizer, at)
    wrapped.double()
    wrapped.float()
    return train(wrapped, optimizer, STEPS, seed=5)


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@row(*AUTO)
def test_mode_around_the_forward_pass(kind):
    model = Dense()
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def loss(x, y):
        with Counting():
            out = wrapped(x)
        return F.cross_entropy(out, y)

    return train(wrapped, optimizer, STEPS, loss_of=loss)


@row(*AUTO)
def test_detached_before_the_backward_pass(kind):
    model = Dense()
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    train(wrapped, optimizer, STEPS)
    x, y = model.batch(torch.Generator().manual_seed(dist.get_rank()))
    optimizer.zero_grad()
    loss = F.cross_entropy(wrapped(x), y)
    if kind == "legato":
        legato.attachment(wrapped).detach()
    loss.backward()
    optimizer.step()
    return train(wrapped, optimizer, 4)


class Own(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.05 * p.grad)


@pytest.mark.slow
@row(*AUTO)
def test_compiled_step_of_another_optimizer(kind):
    model = Dense()
    wrapped, optimizer = wrap(kind, model, Own(model.parameters()))
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="aot_eager")
    return train(wrapped, optimizer, STEPS, step=lambda *_: step())


@row(*AUTO)
def test_forward_called_directly(kind):
    """No hook of the model runs."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    return train(wrapped, optimizer, STEPS, loss_of=lambda x, y: F.cross_entropy(wrapped.forward(x), y))


@row(*AUTO)
def test_type_of_the_optimizer(kind):
    model, seen = Dense(), []
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

    def look(o, *_):
        seen.append(type(o) is torch.optim.SGD)

    def step(o, _):
        o.step()
        look(o)

    train(wrapped, optimizer, STEPS, inner=lambda _, o, __: look(o), step=step)
    return wrapped, [torch.tensor(seen)]


@row(*AUTO)
def test_scripted(kind):
    model = torch.jit.script(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 10)))
    batch = Dense().batch
    wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x, y = batch(generator)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    return wrapped


@row(*AUTO)
def test_bound_early(kind):
    """`step` and `zero_grad` are looked up once, and `step` is replaced by a function around it."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    step, zero_grad = optimizer.step, optimizer.zero_grad
    optimizer.step = types.MethodType(lambda _: step(), optimizer)
    shell = types.SimpleNamespace(zero_grad=lambda set_to_none: zero_grad(set_to_none))
    return train(wrapped, shell, STEPS, step=lambda _, i: optimizer.step() if i % 2 else step())


@row(*AUTO)
def test_copied_optimizer(kind):
    model, seen = Dense(), []
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))

    def step(o, _):
        o.step()
        twin = copy.deepcopy(o)
        seen.append(type(twin) is torch.optim.Adam and not any("legato" in name for name in vars(twin)))

    train(wrapped, optimizer, STEPS, step=step)
    return wrapped, [torch.tensor(seen)]
