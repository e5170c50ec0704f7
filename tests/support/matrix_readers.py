"""Rows of the equality matrix: ways to reach a parameter or a gradient past its gate. Everything runs on the ranks."""

import copy
import gc
import os
import threading
import warnings
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional as F

from legato.pytorch import attach
from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.gate import GatedParameter
from legato.pytorch.runtime.waiting.readers import WATCHED
from support import PATIENCE_S
from support.matrix_rows import STEPS, Dense, adam, compared, sgd
from support.training import distance, random_plan, train, under_both, wrap


def alike(a, b):
    """Equal bit for bit on two ranks; on more, in float64, but for the order of additions."""
    return torch.equal(a, b) if dist.get_world_size() == 2 else torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def looking(look, make=Dense, optimizer_of=adam, before=None, **training):
    """Train under DDP and legato; whether `look(wrapped, kept)`, after each step, sees the same under both.

    `before(model)` gives what is kept from before the first step.
    """
    seen, trained = {"ddp": [], "legato": []}, []
    for kind, values in seen.items():
        torch.manual_seed(7)
        model = make()
        kept = before(model) if before else None
        wrapped, optimizer = wrap(kind, model, optimizer_of(model.parameters()))

        def step(optimizer, i, wrapped=wrapped, kept=kept, values=values):
            optimizer.step()
            values += [v.clone() for v in look(wrapped, kept)]

        trained.append(train(wrapped, optimizer, STEPS, step=step, **training))
    same = all(map(alike, seen["ddp"], seen["legato"]))
    return distance(*trained) if same and seen["ddp"] else "not what DDP shows"


def data_held():
    return looking(lambda _, kept: kept, before=lambda model: [p.data for p in model.parameters()])


def state_dict_kept():
    return looking(lambda _, kept: list(kept.values()), before=lambda model: model.state_dict())


def array_held():
    look = lambda _, kept: [torch.from_numpy(a.copy()) for a in kept]  # noqa: E731
    return looking(look, before=lambda model: [p.detach().numpy() for p in model.parameters()])


class Flat(Dense):
    """Parameters that are views of one buffer."""

    def __init__(self):
        super().__init__()
        self.flat = torch.cat([p.data.view(-1) for p in self.parameters()])
        at = 0
        for p in self.parameters():
            p.data = self.flat[at : at + p.numel()].view_as(p)
            at += p.numel()


def flat_buffer():
    return looking(lambda wrapped, _: [wrapped.module.flat], make=Flat)


def scripted():
    """A scripted module reads its parameters below `__torch_function__`."""

    class Scripted(Dense):
        def __init__(self):
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.second = torch.jit.script(nn.Linear(16, 16, bias=False))

    x = torch.ones(2, 16)
    return looking(lambda wrapped, _: [wrapped.module.second(x).detach()], make=Scripted)


def functional_transforms():
    """`torch.func.grad` and `vmap` over named_parameters(), as for per-sample gradients."""
    xs, ys = torch.ones(3, 12), torch.tensor([1, 2, 3])

    def look(wrapped, _):
        module = wrapped.module

        def loss(parameters, x, y):
            return F.cross_entropy(torch.func.functional_call(module, parameters, (x[None],)), y[None])

        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(dict(module.named_parameters()), xs, ys)
        return list(grads.values())

    return looking(look)


def nested_inputs():
    """Evaluation on a jagged nested tensor, which takes operators before a gate does."""

    def look(wrapped, _):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = torch.nested.nested_tensor([torch.ones(2, 12), torch.ones(3, 12)], layout=torch.jagged)
            return [wrapped.module.first(x).values()]

    return looking(look)


def threads_that_read():
    def look(wrapped, _):
        found = [None] * 4
        parameters = list(wrapped.module.parameters())

        def read(k):
            found[k] = parameters[k % len(parameters)].detach().clone()

        threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    return looking(look)


def _child(module, pipe):
    gc.disable()  # a group of an earlier row that was let go here would wait for threads that a fork has not
    pipe.send([p.detach().numpy().tobytes() for p in module.parameters()])


def forked_reader():
    """A forked process reads the model while updates wait."""

    def look(wrapped, _):
        context = get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(wrapped.module, theirs))
        process.start()
        assert ours.poll(PATIENCE_S), "the child hangs"
        found = ours.recv()
        process.kill()  # at its end it would let go of groups, too
        process.join()
        return [torch.frombuffer(bytearray(data), dtype=torch.get_default_dtype()) for data in found]

    torch.multiprocessing.current_process()._config["daemon"] = False
    return looking(look)


def gradients_held(set_to_none=False):
    """`[p.grad ...]`, kept from one step to the next, shows averages as soon as `backward()` returns."""
    seen, trained = {"ddp": [], "legato": []}, []
    for kind, values in seen.items():
        torch.manual_seed(7)
        model = Dense()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        held = [p.grad for p in model.parameters()]
        memory = [g.view(-1) for g in held]
        wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))

        def look(*_, held=held, memory=memory, values=values):
            values += [g.clone() for g in (*held, *memory)]

        trained.append(train(wrapped, optimizer, STEPS, inner=look, set_to_none=set_to_none))
    same = all(map(alike, seen["ddp"], seen["legato"]))
    return distance(*trained) if same else "not what DDP shows"


@under_both
def distributed_again(kind, forget=False):
    """A second phase of training with the same module, with or without `del` of the first wrapper."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    train(wrapped, optimizer, 5)
    if forget:
        del wrapped, optimizer
    again, second = wrap(kind, model, sgd(model.parameters()), seed=5)
    return train(again, second, 5, seed=3)


@under_both
def tensor_betas(kind):
    """Hyper-parameters that are tensors inside tuples, changed in place right after `step()`."""
    model = Dense()
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=betas, foreach=False)
    wrapped, optimizer = wrap(kind, model, optimizer)

    def step(optimizer, i):
        optimizer.step()
        betas[0].mul_(0.9)

    return train(wrapped, optimizer, STEPS, step=step)


class _Averager:
    def average_parameters(self, params):
        pass


@under_both
def optimizer_without_init(kind):
    """`PostLocalSGDOptimizer` never calls `Optimizer.__init__`."""
    model = Dense()
    wrapped, optimizer = wrap(kind, model, PostLocalSGDOptimizer(adam(model.parameters()), _Averager()))
    return train(wrapped, optimizer, STEPS)


@under_both
def a_users_own_ddp(kind):
    """A `DistributedDataParallel` that the user made stays the same object, and one for everybody who asks."""
    model = Dense()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adam(model.parameters())
    if kind == "legato":
        same, optimizer = attach(wrapped, optimizer, random_plan(model, 3))
        assert same is wrapped and isinstance(same, nn.parallel.DistributedDataParallel)
    return train(wrapped, optimizer, STEPS)


class Unseen(Dense):
    """Reads a weight below Python, as an extension would."""

    def forward(self, x):
        with torch._C.DisableTorchFunctionSubclass():
            x = F.gelu(x @ self.first.weight.t())
        return self.third(F.gelu(self.second(x)))


def unseen_reader():
    """What the first forward passes read unseen never waits; the rest does."""
    trained, waits = [], []
    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = Unseen()
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
        trained.append(train(wrapped, optimizer, STEPS))
        waits = [type(p) is GatedParameter for p in model.parameters()]
    return distance(*trained) if waits == [False, True, True] else waits


def unseen_reader_in_debug_mode():
    """A reader that appears after the first forward passes is named."""
    os.environ["LEGATO_DEBUG"] = "reads"
    try:
        model = Dense()
        wrapped, optimizer = wrap("legato", model, sgd(model.parameters()))
        train(wrapped, optimizer, WATCHED + 1)
        model.forward = lambda x: Unseen.forward(model, x)
        train(wrapped, optimizer, 1)
    finally:
        del os.environ["LEGATO_DEBUG"]


def doubled(x: float):
    return torch.tensor(x) * 2


def scripted_while_updates_wait():
    """Whether updates wait, and what a function gives that is scripted meanwhile and makes a tensor."""
    model = Dense()
    wrapped, optimizer = wrap("legato", model, sgd(model.parameters()))
    train(wrapped, optimizer, 3)
    waiting = bool(gate.functions._before)
    return waiting, torch.jit.script(doubled)(1.5).item()


class Branching(Dense):
    """Control flow that dynamo compiles, sparse tensors, and a copy of a module, all in the forward pass."""

    def forward(self, x):
        copy.deepcopy(self.second)
        x = torch.cond(x.sum() > 0, lambda x: F.gelu(self.first(x)), lambda x: torch.sin(self.first(x)), (x,))
        x = torch.sparse.mm(torch.eye(len(x)).to_sparse(), self.second(x))
        return self.third(torch.eye(len(x)).to_sparse_csr() @ F.gelu(x))


def control_flow():
    return compared(Branching, adam)


def exported():
    """Programs made of the model between `step()` and the next forward pass."""
    x = torch.ones(2, 12)

    def look(wrapped, _):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced, scripted = torch.jit.trace(wrapped.module, x), torch.jit.script(wrapped.module.third)
        return [
            traced(x),
            scripted(torch.ones(2, 16)),
            torch.fx.symbolic_trace(wrapped.module.second)(traced.second.weight),
        ]

    return looking(look)


def distributed_again_after_del():
    return distributed_again(forget=True)


ROWS = [
    data_held, state_dict_kept, array_held, flat_buffer, scripted, functional_transforms, nested_inputs,
    threads_that_read, forked_reader, gradients_held, distributed_again, tensor_betas, optimizer_without_init,
    a_users_own_ddp, unseen_reader, distributed_again_after_del, control_flow, exported,
]  # fmt: skip
