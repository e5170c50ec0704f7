"""Training programs made at random: loops composed of habits, under stock DDP and under legato with late messages.

    PYTHONPATH=tests python -m support.programs [--seeds 0:1000] [--one 17] [--habits a,b] [--slow] [--auto] [--late]
                                                [--dry]

A program is a seed and a list of habits: a model, an optimizer, and one to six others, each of which puts something
into the training loop, at moments and in steps that its own random numbers choose. What it computes is noted down:
losses, what readers read, and at the end all parameters, buffers, gradients and states of optimizers. On two ranks the
notes must be those of stock DDP bit for bit, or legato refuses the program with the same `LegatoError` on all ranks. A
program that stock DDP itself refuses is left out. One that fails is made smaller, habit by habit.

Plans are random and given, or with `--auto` legato makes them: programs are longer, and observation and tournaments so
short that a plan is decided within them. Which plan wins is drawn, and in most programs which plans compete, too.

With `--late` they run on an accelerator, and at least one habit uses a stream of its own: on a GPU where there is one,
over gloo, else on the device without a GPU (`support.late`), whose kernels run later than their call, in an order that
the seed draws. On the latter, two accesses to the same memory that no stream waits for are found whatever the order; a
program that has such a race under DDP is left out.

With `--dry` the second side is stock DDP too, with a bucket for each parameter and ranks that dawdle: it tests the
programs. `--habits` takes these habits in place of those that the seed draws, `--slow` may draw the slow ones, and
`--whole` leaves programs that fail as long as they are.
"""

import argparse
import collections
import contextlib
import copy
import ctypes
import faulthandler
import functools
import gc
import hashlib
import io
import itertools
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import prune
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import support
from support.automatic import _planned_here, short_tournaments
from support.ranks import Ranks
from support.training import MODELS, first_passes, random_plan, sharded_plan

#: Seconds after which a rank that does not answer hangs; after another one has failed, it is not waited for.
PATIENCE_S, AFTER_A_FAILURE_S = {"ddp": 30, "dry": 60, "legato": 60, "auto": 60}, 5
#: Programs after which the ranks are replaced: each leaves groups and threads behind.
PROGRAMS = 20
#: The kinds in which legato trains: by given plans, and by plans of its own.
LEGATOS = ("legato", "auto")
#: What `--late` runs on.
ACCELERATOR = "cuda" if torch.cuda.is_available() else "late"

# ---- one run of a program ------------------------------------------------------------------


class Deliberate(Exception):
    """What a program raises and catches itself."""


class Race(Exception):
    """Two streams access the same memory, and neither waits for the other."""


class Job:
    """One run on this rank: what the habits have set up, and what has been noted down."""

    def __init__(self, seed, kind, long=False, late=False):
        self.late = late  # on an accelerator
        self.seed, self.kind, self.i, self.working, self.plans = seed, kind, -1, False, 0
        self.steps = random.Random(seed).randint(*((12, 24) if long else (6, 14)))
        self.generator = self.random(1000 * seed + dist.get_rank())
        self.dawdling = random.Random(f"{seed} {kind} {dist.get_rank()}")
        self.attaching = random.Random(f"{seed} attaching")
        self.contests, self.on_attaching = [], {}
        self.log, self.moments, self.made, self.ready = [], collections.defaultdict(list), [], []
        self.options, self.contexts, self.losses, self.strangers, self.around, self.cleanups = {}, [], [], [], [], []
        self.module, self.optimizers, self.closures = Dense(), [], False
        self.parts, self.second_group = [[*range(dist.get_world_size())]], None  # on which ranks models are trained
        self.beside = []  # (whether it reads weights only, stream) of what the training's own stream has not waited for
        self.make_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        self.split = lambda parameters: [parameters]
        self.shard = ""  # what plans divide among the ranks
        self.changes = False  # the graph is not static: torch's DDP would average nothing from there on
        self.optimizers_last = self.module_given = self.late_optimizer = False
        self.method = getattr  # of an optimizer
        self.zero_at, self.zero = "begin", lambda: [self.method(o, "zero_grad")() for o in self.optimizers]
        self.work, self.backward = self.plain_work, lambda loss, **options: loss.backward(**options)
        self.step_of = lambda o: self.method(o, "step")()
        self.step = lambda: [self.step_of(o) for o in self.optimizers]

    # What habits use

    @property
    def part(self):
        """The ranks that train the model together with this one."""
        return next(part for part in self.parts if dist.get_rank() in part)

    def some(self, rng):
        """Some steps, at least one; sometimes not the first ones, in which legato looks at the model."""
        rate, first = rng.choice([0.1, 0.4, 1]), rng.choice([0, 0, 4])
        return {i for i in range(first, self.steps) if rng.random() < rate} | {rng.randrange(first, self.steps)}

    def at(self, rng, *moments):
        """Decorate what happens in some steps: as they `begin`, after the `forward` pass, `between` backward and step,
        `after` the step."""
        moment, steps = rng.choice(moments or ["begin", "forward", "between", "after"]), self.some(rng)
        return lambda f: self.moments[moment].append(lambda: self.i in steps and f())

    def one(self, rng):
        """A function that gives one of the parameters the model has by then."""
        place = rng.random()
        return lambda: (ps := list(self.module.parameters()))[int(place * len(ps))]

    def early_or_late(self, rng):
        """Decorate what is done before the model is wrapped, after that, or in the middle of the training."""
        when = rng.choice(["early", "ready", "midway"])
        if when == "midway":
            step = rng.randrange(self.steps)
            return lambda f: self.moments["begin"].append(lambda: self.i == step and f())
        return (lambda f: f()) if when == "early" else self.ready.append

    def with_optimizers(self, rng):
        """Decorate what is done with the optimizers: when they are made, when legato is attached, or midway."""
        when = rng.choice(["made", "ready", "midway"])
        if when == "midway":
            step = rng.randrange(self.steps)
            return lambda f: self.moments["begin"].append(lambda: self.i == step and f(self.optimizers))
        return self.made.append if when == "made" else lambda f: self.ready.append(lambda: f(self.optimizers))

    def once(self, rng, *moments):
        """Decorate what happens in one step, at one of these moments."""
        step = rng.randrange(self.steps)
        return lambda f: self.moments[rng.choice(moments or ["begin", "after"])].append(lambda: self.i == step and f())

    def note(self, label, value):
        """Note down a value; on an accelerator without waiting for it."""
        self.log.append((self.i, label, kept(value) if self.late else digest(value)))

    def notes(self):
        """What has been noted down."""
        return [(i, label, digest(value)) for i, label, value in self.log]

    def attempt(self, label, read):
        """Note what a reader returns, or which error it raises."""
        try:
            value = read()
        except Exception as error:
            if is_legatos(error):
                raise
            value = type(error).__name__
        self.note(label, value)
        return value

    def leaves(self):
        return [m for m in self.module.modules() if not list(m.children())]

    def probe(self):
        return self.module.batch(self.random(5))

    def random(self, seed):
        """A generator of random numbers, on the GPU if batches are made there."""
        return torch.Generator("cuda" if self.late and ACCELERATOR == "cuda" else "cpu").manual_seed(seed)

    # Streams of their own

    @contextlib.contextmanager
    def on(self, side, joined=None):
        """Run what is inside on a stream that waits for the training's own.

        That waits for it at once; or before the next step, if it reads `weights`; or before `gradients` change.
        """
        main = torch.accelerator.current_stream()
        side.wait_event(main.record_event()) if self.i % 2 else side.wait_stream(main)
        with side:
            if ACCELERATOR == "cuda":
                torch.cuda._sleep(self.dawdling.choice([0, 10**5, 10**6]))
            yield
        if joined:
            self.beside.append((joined == "weights", side))
        else:
            main.wait_stream(side)

    def join(self, weights=True):
        """Let the training's stream wait for the others, before it changes `weights` or only gradients."""
        for only_weights, side in self.beside:
            if weights or not only_weights:
                torch.accelerator.current_stream().wait_stream(side)
        self.beside = [] if weights else [pair for pair in self.beside if pair[0]]

    # The loop

    def batch(self):
        return self.module.batch(self.generator)

    def loss(self, model=None, batch=None):
        x, y = batch or self.batch()
        with contextlib.ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context())
            out = (model or self.ddp)(x)
            out = out["logits"] if isinstance(out, dict) else out
            loss = sum((f() for f in self.losses), F.cross_entropy(out.float(), y))
        self.note("loss", loss)
        if self.zero_at == "forward":
            self.zero()
        return loss

    def plain_work(self):
        loss = self.loss()
        self.happen("forward")
        self.backward(loss)
        return loss

    def happen(self, moment):
        if self.kind != "ddp" and self.dawdling.random() < 0.1:
            time.sleep(self.dawdling.choice([5e-4, 2e-3, 5e-3]))
        if self.late and ACCELERATOR == "cuda":
            torch.cuda._sleep(self.dawdling.choice([0, 10**5, 10**6]))
        for function in self.moments[moment]:
            function()

    def _closure(self):
        if self.zero_at == "begin":
            self.zero()
        self.working = True
        loss = self.work()
        self.working = False
        self.happen("between")
        self.join()
        return loss

    def _iterate(self):
        self.join(weights=False)
        self.happen("begin")
        if self.closures:
            for optimizer in self.optimizers:
                self.method(optimizer, "step")(self._closure)
        else:
            self._closure()
            self.step()
        self.happen("after")
        self.join(weights=False)
        if self.zero_at == "after":
            self.zero()

    def train(self):
        """The whole program, with its last notes."""
        if self.changes:
            self.options.pop("static_graph", None)
        early = None if self.optimizers_last else self.optimizers_of(self.module)
        given_module = self.module_given and self.kind in LEGATOS
        model = self.module if given_module else DDP(self.module, **self.options)
        self.optimizers = early or self.optimizers_of(self.module)
        self.ddp = self.attach(model, self.optimizers, self.late_optimizer, **(self.options if given_module else {}))
        for function in self.ready:
            function()
        self.note("type", f"{type(self.ddp).__module__}.{type(self.ddp).__name__}")
        with contextlib.ExitStack() as stack:
            for context in self.around:
                stack.enter_context(context())
            for i in range(self.steps):
                self.i = i
                self._iterate()
        self.i = self.steps
        self.join()
        self.happen("end")
        for name, p in self.module.named_parameters():
            self.note(name, p)
            if not self.shard:  # else steps use gradients up
                self.note(f"{name}.grad", p.grad)
        for name, buffer in self.module.named_buffers():
            self.note(name, buffer)
        self.note("optimizers", [o.state_dict() for o in self.optimizers])
        self.note("random numbers", torch.get_rng_state())

    # Optimizers and wrapping

    def optimizers_of(self, module):
        groups = self.split([p for p in module.parameters() if p.requires_grad])
        groups[0] = [*groups[0], *self.strangers]
        made = [self.make_optimizer(group) for group in groups]
        made = list(itertools.chain(*(o if isinstance(o, list) else [o] for o in made)))
        self.classes = [type(o) for o in made]
        for function in self.made:
            function(made)
        return made

    def attach(self, model, optimizers, late=False, **options):
        with first_passes(2):
            return self._attach(model, optimizers, late, **options)

    def _attach(self, model, optimizers, late, **options):
        """A wrapped model; where legato trains, legato attaches to it and its optimizers, in one of its ways."""
        if self.kind not in LEGATOS:
            return model
        import legato

        ways = [legato.distribute, legato.pytorch.attach]
        attach = ways[0] if self.kind == "auto" or self.on_attaching else self.attaching.choice(ways)
        others, options = self.attaching.choice(["attached", "managed", "unknown"]), options | self.on_attaching
        plan = [] if self.kind == "auto" else [self.plan(model)]  # without one, legato makes one
        if self.kind == "auto":
            self.contests.append(self.contestants(model))
        if late:  # first without an optimizer
            model, _ = attach(model, None, *plan, **options)
            step = self.attaching.randrange(10 if self.kind == "auto" else 4)

            @self.moments["begin"].append
            def give():
                if self.i == step and self.attached():
                    attach(self.ddp, self.optimizers[0], *([self.attached().plan] if plan else []))

        else:
            first = optimizers[0] if optimizers else None
            model, same = attach(model, first, *plan, **options)
            assert same is first
        for optimizer in optimizers[1:]:
            if others == "attached":
                attach(model, optimizer, *([legato.attachment(model).plan] if plan else []))
            elif others == "managed":
                legato.attachment(model).manage(optimizer)
        return model

    def plan(self, model):
        """A random plan, another one each time."""
        self.plans += 1
        plan = random_plan(
            getattr(model, "module", model), f"{self.seed} {self.plans}", forward_overlap=self.attaching.random() < 0.8
        )
        if self.shard:
            plan = sharded_plan(plan, random.Random(f"{self.seed} {self.plans}"), self.shard)
        return msgspec.structs.replace(plan, scheduler=f"random-{self.plans}")

    def contestants(self, model):
        """DDP's plan and some others."""
        from legato.auto import default_buckets

        ddps = msgspec.structs.replace(default_buckets(model), scheduler="ddp", carrier="ddp")
        return [ddps, *(self.plan(model) for _ in range(self.attaching.randint(1, 2)))]

    def planned(self, contest, _):
        """What competes in place of the planner's plans, for the model that was attached last of those it may be."""
        names = {tensor.name for tensor in contest.workload.tensors}
        for plans in reversed(self.contests):
            if names <= {piece.tensor for message in plans[0].messages for piece in message.slices}:
                return [plan for plan in plans if contest.overlap or not plan.forward_overlap]
        return _planned_here(contest)  # a parameter was thawed since

    def attached(self):
        """legato on the model that is trained, if any."""
        import legato

        with contextlib.suppress(legato.InputError):
            return legato.attachment(self.ddp)

    def become(self, ddp, attached):
        """Train another wrapped model from now on, with new optimizers that have the states of those before."""
        before, self.ddp, self.module = self.optimizers, ddp, ddp.module
        self.optimizers = self.optimizers_of(self.module)
        for old, new in zip(before, self.optimizers, strict=False):
            shapes = [[p.shape for group in o.param_groups for p in group["params"]] for o in (old, new)]
            if shapes[0] == shapes[1]:
                new.load_state_dict(old.state_dict())
        if attached:
            self.attach(ddp, self.optimizers)


def kept(value):
    """A copy of the tensors in a value, which the device makes when it gets there."""
    if isinstance(value, nn.Module):
        value = [*value.parameters(), *value.buffers()]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: kept(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [kept(part) for part in value]
    return value


def digest(value):
    """A few words for a value, that differ where any of its bits does."""
    if isinstance(value, str) and len(value) < 80:
        return value
    sha = hashlib.sha1()
    _feed(sha.update, value)
    return sha.hexdigest()[:12]


def _feed(add, value):
    if isinstance(value, nn.Module):
        value = [*value.parameters(), *value.buffers()]
    if isinstance(value, numpy.ndarray):
        value = torch.from_numpy(value.copy())
    if isinstance(value, dict):  # in which order optimizers have met their parameters is no matter
        value = sorted(value.items(), key=lambda item: str(item[0]))
    if isinstance(value, torch.Tensor) and value.is_sparse:
        value = [value.detach().coalesce().indices(), value.detach().coalesce().values()]
    elif isinstance(value, torch.Tensor) and value.is_nested:
        value = list(value.detach().unbind())
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        if (value.is_floating_point() or value.is_complex()) and value.isnan().any():
            value = value.masked_fill(value.isnan(), float("nan"))  # which NaN is no matter
        add(f"{value.dtype} {tuple(value.shape)}".encode())
        add(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, list | tuple):
        for part in value:
            _feed(add, part)
    else:
        add(repr(value).encode())


# ---- habits ----------------------------------------------------------------------------------

#: {kind: {name: function(job, rng)}}; of models and optimizers, a program has one.
HABITS = {"model": {}, "optimizer": {}, "other": {}, "slow": {}, "late": {}}


def habit(function, kind="other", name=None):
    HABITS[kind][name or function.__name__] = function
    return function


model, slow = functools.partial(habit, kind="model"), functools.partial(habit, kind="slow")


def several(names, function, kind="other"):
    """Habits with one function(job, rng, name)."""
    for name in names.split():
        HABITS[kind][name] = functools.partial(function, name=name)


# Models


class Dense(nn.Module):
    """The model of a program without another one."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.second = nn.Linear(12, 16, dtype=dtype), nn.Linear(16, 16, dtype=dtype)
        self.third = nn.Linear(16, 10, bias=False, dtype=dtype)

    def forward(self, x):
        return self.third(self.middle(F.gelu(self.first(x.to(self.first.weight.dtype)))))

    def middle(self, x):
        return F.gelu(self.second(x))

    def batch(self, generator):
        return torch.randn(4, 12, generator=generator), torch.randint(0, 10, (4,), generator=generator)


class Reentrant(Dense):
    def middle(self, x):
        return checkpoint(super().middle, x, use_reentrant=True)


class ReentrantTwice(Dense):
    def middle(self, x):
        return checkpoint(super().middle, checkpoint(super().middle, x, use_reentrant=True), use_reentrant=True)


class Conditional(Dense):
    """Another way in every step and on every rank."""

    calls = 0

    def middle(self, x):
        self.calls += 1
        return super().middle(x) if (self.calls + dist.get_rank()) % 3 else x


class Mixed(Dense):
    """Layers of three dtypes."""

    def __init__(self):
        super().__init__()
        self.first.bfloat16(), self.second.double()

    def middle(self, x):
        return super().middle(x.double()).float()


class Complex(Dense):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(16, dtype=torch.complex64))

    def middle(self, x):
        return super().middle((x * self.turn).abs())


class Odd(Dense):
    """A scalar, an empty parameter, one with other strides, and one that is used only by a tensor made of it."""

    def __init__(self):
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.1)), nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(16, 16).T / 8)

    def middle(self, x):
        return super().middle(x @ self.turned) * self.scale + self.empty.sum()


class Sparse(Dense):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 12, sparse=True)

    def forward(self, x):
        return super().forward(self.words(x).mean(1))

    def batch(self, generator):
        return torch.randint(0, 20, (4, 6), generator=generator), torch.randint(0, 10, (4,), generator=generator)


class Scale(torch.autograd.Function):
    """A function of one's own, that saves a parameter."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Saving(Dense):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def middle(self, x):
        return super().middle(Scale.apply(x, self.scale))


class Named(Dense):
    """The output is in a dict."""

    def forward(self, x):
        return {"logits": super().forward(x), "more": [x]}


class Special(nn.Parameter):
    """A kind of parameter of one's own."""


UNUSED = {"find_unused_parameters": True}
MADE = {
    **{name.lower(): (make, UNUSED if name == "Partial" else {}) for name, make in MODELS.items()},
    "dense": (Dense, {}), "reentrant": (Reentrant, {}), "reentrant_twice": (ReentrantTwice, {"static_graph": True}),
    "conditional": (Conditional, UNUSED), "mixed": (Mixed, {}), "complex": (Complex, {}), "odd": (Odd, {}),
    "sparse": (Sparse, {}), "saving": (Saving, {}), "named": (Named, {}), "double": (lambda: Dense(torch.float64), {}),
    "bfloat16": (lambda: Dense(torch.bfloat16), {}),
}  # fmt: skip


def made(job, rng, name):
    make, options = MADE[name]
    job.module = make()
    job.options |= options


several(" ".join(MADE), made, "model")


@model
def weight_normed(job, rng):
    nn.utils.parametrizations.weight_norm(job.module.first)
    nn.utils.parametrizations.spectral_norm(job.module.second)


@model
def subclassed(job, rng):
    job.module.second.weight = Special(job.module.second.weight.detach())


@model
def over_numpy(job, rng):
    array = numpy.full((16, 16), 0.1, dtype=numpy.float32)
    job.module.second.weight = nn.Parameter(torch.from_numpy(array))
    job.at(rng)(lambda: job.note("array", array))


@model
def in_shared_memory(job, rng):
    rng.choice([job.module, job.module.second]).share_memory()


@model
def flat(job, rng):
    buffer = nn.utils.parameters_to_vector(job.module.parameters()).detach()
    nn.utils.vector_to_parameters(buffer, job.module.parameters())
    job.at(rng)(lambda: job.note("flat", buffer))


# Optimizers

_o = torch.optim


class Own(_o.Optimizer):
    """A user's optimizer."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        return _own_step(self, closure)


@torch.no_grad()
def _own_step(optimizer, closure):
    with torch.enable_grad():
        loss = closure() if closure else None
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                state = optimizer.state[p]
                state["mean"] = p.grad.clone() if "mean" not in state else state["mean"].mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * state["mean"])
    return loss


class Bare(_o.Optimizer):
    """It does not call `Optimizer.__init__`, and so has no tables of hooks."""

    def __init__(self, params, lr=0.05):
        self.defaults, self.state = {"lr": lr}, collections.defaultdict(dict)
        self.param_groups = [{"params": list(params), "lr": lr}]

    def step(self, closure=None):
        return _own_step(self, closure)

    def zero_grad(self, set_to_none=True):
        for p in self.param_groups[0]["params"]:
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad.zero_()

    def state_dict(self):
        return {"state": [self.state.get(p, {}) for p in self.param_groups[0]["params"]], "lr": self.defaults["lr"]}

    def load_state_dict(self, state_dict):
        self.state.update(zip(self.param_groups[0]["params"], copy.deepcopy(state_dict["state"]), strict=True))


class Lookahead(_o.Optimizer):
    """Around another optimizer whose groups it shares, without `Optimizer.__init__`."""

    name = "optimizer"

    def __init__(self, optimizer):
        vars(self)[self.name] = optimizer
        self.count, self.defaults = 0, optimizer.defaults
        self.param_groups, self.state = optimizer.param_groups, collections.defaultdict(dict)

    def step(self, closure=None):
        loss = getattr(self, self.name).step(closure)
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"]) if self.count % 2 == 0 else ():
            slow = self.state[p].setdefault("slow", p.data.clone())
            slow.add_(p.data - slow, alpha=0.5)
            p.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none=True):
        getattr(self, self.name).zero_grad(set_to_none)

    def add_param_group(self, group):
        getattr(self, self.name).add_param_group(group)

    def state_dict(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {"fast": getattr(self, self.name).state_dict(), "slow": [self.state.get(p, {}) for p in parameters]}

    def load_state_dict(self, state_dict):
        getattr(self, self.name).load_state_dict(state_dict["fast"])
        self.param_groups = getattr(self, self.name).param_groups
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state.update(zip(parameters, copy.deepcopy(state_dict["slow"]), strict=True))


class LookaheadOfTimm(Lookahead):
    """timm's has the tables of hooks."""

    name = "_base_optimizer"

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self._optimizer_step_pre_hooks = collections.OrderedDict()
        self._optimizer_step_post_hooks = collections.OrderedDict()


class Facade:
    """No optimizer by its class: passes on what it is asked."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        if name == "optimizer":  # not there yet, in a copy
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class Proximal(_o.SGD):
    """torch's, with an end of its own to each step."""

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                p.copy_(p.sgn() * (p.abs() - 1e-3).clamp(min=0))
        return loss


class Masters(_o.SGD):
    """It updates copies of the parameters, in float64."""

    def __init__(self, params, **options):
        self.models = list(params)
        super().__init__([p.detach().to(torch.complex128 if p.is_complex() else torch.float64) for p in self.models],
                         **options)  # fmt: skip

    def _pairs(self):
        return zip(self.models, self.param_groups[0]["params"], strict=True)

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for p, master in self._pairs():
            master.grad = None if p.grad is None else p.grad.to(master.dtype)
        super().step()
        for p, master in self._pairs():
            p.data.copy_(master)
        return loss

    def zero_grad(self, set_to_none=True):
        for p in self.models:
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad.zero_()


OPTIMIZERS = {
    "sgd": lambda ps: _o.SGD(ps, lr=0.1),
    "momentum": lambda ps: _o.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True, foreach=False),
    "sgd_foreach": lambda ps: _o.SGD(ps, lr=0.05, momentum=0.9, foreach=True),
    "sgd_fused": lambda ps: _o.SGD(ps, lr=0.05, fused=True),  # its momentum in bfloat16 is uninitialized memory
    "adam": lambda ps: _o.Adam(ps, lr=1e-2),
    "adam_fused": lambda ps: _o.Adam(ps, lr=1e-2, fused=True),
    "adam_foreach": lambda ps: _o.Adam(ps, lr=1e-2, foreach=True),
    "tensor_lr": lambda ps: _o.Adam(ps, lr=torch.tensor(1e-2), foreach=False),
    "adamw": lambda ps: _o.AdamW(ps, lr=1e-2, amsgrad=True, maximize=True),
    "rmsprop": lambda ps: _o.RMSprop(ps, lr=1e-3, foreach=True, centered=True),
    "adagrad": lambda ps: _o.Adagrad(ps, lr=1e-2),
    "adadelta": lambda ps: _o.Adadelta(ps),
    "adamax": lambda ps: _o.Adamax(ps, lr=1e-2),
    "nadam": lambda ps: _o.NAdam(ps, lr=1e-2, foreach=True),
    "radam": lambda ps: _o.RAdam(ps, lr=1e-2),
    "rprop": lambda ps: _o.Rprop(ps),
    "asgd": lambda ps: _o.ASGD(ps, lr=1e-2),
    "adafactor": lambda ps: _o.Adafactor(ps),
    "groups": lambda ps: _o.AdamW([{"params": ps[::2], "lr": 1e-3}, {"params": ps[1::2], "weight_decay": 0.1}]),
    "muon": lambda ps: [
        _o.Muon([p for p in ps if p.dim() == 2], lr=1e-2), _o.Adam([p for p in ps if p.dim() != 2] or ps)
    ],
    "own": Own, "bare": Bare, "proximal": lambda ps: Proximal(ps, lr=0.05, momentum=0.9),
    "masters": lambda ps: Masters(ps, lr=0.05, momentum=0.9), "facade": lambda ps: Facade(_o.Adam(ps, lr=1e-2)),
    "lookahead": lambda ps: Lookahead(_o.SGD(ps, lr=0.05, momentum=0.9)),
    "lookahead_of_timm": lambda ps: LookaheadOfTimm(_o.Adam(ps, lr=1e-2)),
}  # fmt: skip


def optimizing(job, rng, name):
    job.make_optimizer = OPTIMIZERS[name]


several(" ".join(OPTIMIZERS), optimizing, "optimizer")


@functools.partial(habit, kind="optimizer")
def lbfgs(job, rng):
    job.closures = True
    job.make_optimizer = lambda ps: _o.LBFGS(ps, lr=0.1, max_iter=3, tolerance_grad=-1, tolerance_change=-1)


habit(lambda job, rng: setattr(job, "split", lambda ps: [ps[::2], ps[1::2]]), name="two_optimizers")
habit(lambda job, rng: setattr(job, "split", lambda ps: [ps, ps[1::2]]), name="overlapping_optimizers")
habit(lambda job, rng: setattr(job, "split", lambda ps: [[p] for p in ps]), name="optimizer_of_each")


@habit
def group_added_later(job, rng):
    left, step = [], rng.randrange(job.steps)
    job.split = lambda ps: (left.append(ps[-1:]), [ps[:-1]])[1]

    @job.moments["after"].append
    def add():
        if job.i == step and left:
            job.optimizers[0].add_param_group({"params": left[0]})


habit(lambda job, rng: setattr(job, "closures", True), name="closures")


@habit
def schedulers(job, rng):
    length = job.steps + 1
    make = rng.choice([
        lambda o: lr_scheduler.StepLR(o, 3, 0.5), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
        lambda o: lr_scheduler.CyclicLR(o, 1e-3, 0.1, 4, cycle_momentum=False),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=length, cycle_momentum=rng.random() < 0.3),
        lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)), lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.7, patience=1),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.LinearLR(o)]),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.PolynomialLR(o, 9)], [3]),
    ])  # fmt: skip
    schedules = []
    job.with_optimizers(rng)(lambda optimizers: schedules.__setitem__(slice(None), map(make, optimizers)))

    @job.moments["after"].append
    def step():
        for s in schedules:
            s.step(*([job.i % 3] if isinstance(s, lr_scheduler.ReduceLROnPlateau) else []))
        job.note("learning rates", [g["lr"] for o in job.optimizers for g in o.param_groups])


def _removed(job, rng, handles):
    """Perhaps hooks are removed in some step."""
    if rng.random() < 0.4:
        job.once(rng)(lambda: [handle.remove() for handle in handles])


def step_hooking(job, rng, name):
    """Hooks on the step of one's own optimizers, or of all, which read or write."""
    one, post, handles = job.one(rng), rng.random() < 0.5, []
    act = rng.choice(["note", "gradient", "weight"])

    def hook(optimizer, *_):
        if act == "gradient" and one().grad is not None:
            one().grad.mul_(0.5)
        elif act == "weight":
            one().data.clamp_(-0.2, 0.2)
        job.note("in a hook of the step", [one(), one().grad, type(optimizer).__name__])

    if name == "step_hooks":

        @job.with_optimizers(rng)
        def register(optimizers):
            handles.extend((o.register_step_post_hook if post else o.register_step_pre_hook)(hook) for o in optimizers)

    else:
        register = register_optimizer_step_post_hook if post else register_optimizer_step_pre_hook
        job.early_or_late(rng)(lambda: handles.append(register(hook)))
    _removed(job, rng, handles)
    job.cleanups.append(lambda: [handle.remove() for handle in handles])


several("step_hooks global_step_hooks", step_hooking)


@habit
def methods_bound(job, rng):
    """`step` and `zero_grad` are looked up once, and called in all later steps."""
    names, bound = rng.choice([("step",), ("zero_grad",), ("step", "zero_grad")]), {}
    job.with_optimizers(rng)(lambda os: bound.update({(id(o), name): getattr(o, name) for o in os for name in names}))
    job.method = lambda o, name: bound.get((id(o), name)) or getattr(o, name)


@habit
def step_replaced(job, rng):
    """`step` of optimizers, or of their classes, becomes a function around it, perhaps for a while."""
    one, way, back = job.one(rng), rng.choice(["wrapped", "method", "partial", "class"]), []

    def around(step):
        @functools.wraps(step)
        def stepping(*args, **options):
            job.note("before the step", one())
            result = step(*args, **options)
            job.note("after the step", one())
            return result

        return stepping

    @job.with_optimizers(rng)
    def replace(optimizers):
        for o in set(job.classes) if way == "class" else optimizers:
            plain, has = o.step, "step" in vars(o)
            o.step = {
                "method": lambda plain=plain, o=o: types.MethodType(around(lambda _, *xs, **ks: plain(*xs, **ks)), o),
                "partial": lambda plain=plain: functools.partial(around(plain)),
            }.get(way, lambda plain=plain: around(plain))()
            back.append(lambda o=o, plain=plain, has=has: _set(o, "step", plain) if has else delattr(o, "step"))

    if way == "class":
        job.cleanups.append(lambda: [f() for f in reversed(back)])
    elif rng.random() < 0.4:
        job.once(rng)(lambda: [f() for f in reversed(back)])


@habit
def types_of_optimizers(job, rng):
    @job.at(rng)
    def look():
        for o in job.optimizers:
            job.note("type of an optimizer", f"{type(o).__module__}.{type(o).__qualname__} {type(o) in job.classes}")
            job.note("how it prints", repr(o).split(" object at ")[0])


# Wrapping


def option(job, rng, name):
    if name == "skip_all_reduce_unused_params" and isinstance(job.module, Conditional | MODELS["Partial"]):
        return  # the ranks would send different buckets
    job.options[name.removesuffix("_off")] = not name.endswith("_off")


def way(job, rng, name):
    setattr(job, name, True)


several(
    "gradient_as_bucket_view static_graph find_unused_parameters skip_all_reduce_unused_params "
    "broadcast_buffers_off init_sync_off", option
)  # fmt: skip
several("optimizers_last module_given late_optimizer", way)


@habit
def communication_hook(job, rng):
    hook = rng.choice([default_hooks.allreduce_hook, default_hooks.fp16_compress_hook])
    job.ready.append(lambda: job.ddp.register_comm_hook(None, hook))


# Loops


def loop(job, rng, name):
    """In some steps, another kind of forward and backward pass."""
    steps, plain = job.some(rng), job.work
    job.work = lambda: passes(job, rng, name) if job.i in steps else plain()


def passes(job, rng, name):
    parameters = [p for p in job.module.parameters() if p.requires_grad]
    unsent, sent = job.ddp.no_sync, contextlib.nullcontext
    match name:
        case "accumulated" | "accumulated_by_flag" | "several_syncing_passes":
            for _ in range(rng.choice([1, 2])):
                job.ddp.require_backward_grad_sync = name != "accumulated_by_flag"
                with (unsent if name == "accumulated" else sent)():
                    job.backward(job.loss())
                job.ddp.require_backward_grad_sync = True
            return job.plain_work()
        case "never_sent" | "forward_in_no_sync" | "backward_in_no_sync":
            with (sent if name == "backward_in_no_sync" else unsent)():
                loss = job.loss()
            job.happen("forward")
            with (sent if name == "forward_in_no_sync" else unsent)():
                job.backward(loss)
        case "two_forwards_one_backward":
            first = job.loss()
            job.happen("forward")
            job.backward(loss := first + job.loss())
        case "two_forwards_two_backwards":
            losses = [job.loss(), job.loss()]
            for loss in losses if rng.random() < 0.5 else reversed(losses):
                job.backward(loss)
        case "two_backwards_of_one_forward":
            job.backward(loss := job.loss(), retain_graph=True)
            job.happen("forward")
            job.backward(loss)
        case "lost_forward":
            job.loss()
            return job.plain_work()
        case "around_ddp":
            job.backward(loss := job.loss(job.module))
        case "gradient_penalty":
            loss = job.loss()
            grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            penalty = sum(g.abs().square().sum().float() for g in grads if g is not None)
            job.backward(loss := loss + 0.1 * penalty)
        case "input_penalty":
            x, y = job.batch()
            loss = job.loss(batch=(x.requires_grad_(x.is_floating_point()), y))
            penalty = torch.autograd.grad(loss, x, create_graph=True)[0].norm() if x.requires_grad else 0
            job.backward(loss := loss + penalty)
        case "averaged_by_hand":
            grads = torch.autograd.grad(loss := job.loss(), parameters, allow_unused=True)
            for p, g in zip(parameters, grads, strict=True):
                p.grad = torch.zeros_like(p) if g is None else g
                dist.all_reduce(p.grad)
        case "backward_in_a_thread":
            loss = job.loss()
            in_thread(lambda: job.backward(loss))
        case "some_inputs":
            job.backward(loss := job.loss(), inputs=parameters[rng.random() < 0.1 :])
    return loss


several(
    "accumulated accumulated_by_flag several_syncing_passes never_sent forward_in_no_sync backward_in_no_sync "
    "two_forwards_one_backward two_forwards_two_backwards two_backwards_of_one_forward lost_forward around_ddp "
    "gradient_penalty input_penalty averaged_by_hand backward_in_a_thread some_inputs",
    loop,
)


def in_thread(function):
    """Runs on another thread, and raises here what it raises there."""
    errors = []

    def run():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def stepping(job, rng, name):
    steps, step = job.some(rng) - {0}, job.step
    count = {"skipped_steps": 0, "stepped_twice": 2}[name]
    job.step = lambda: [step() for _ in range(count if job.i in steps else 1)]


several("skipped_steps stepped_twice", stepping)


@habit
def zeroing(job, rng):
    job.zero_at = rng.choice(["begin", "forward", "after"])
    to_none, every = rng.random() < 0.5, rng.choice([1, 1, 2])

    def grads_by_hand(detach=False):
        for p in job.module.parameters():
            if to_none or p.grad is None:
                p.grad = None
            else:
                detach and p.grad.detach_()
                p.grad.zero_()

    ways = {
        "optimizer": lambda: [job.method(o, "zero_grad")(set_to_none=to_none) for o in job.optimizers],
        "model": lambda: job.ddp.zero_grad(set_to_none=to_none),
        "module": lambda: job.module.zero_grad(set_to_none=to_none),
        "by hand": grads_by_hand,
        "detached by hand": lambda: grads_by_hand(detach=True),
    }
    way = ways[rng.choice(list(ways))]
    job.zero = lambda: isinstance(job.i, int) and job.i % every == 0 and way()


@habit
def clipped(job, rng):
    most = rng.choice([0.05, 0.5])
    by = rng.choice([
        lambda ps: nn.utils.clip_grad_norm_(ps, most), lambda ps: nn.utils.clip_grad_value_(ps, most),
        lambda ps: nn.utils.clip_grad_norm_(ps, most, norm_type=float("inf"), foreach=False),
    ])  # fmt: skip
    job.at(rng, "between")(lambda: job.note("norm", by(rng.choice([job.ddp, job.module]).parameters())))


@habit
def clipped_through_a_list(job, rng):
    """Gradients that stay where they are are listed in one step, and clipped through the list in later ones.

    Not in the first two: what is listed there, DDP leaves behind when it rebuilds its buckets.
    """
    job.options["gradient_as_bucket_view"] = rng.random() < 0.8
    job.zero = lambda: [job.method(o, "zero_grad")(set_to_none=False) for o in job.optimizers]
    first, kept, moment = rng.randrange(2, job.steps), [], rng.choice(["between", "after", "begin"])

    @job.moments[moment].append
    def gather():
        if job.i == first:
            kept[:] = [p.grad for p in job.module.parameters() if p.grad is not None]

    @job.moments["between"].append
    def clip():
        if kept:
            job.note("norm", norm := nn.utils.get_total_norm(kept))
            for grad in kept:
                grad.mul_(torch.clamp(0.05 / (norm + 1e-6), max=1.0).to(grad.dtype))


@habit
def scaled(job, rng):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    unscaled, overflow = job.some(rng), {rng.randrange(job.steps)}
    backward = job.backward

    def scaled_backward(loss, **options):
        backward(scaler.scale(loss * float("inf") if job.i in overflow and dist.get_rank() else loss), **options)

    def step_of(optimizer):
        if job.i in unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)

    def stepped():
        if scaler._per_optimizer_states:
            scaler.update()
            job.note("scale", scaler.get_scale())

    job.backward, job.step_of = scaled_backward, step_of
    job.moments["after"].append(stepped)


@habit
def autocast(job, rng):
    job.contexts.append(lambda: torch.autocast("cpu", torch.bfloat16))


class Counting(TorchDispatchMode):
    """A dispatch mode of the user's, which counts products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.convolution)
        return func(*args, **(kwargs or {}))


@habit
def under_a_mode(job, rng):
    """A dispatch mode around the forward pass alone."""
    steps = job.some(rng)

    @contextlib.contextmanager
    def counting():
        with Counting() as mode:
            yield
        job.note("products", [mode.count])

    job.contexts.append(lambda: counting() if job.i in steps else contextlib.nullcontext())


@habit
def under_a_context(job, rng):
    """Contexts through which operators and saved tensors pass."""
    from torch.utils.flop_counter import FlopCounterMode

    context, steps = rng.choice([
        torch.autograd.graph.save_on_cpu, lambda: torch.device("cpu"), lambda: FlopCounterMode(display=False),
        lambda: torch.autograd.detect_anomaly(check_nan=False),
    ]), job.some(rng)  # fmt: skip
    job.contexts.append(lambda: context() if job.i in steps else contextlib.nullcontext())


@habit
def joined(job, rng):
    """The ranks may have different numbers of steps."""
    fewer = rng.choice([0, 2])
    job.around.append(lambda: job.ddp.join())
    job.ready.append(lambda: setattr(job, "steps", job.steps - fewer * dist.get_rank()))


@habit
def lone_forward(job, rng):
    """One rank alone runs the wrapped model in training mode, and drops what comes out."""
    rank = rng.randrange(dist.get_world_size())

    @job.at(rng, "begin", "after")
    def run():
        sends = list(job.module.buffers()) and job.options.get("broadcast_buffers", True)
        if dist.get_rank() == rank and not sends and not job.ddp._join_config.enable:
            job.attempt("alone", lambda: job.ddp(job.probe()[0]))


# Readers: what they return is noted, and some of it is kept and noted again later


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _gradients(job):
    return [p.grad for p in job.module.parameters() if p.grad is not None]


def _vmapped(job, p):
    def loss(parameters, x):
        out = functional_call(job.module, parameters, (x[None],))
        return (out["logits"] if isinstance(out, dict) else out).float().square().sum()

    gradient = torch.func.grad(loss)
    return torch.func.vmap(gradient, (None, 0), randomness="different")(
        {n: p.detach() for n, p in job.module.named_parameters()}, job.probe()[0]
    )


def _forked(job, p):
    """What a child reads from memory that it has inherited."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, p.detach().reshape(-1)[:8].contiguous().view(torch.uint8).numpy().tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    data = os.read(reading, 64)
    os.close(reading), os.close(writing)
    return data


def _exited(job, p):
    if (child := os.fork()) == 0:
        os._exit(0)
    return os.waitpid(child, 0)[1]


def _on_a_thread(job, p):
    found = []
    in_thread(lambda: found.append(p.detach().clone()))
    return found


def _evaluated(model_of, context, train=False):
    def read(job, p):
        network = model_of(job)
        network.train(train)
        try:
            with context():
                return network(job.probe()[0])
        finally:
            network.train()

    return read


READERS = {
    "torch_tensor": lambda job, p: torch.tensor(p),
    "torch_Tensor": lambda job, p: torch.Tensor(p),
    "asarray": lambda job, p: torch.asarray(p, copy=True),
    "as_tensor": lambda job, p: torch.as_tensor(p, dtype=torch.float64),
    "parameter_of": lambda job, p: nn.Parameter(p),
    "as_subclass": lambda job, p: p.as_subclass(torch.Tensor),
    "make_subclass": lambda job, p: torch.Tensor._make_subclass(torch.Tensor, p),
    "sparse_values": lambda job, p: torch.sparse_coo_tensor(torch.arange(len(p))[None], p),
    "nested": lambda job, p: torch.nested.nested_tensor([p]),
    "as_nested": lambda job, p: torch.nested.as_nested_tensor([p.detach()], layout=torch.jagged),
    "deepcopied": lambda job, p: copy.deepcopy(p),
    "copied": lambda job, p: copy.copy(p),
    "detached": lambda job, p: p.detach(),
    "detached_clone": lambda job, p: p.detach().clone(),
    "data": lambda job, p: p.data,
    "data_clone": lambda job, p: p.data.clone(),
    "cloned": lambda job, p: p.clone(),
    "viewed": lambda job, p: p.view(-1),
    "storage": lambda job, p: bytes(p.untyped_storage()),
    "by_address": lambda job, p: bytes(
        (ctypes.c_uint8 * (p.numel() * p.element_size())).from_address(p.data_ptr())
    ),
    "set_to": lambda job, p: torch.empty(0, dtype=p.dtype).set_(p.detach()),
    "out": lambda job, p: torch.add(p.detach(), 1, out=torch.empty_like(p.detach())),
    "into": lambda job, p: torch.empty_like(p.detach()).copy_(p.detach()),
    "numpy": lambda job, p: p.detach().numpy(),
    "numpy_forced": lambda job, p: p.numpy(force=True),
    "numpy_array": lambda job, p: numpy.array(p.detach()),
    "dlpack": lambda job, p: torch.from_dlpack(p.detach()),
    "dlpack_capsule": lambda job, p: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p)),
    "listed": lambda job, p: p.tolist(),
    "printed": lambda job, p: repr(p),
    "item": lambda job, p: [p.sum().item(), float(p.flatten()[0].real), bool(p.detach().any())],
    "is_a": lambda job, p: [isinstance(p, nn.Parameter), isinstance(p, torch.Tensor), p.shape, p.is_leaf],
    "compared": lambda job, p: [torch.equal(p, p.clone()), bool((p == p).all()), torch.allclose(p, p * 2)],
    "casted": lambda job, p: [p.to(torch.float64), p.cpu(), p.float(), p.type(torch.float64)],
    "stacked": lambda job, p: [torch.stack([p, p]), torch.cat([p.detach(), p.detach()])],
    "indexed": lambda job, p: [p[0], p[..., :1], list(p)],
    "norms": lambda job, p: [q.norm() for q in job.module.parameters()],
    "foreach_norms": lambda job, p: torch._foreach_norm([q.float() for q in job.module.parameters()]),
    "vector": lambda job, p: nn.utils.parameters_to_vector(job.module.parameters()),
    "gradient": lambda job, p: p.grad,
    "gradient_norms": lambda job, p: [g.norm() for g in _gradients(job)],
    "total_norm": lambda job, p: nn.utils.get_total_norm(_gradients(job)),
    "state_dict": lambda job, p: job.ddp.state_dict(),
    "state_dict_saved": lambda job, p: saved(job.module.state_dict()),
    "state_dict_keep_vars": lambda job, p: job.module.state_dict(keep_vars=True),
    "optimizer_state": lambda job, p: job.optimizers[0].state.get(p),
    "optimizer_state_dict": lambda job, p: job.optimizers[-1].state_dict(),
    "optimizer_saved": lambda job, p: saved(job.optimizers[0]).state_dict(),
    "parameter_saved": lambda job, p: saved(p),
    "parameter_pickled": lambda job, p: pickle.loads(pickle.dumps(p)),
    "model_saved": lambda job, p: saved(job.module),
    "ddp_pickled": lambda job, p: pickle.loads(pickle.dumps(job.ddp)),
    "model_deepcopied": lambda job, p: copy.deepcopy(job.module),
    "ddp_deepcopied": lambda job, p: copy.deepcopy(job.ddp),
    "optimizer_deepcopied": lambda job, p: copy.deepcopy(job.optimizers[0]).state_dict(),
    "optimizer_pickled": lambda job, p: pickle.loads(pickle.dumps(job.optimizers[-1])).state_dict(),
    "optimizer_copied": lambda job, p: copy.copy(job.optimizers[0]).state_dict(),
    "vmapped": _vmapped,
    "func_grad": lambda job, p: torch.func.grad(lambda w: w.abs().square().sum())(p),
    "func_jvp": lambda job, p: torch.func.jvp(torch.sin, (p.detach(),), (torch.ones_like(p),)),
    "functional_call": lambda job, p: functional_call(
        job.module, {n: q * 2 for n, q in job.module.named_parameters()}, (job.probe()[0],)
    ),
    "traced": lambda job, p: torch.jit.trace(job.module.eval(), job.probe()[0], check_trace=False)(job.probe()[0]),
    "local_gradient": lambda job, p: torch.autograd.grad(p.abs().sum(), p),
    "evaluated": _evaluated(lambda job: job.ddp, torch.no_grad),
    "evaluated_for_inference": _evaluated(lambda job: job.ddp, torch.inference_mode),
    "module_evaluated": _evaluated(lambda job: job.module, torch.no_grad),
    "module_inferred": _evaluated(lambda job: job.module, torch.inference_mode),
    "evaluated_with_gradients": _evaluated(lambda job: job.ddp, contextlib.nullcontext),
    "forward_without_gradients": _evaluated(lambda job: job.ddp, torch.no_grad, train=True),
    "leaf_called": lambda job, p: [F.linear(torch.ones(1, m.in_features, dtype=m.weight.dtype), m.weight)
                                   for m in job.leaves() if isinstance(m, nn.Linear)],
    "all_reduced": lambda job, p: [t := p.detach().clone(), dist.all_reduce(t)],
    "gathered": lambda job, p: [ts := [torch.empty_like(p.detach().contiguous()) for _ in range(dist.get_world_size())],
                                dist.all_gather(ts, p.detach().contiguous())],
    "forked": _forked,
    "child_exits": _exited,
    "on_a_thread": _on_a_thread,
    "garbage_collected": lambda job, p: 0 * gc.collect(),
}  # fmt: skip


def reading(job, rng, name):
    one, keep, kept = job.one(rng), rng.random() < 0.5, []

    @job.at(rng)
    def look():
        for value in kept:
            job.note(f"{name}, kept", value)
        value = job.attempt(name, lambda: READERS[name](job, one()))
        if keep:
            kept[:] = [value]


several(" ".join(READERS), reading)


@habit
def averages(job, rng):
    """Averages of the weights over time, by torch or by hand."""
    of = rng.choice([lambda: job.module, lambda: job.ddp])
    by_hand, average = rng.random() < 0.5, []

    def update():
        if by_hand and not average:
            average.extend(p.detach().clone() for p in of().parameters())
        elif not average:
            average.append(swa_utils.AveragedModel(of(), use_buffers=rng.random() < 0.5))
        if by_hand:
            for mean, p in zip(average, of().parameters(), strict=True):
                mean.lerp_(p.detach(), 0.1)
        else:
            average[0].update_parameters(of())

    job.at(rng, "after", "begin")(update)
    job.moments["end"].append(lambda: job.note("average", average))


@habit
def held_from_the_start(job, rng):
    """What was taken before the model was wrapped, or later, is read in the middle of training."""
    detached, all_steps = lambda: [p.detach() for p in job.module.parameters()], rng.random() < 0.5
    take = rng.choice([
        lambda: [p.data for p in job.module.parameters()], lambda: job.module.state_dict(),
        lambda: [p.view(-1) for p in detached()], lambda: [p.numpy() for p in detached() if p.dtype != torch.bfloat16],
        lambda: [torch.from_dlpack(p) for p in detached()],
    ])  # fmt: skip
    held = []
    job.early_or_late(rng)(lambda: held.append(take()))
    (job.moments["after"].append if all_steps else job.at(rng))(lambda: job.note("held", held))


@habit
def capsules(job, rng):
    """DLPack capsules of the parameters themselves, which something opens later."""
    one, held, opened = job.one(rng), [], []
    job.early_or_late(rng)(lambda: held.append(torch.utils.dlpack.to_dlpack(one())))

    @job.moments["after"].append
    def look():
        if held and job.i >= job.steps // 2:
            opened.append(torch.utils.dlpack.from_dlpack(held.pop()))
        job.note("opened", opened)


@habit
def gradients_kept(job, rng):
    kept = []
    job.at(rng, "between", "after")(lambda: kept.extend(p.grad for p in job.module.parameters()))
    job.at(rng, "between", "after", "begin")(lambda: job.note("gradients, kept", kept))


# Writers


@torch.no_grad()
def _scale(p):
    p.mul_(0.95)


def _set(p, name, value):
    setattr(p, name, value)


def _states(job):
    return [v for state in job.optimizers[0].state.values() for v in state.values() if isinstance(v, torch.Tensor)]


WRITERS = {
    "weights_clipped": lambda job, p: p.data.clamp_(-0.2, 0.2),
    "weights_scaled": lambda job, p: _scale(p),
    "weights_apart": lambda job, p: p.data.mul_(1 + 0.1 * dist.get_rank()),
    "data_replaced": lambda job, p: _set(p, "data", p.data * 0.9),
    "data_filled": lambda job, p: torch.inference_mode()(p.data.fill_)(0.05),
    "weights_copied": lambda job, p: p.data.copy_(p.data.flip(0) if p.dim() else p.data),
    "initialized_again": lambda job, p: nn.init.constant_(p, 0.01),
    "written_by_foreach": lambda job, p: torch._foreach_mul_([q.data for q in job.module.parameters()], 0.98),
    "written_through_numpy": lambda job, p: numpy.multiply(a := p.detach().numpy(), 0.9, out=a),
    "broadcast": lambda job, p: dist.broadcast(p.data, 0),
    "vector_written": lambda job, p: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(job.module.parameters()).detach() * 0.99, job.module.parameters()
    ),
    "buffers_apart": lambda job, p: [b.add_(dist.get_rank()) for b in job.module.buffers()],
    "optimizer_reloaded": lambda job, p: [o.load_state_dict(saved(o.state_dict())) for o in job.optimizers],
    "rates_changed": lambda job, p: [g.update(lr=g["lr"] * 0.8) for o in job.optimizers for g in o.param_groups],
    "states_changed": lambda job, p: [v.mul_(0.9) for v in _states(job) if v.dim() and v.is_floating_point()],
}
GRADIENT_WRITERS = {
    "gradient_scaled": lambda job, p: p.grad.mul_(0.5),
    "gradient_replaced": lambda job, p: _set(p, "grad", p.grad * 1.5),
    "gradient_dropped": lambda job, p: _set(p, "grad", None),
    "gradient_noise": lambda job, p: p.grad.data.add_(0.01 * torch.randn(p.shape).to(p.dtype)),
    "gradient_reduced": lambda job, p: dist.all_reduce(p.grad),
    # Of a view, this gives DDP's own view of its bucket other memory, and DDP averages it no more.
    "gradient_data": lambda job, p: (
        job.options.get("gradient_as_bucket_view") or _set(p.grad, "data", p.grad.data * 0.5)
    ),
}


def writing(job, rng, name):
    one, write = job.one(rng), (WRITERS | GRADIENT_WRITERS)[name]

    @job.at(rng, "begin", "between", "after")
    def now():
        if name in WRITERS or one().grad is not None:
            write(job, one())


several(" ".join(WRITERS | GRADIENT_WRITERS), writing)


@habit
def moved_and_back(job, rng):
    """Between two steps the module has another dtype for a moment; after that, its parameters lie elsewhere."""
    there, share = rng.choice([torch.float64, torch.bfloat16]), rng.random() < 0.1

    @job.at(rng, "begin", "after")
    def move():
        dtypes = {t.dtype for t in [*job.module.parameters(), *job.module.buffers()] if t.dtype != torch.int64}
        if share:
            job.module.share_memory()
        elif len(dtypes) == 1 and not job.options.get("gradient_as_bucket_view"):  # as in `gradient_data`
            job.module.to(there).to(*dtypes)


@habit
def data_over_numpy(job, rng):
    """From some step on, a parameter lies in an array."""
    one, arrays = job.one(rng), []

    @job.once(rng)
    def move():
        p = one()
        if p.dtype != torch.bfloat16:
            arrays.append(p.detach().numpy().copy("K"))
            p.data = torch.from_numpy(arrays[-1])

    job.moments["after"].append(lambda: job.note("arrays", arrays))


@habit
def reloaded(job, rng):
    state, into = [], rng.choice([lambda: job.module, lambda: job.ddp])
    first, assign = rng.randrange(job.steps), rng.random() < 0.2

    @job.moments[rng.choice(["begin", "after"])].append
    def save_or_load():
        if job.i == first:
            state.append(copy.deepcopy(into().state_dict()))
        elif job.i == first + 3:
            into().load_state_dict(state[0], assign=assign)


@habit
def tied_midway(job, rng):
    step = rng.randrange(job.steps)

    @job.moments["after"].append
    def tie():
        weights = [(m, m.weight.shape) for m in job.leaves() if hasattr(m, "weight")]
        pairs = [(a, b) for (a, s), (b, t) in itertools.combinations(weights, 2) if s == t]
        if job.i == step and pairs:
            pairs[0][0].weight = pairs[0][1].weight


@habit
def frozen_part(job, rng):
    """A part is frozen before the model is wrapped, and perhaps thawed later; or is frozen later."""
    one, thaw = job.one(rng), rng.random() < 0.5
    if early := rng.random() < 0.7:
        one().requires_grad_(False)
    else:
        job.options["find_unused_parameters"] = True
    if thaw or not early:
        job.changes, step = True, rng.randrange(job.steps)
        job.moments["begin"].append(lambda: job.i == step and one().requires_grad_(early))


@habit
def pruned(job, rng):
    leaf = rng.choice([m for m in job.leaves() if hasattr(m, "weight")])
    job.early_or_late(rng)(lambda: prune.l1_unstructured(leaf, "weight", 0.3))


# Hooks


def parameter_hooks(job, rng, name):
    one, noted = job.one(rng), lambda g: job.note("in a hook on a gradient", [g, list(job.module.parameters())])
    own = functools.cache(lambda: torch.optim.SGD([one()], lr=0.01))

    def clamped(p):
        if job.options.get("gradient_as_bucket_view"):  # DDP sends its bucket, whatever takes the gradient's place
            p.grad.clamp_(-0.01, 0.02)
        else:
            p.grad.data = p.grad.clamp(-0.01, 0.02)

    hook = {
        "gradients_scaled": lambda g: g * 0.5,
        "gradients_noted": lambda g: noted(g),
        "accumulated_clamped": clamped,
        "accumulated_replaced": lambda p: _set(p, "grad", p.grad * 1.5),
        "accumulated_noted": lambda p: noted(p.grad),
        "steps_in_hooks": lambda p: own().step() and None,  # an optimizer of its own, in the backward pass
    }[name]

    @job.early_or_late(rng)
    def register():
        if one().requires_grad:
            (one().register_hook if "gradients" in name else one().register_post_accumulate_grad_hook)(hook)


several(
    "gradients_scaled gradients_noted accumulated_clamped accumulated_replaced accumulated_noted steps_in_hooks",
    parameter_hooks,
)


@habit
def module_hooks(job, rng):
    leaf = rng.choice(job.leaves())
    whole = rng.choice([lambda: leaf, lambda: job.module, lambda: job.ddp])

    @job.early_or_late(rng)
    def register():
        weights = lambda: list(leaf.parameters())  # noqa: E731
        target = whole() if hasattr(job, "ddp") else leaf
        for kind in rng.sample(["pre", "forward", "backward pre", "backward", "gradients"], 2):
            if kind == "pre":
                target.register_forward_pre_hook(lambda m, x: job.note("before forward", weights()))
            elif kind == "forward":
                target.register_forward_hook(lambda m, x, y: job.note("after forward", [weights(), y]))
            elif kind == "backward pre":
                target.register_full_backward_pre_hook(lambda m, g: job.note("before backward", [weights(), g]))
            elif kind == "backward":
                leaf.register_full_backward_hook(lambda m, gi, go: job.note("after backward", [weights(), go]))
            elif not job.options.get("gradient_as_bucket_view"):  # otherwise they are on their way
                target.register_full_backward_hook(lambda m, *_: job.note("gradients", [p.grad for p in weights()]))


@habit
def global_hooks(job, rng):
    def hook(m, *_):
        job.working and job.note("global hook", list(m.parameters()))

    register = nn.modules.module.register_module_forward_hook, nn.modules.module.register_module_forward_pre_hook
    job.early_or_late(rng)(lambda: job.cleanups.append(rng.choice(register)(hook).remove))


@habit
def tensor_hooks(job, rng):
    leaf = rng.choice(job.leaves())

    def hook(m, x, y):
        if isinstance(y, torch.Tensor) and y.requires_grad and job.working:
            y.register_hook(lambda g: job.note("gradient of an output", [g, list(m.parameters())]))

    job.early_or_late(rng)(lambda: leaf.register_forward_hook(hook) and None)


# Exceptions


def _caught(job, rng):
    """Work that may raise; the step after it is left out or not."""
    leave_out, failed = rng.random() < 0.5, []

    @job.ready.append
    def catch():
        work, step = job.work, job.step

        def catching():
            failed.clear()
            try:
                return work()
            except Deliberate:
                failed.append(job.i)
                job.zero()
                return torch.zeros(())

        job.work = catching
        job.step = lambda: (leave_out and failed) or step()


@habit
def forward_raises(job, rng):
    steps, leaf = job.some(rng), rng.choice(job.leaves())

    def fail(*_):
        if job.working and job.i in steps:
            raise Deliberate

    leaf.register_forward_pre_hook(fail)
    _caught(job, rng)


@habit
def backward_raises(job, rng):
    steps, leaf, at_once = job.some(rng), rng.choice(job.leaves()), rng.random() < 0.5

    def fail(grad):
        raise Deliberate

    def hook(m, x, y):
        if job.working and job.i in steps and isinstance(y, torch.Tensor) and y.requires_grad and not at_once:
            y.register_hook(fail)

    def failing(loss, **options):
        if at_once and job.i in steps:
            loss.register_hook(fail)
        backward(loss, **options)

    backward, job.backward = job.backward, failing
    leaf.register_forward_hook(hook)
    _caught(job, rng)


@habit
def step_raises(job, rng):
    """Before it has changed anything, or afterwards."""
    steps, post = job.some(rng), rng.random() < 0.5

    def fail(*_):
        if job.i in steps:
            raise Deliberate

    @job.with_optimizers(rng)
    def register(optimizers):
        for o in optimizers:
            (o.register_step_post_hook if post else o.register_step_pre_hook)(fail)

    iterate = job._iterate

    def catching():
        try:
            iterate()
        except Deliberate:
            job.note("the step has raised", "")

    job._iterate = catching


# Several models, other models, other plans


@habit
def stranger(job, rng):
    """A parameter that is not the model's, in the loss and the optimizer."""
    own = nn.Parameter(torch.ones(3))
    job.strangers.append(own)
    job.losses.append(lambda: own.square().mean())
    job.moments["end"].append(lambda: job.note("stranger", own))


@habit
def two_models_one_optimizer(job, rng):
    second = nn.Linear(4, 4)
    job.strangers.extend(second.parameters())
    wrapped, attached = [], rng.random() < 0.7

    @job.ready.append
    def wrap():
        ddp = DDP(second, process_group=job.second_group)
        wrapped.append(job.attach(ddp, job.optimizers[:1]) if attached else ddp)

    job.losses.append(lambda: wrapped[0](torch.ones(2, 4) * (1 + dist.get_rank())).square().mean())
    job.moments["end"].append(lambda: job.note("second model", second))


@habit
def second_model_in_turns(job, rng):
    second, attached = nn.Linear(4, 4), rng.random() < 0.7
    optimizer = torch.optim.Adam(second.parameters(), lr=0.01)
    wrapped = []

    @job.ready.append
    def wrap():
        ddp = DDP(second, process_group=job.second_group)
        wrapped.append(job.attach(ddp, [optimizer]) if attached else ddp)

    @job.at(rng)
    def train():
        optimizer.zero_grad()
        wrapped[0](torch.randn(2, 4)).square().mean().backward()
        optimizer.step()

    job.moments["end"].append(lambda: job.note("second model", [second, optimizer.state_dict()]))


@habit
def copied_midway(job, rng):
    """A copy of the wrapped model is trained on, by new optimizers."""
    job.changes = True
    how = rng.choice([copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp)), saved])
    step, attached = rng.randrange(1, job.steps), rng.random() < 0.5
    moment = rng.choice(["begin", "after"])
    job.moments[moment].append(lambda: job.i == step and job.become(how(job.ddp), attached))


@habit
def wrapped_again(job, rng):
    """Early or late, with optimizers of its own or with those that there are."""
    step, attached = rng.randrange(1, rng.choice([6, job.steps])), rng.random() < 0.7
    same = rng.random() < 0.4

    @job.moments["begin"].append
    def wrap():
        if job.i == step and same:
            job.ddp = DDP(job.module, **job.options)
            attached and job.attach(job.ddp, job.optimizers)
        elif job.i == step:
            job.become(DDP(job.module, **job.options), attached)


@habit
def copied_with_optimizers(job, rng):
    """The wrapped model is copied together with its optimizers, and both are trained on."""
    job.changes = True
    how = rng.choice([copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), saved])
    attached = rng.random() < 0.5

    @job.once(rng)
    def copied():
        job.ddp, job.optimizers = how((job.ddp, job.optimizers))
        job.module = job.ddp.module
        attached and job.attach(job.ddp, job.optimizers)


@habit
def optimizer_copied_midway(job, rng):
    """A copy of an optimizer, which has the same parameters and states, makes the steps from now on."""
    attached = rng.random() < 0.5

    @job.once(rng)
    def copied():
        job.optimizers[0] = copy.copy(job.optimizers[0])
        attached and job.attach(job.ddp, job.optimizers)


@habit
def own_collectives(job, rng):
    """Collectives of the program, in the same group, while messages are on their way."""

    @job.at(rng)
    def collect():
        value = torch.tensor([float(job.i + dist.get_rank())])
        work = dist.all_reduce(value, async_op=True)
        dist.barrier()
        work.wait()
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, value.item())
        job.note("gathered", found)


ON_LEGATO = "plan_adopted flushed detached attached_again planned_again competed replanned distributed_again"


def on_legato(job, rng, name):
    """What stock DDP has no word for: legato is asked for something between two steps, or between two of its passes."""
    if name == "replanned":
        job.on_attaching["replan"] = "auto"

    def ask():
        import legato

        together = not job.ddp._join_config.enable  # in `join()` ranks may have different numbers of steps
        attached = job.kind in LEGATOS and together and job.attached()
        match attached and name:  # without an attachment, none of these
            case "plan_adopted":
                attached.adopt(job.plan(job.ddp))
            case "flushed":
                attached.flush()
            case "detached" if job.i > 5:  # for good
                attached.detach()
            case "attached_again":
                attached.detach()
                job.attach(job.ddp, job.optimizers)
            case "planned_again":
                legato.distribute(job.ddp, job.optimizers[0], job.plan(job.ddp))
            case "competed":
                attached.compete(job.contestants(job.ddp))
            case "replanned":  # as if the pace had changed
                attached.on_drift("computation on rank 0 takes twice as long")
            case "distributed_again":
                legato.distribute(job.ddp, job.optimizers[0])

    once = name in ("competed", "replanned") or rng.random() < 0.5
    anywhere = {"flushed": ["forward", "between"], "detached": ["between"], "attached_again": ["between"]}.get(name, [])
    (job.once if once else job.at)(rng, "begin", "after", *anywhere)(ask)


several(ON_LEGATO, on_legato)


@habit
def traced_by_legato(job, rng):
    steps, iterate = job.some(rng), job._iterate

    def traced():
        attached = job.kind in LEGATOS and job.i in steps and job.attached()
        with attached.trace() if attached else contextlib.nullcontext():
            iterate()

    job._iterate = traced


# Slow ones


@slow
def compiled_part(job, rng):
    torch._dynamo.reset()
    leaf = rng.choice([m for m in job.leaves() if isinstance(m, nn.Linear)] or job.leaves())
    rng.choice([leaf, job.module]).compile(backend="aot_eager")


@slow
def compiled_function(job, rng):
    torch._dynamo.reset()
    run, one = torch.compile(lambda w: F.gelu(w).square().mean(), backend="aot_eager"), job.one(rng)
    job.losses.append(lambda: run(one()).float())


@slow
def compiled_ddp(job, rng):
    torch._dynamo.reset()
    job.with_optimizers(rng)(lambda _: hasattr(job, "ddp") and _set(job, "ddp", _compiled(job.ddp)))


@slow
def compiled_steps(job, rng):
    """`step` of the optimizers, or a function that calls it."""
    torch._dynamo.reset()
    inside, compiled = rng.random() < 0.5, {}

    @job.with_optimizers(rng)
    def compile_them(optimizers):
        for o in optimizers:
            compiled[id(o)] = o, _compiled((lambda o=o: o.step()) if inside else o.step)

    job.step_of = lambda o: compiled[id(o)][1]() if id(o) in compiled else o.step()


def _compiled(it):
    return torch.compile(it, backend="aot_eager")


@slow
def scripted_part(job, rng):
    for m in job.module.modules():
        for name, child in m.named_children():
            if isinstance(child, nn.Linear) and not hasattr(child, "parametrizations"):
                setattr(m, name, torch.jit.script(child))
                return


@slow
def profiled(job, rng):
    steps = {rng.randrange(job.steps)}
    job.contexts.append(lambda: torch.profiler.profile() if job.i in steps else contextlib.nullcontext())


# Streams of their own, on an accelerator

on_streams = functools.partial(habit, kind="late")


@on_streams
def averaged_beside(job, rng):
    """An average of the weights."""
    side, averages, steps = torch.Stream(ACCELERATOR), {}, job.some(rng)
    joined, moment = rng.choice([None, "weights"]), rng.choice(["forward", "between", "after", "after"])

    @job.moments[moment].append
    def average():
        if job.i in steps:
            with torch.no_grad(), job.on(side, joined):
                for name, p in job.module.named_parameters():
                    averages.setdefault(name, torch.zeros_like(p)).lerp_(p.detach(), 0.1)

    job.moments["end"].append(lambda: job.note("averages", averages))


@on_streams
def averaged_late(job, rng):
    """An average whose stream waits for the step at once, and reads the weights when the next forward pass has."""
    side, averages, steps = torch.Stream(ACCELERATOR), {}, job.some(rng)
    moment = rng.choice(["begin", "forward", "between"])
    job.moments["after"].append(lambda: side.wait_stream(torch.accelerator.current_stream()))

    @job.moments[moment].append
    def average():
        if job.i in steps and job.i:
            with torch.no_grad(), side:
                for name, p in job.module.named_parameters():
                    averages.setdefault(name, torch.zeros_like(p)).lerp_(p.detach(), 0.1)
            job.beside.append((True, side))

    @job.moments["end"].append
    def look():
        torch.accelerator.current_stream().wait_stream(side)
        job.note("averages", averages)


@on_streams
def norm_beside(job, rng):
    """The norm of the gradients, by which they may be scaled."""
    side, steps, used = torch.Stream(ACCELERATOR), job.some(rng), rng.random() < 0.5

    @job.moments["between"].append
    def norm():
        gradients = [p.grad for p in job.module.parameters() if p.grad is not None]
        if job.i not in steps or not gradients:
            return
        with job.on(side, None if used else "gradients"):
            found = torch.stack([g.detach().abs().double().sum() for g in gradients]).sum()
            job.note("norm", found)
        if used:
            found.record_stream(torch.accelerator.current_stream())
            for g in gradients:
                g.mul_((1 / (1 + found)).to(g.real.dtype if g.is_complex() else g.dtype))


@on_streams
def copied_beside(job, rng):
    """Copies of weights, gradients or states on the host, which are read later."""
    side, steps, copies = torch.Stream(ACCELERATOR), job.some(rng), {}
    what = rng.choice(["weights", "state_dict", *([] if job.shard else ["gradients", "states"])])
    moment = rng.choice(["between", "after"]) if what in ("weights", "state_dict") else "between"

    def values():
        if what == "state_dict":
            return job.module.state_dict()
        if what == "states":
            states = (o.state.get(p, {}) for o in job.optimizers for g in o.param_groups for p in g["params"])
            return dict(enumerate(v for s in states for v in s.values() if isinstance(v, torch.Tensor)))
        return {n: p if what == "weights" else p.grad for n, p in job.module.named_parameters()}

    @job.moments[moment].append
    def copy():
        if job.i not in steps:
            return
        joined = {"weights": "weights", "state_dict": None}.get(what, "gradients")
        with torch.no_grad(), job.on(side, joined):
            for name, value in values().items():
                if value is not None and value.device.type == ACCELERATOR:
                    if name not in copies or copies[name].shape != value.shape:
                        copies[name] = torch.empty(value.shape, dtype=value.dtype, device="cpu").pin_memory()
                    copies[name].copy_(value, non_blocking=True)
        if rng.random() < 0.5:
            side.synchronize()
            job.note("copies", copies)

    @job.moments["end"].append
    def look():
        side.synchronize()
        job.note("copies", copies)


@on_streams
def branched(job, rng):
    """A layer runs on a stream of its own, and so does its backward pass."""
    side, leaf, steps = torch.Stream(ACCELERATOR), rng.choice(job.leaves()), job.some(rng)
    forward = leaf.forward

    def aside(*inputs):
        if job.i not in steps:
            return forward(*inputs)
        main = torch.accelerator.current_stream()
        with job.on(side):
            for x in inputs:
                if isinstance(x, torch.Tensor):
                    x.record_stream(side)
            out = forward(*inputs)
        if isinstance(out, torch.Tensor):
            out.record_stream(main)
        return out

    leaf.forward = aside


def aside(job, rng, name):
    """A part of each step on a stream of its own."""
    side, steps, plain = torch.Stream(ACCELERATOR), job.some(rng), getattr(job, name)

    def part(*arguments, **options):
        if job.i not in steps:
            return plain(*arguments, **options)
        with job.on(side):
            return plain(*arguments, **options)

    setattr(job, name, part)


several("work backward step zero", aside, "late")


@on_streams
def all_aside(job, rng):
    """The whole training."""
    side = torch.Stream(ACCELERATOR)
    job.around.append(lambda: job.on(side))


@on_streams
def batches_aside(job, rng):
    side, plain = torch.Stream(ACCELERATOR), job.batch

    def batch():
        made = [t.cpu().pin_memory() for t in plain()]
        with job.on(side):
            made = [t.to(ACCELERATOR, non_blocking=True) for t in made]
        for t in made:
            t.record_stream(torch.accelerator.current_stream())
        return made

    job.batch = batch


@on_streams
def evaluated_beside(job, rng):
    side, steps = torch.Stream(ACCELERATOR), job.some(rng)

    @job.moments[rng.choice(["begin", "after"])].append
    def evaluate():
        if job.i in steps:
            x, _ = job.probe()
            job.module.eval()
            with torch.no_grad(), job.on(side):
                x.record_stream(side)
                job.note("evaluated", job.module(x))
            job.module.train()


@on_streams
def changed_beside(job, rng):
    """Weights or gradients are changed on a stream of its own."""
    side, one, gradient = torch.Stream(ACCELERATOR), job.one(rng), rng.random() < 0.5

    @job.at(rng, *(["between"] if gradient else []))
    def change():
        with torch.no_grad(), job.on(side):
            p = one()
            if (value := p.grad if gradient else p) is not None:
                value.mul_(0.9)


@on_streams
def sharded_plans(job, rng):
    """No stream, but each rank has states, or gradients too, for its part alone."""


@on_streams
def hooked_beside(job, rng):
    """A hook copies each gradient as it arrives."""
    side, one, found = torch.Stream(ACCELERATOR), job.one(rng), []

    @job.ready.append
    def hook():
        p = one()

        def copy(_):
            with torch.no_grad(), job.on(side):
                found.append(p.grad.clone())

        if p.requires_grad:
            p.register_post_accumulate_grad_hook(copy)

    job.moments["end"].append(lambda: job.note("found", found))


# ---- drawing and running ----------------------------------------------------------------------

#: What a sharded plan is documented not to do as DDP does: ranks that have other values or gradients, gradients that
#: are kept, read or changed after the step, states that are read, parameters that two optimizers have.
NOT_SHARDED = {"weights_apart", "steps_in_hooks", "init_sync_off", "gradients_kept", "total_norm", "gradient_norms",
               "optimizer_copied", "optimizer_state", "overlapping_optimizers", *GRADIENT_WRITERS}  # fmt: skip
#: What the late device cannot do, or reads too early under DDP.
NOT_LATE = {"recurrent", "complex", "sparse", "over_numpy", "joined", "nested", "evaluated_for_inference",
            "module_inferred", "forked", "data_filled", "written_through_numpy", "data_over_numpy",
            "by_address"}  # fmt: skip


def drawn(seed, slow=False, auto=False, late=False):
    """The names of the habits that a seed stands for; of programs under `auto`, some change their plans themselves.

    Those on a `late` device use streams of their own.
    """
    rng = random.Random(f"{seed} habits")
    count = rng.randint(1, 6)
    models, pool = list(HABITS["model"]), [*HABITS["other"], *(HABITS["slow"] if slow else ())]
    if late:
        models, pool = ([name for name in names if name not in NOT_LATE] for names in (models, pool))
    of = rng.choice(models)
    by = rng.choice(["sgd", "adagrad"] if of == "sparse" else list(HABITS["optimizer"]))  # others refuse its gradients
    names = [of, by, *rng.sample(pool, count)]
    changed = [rng.choice(ON_LEGATO.split())] if auto and rng.random() < 0.3 else []
    streams = rng.sample(list(HABITS["late"]), rng.randint(1, 3)) if late else []
    if auto:  # whose plans divide nothing, unless they are asked to
        streams = [name for name in streams if name != "sharded_plans"]
    left_out = NOT_SHARDED if "sharded_plans" in streams else ()
    return [name for name in dict.fromkeys(names + changed + streams) if name not in left_out]


def is_legatos(error):
    from legato.core.errors import LegatoError

    return isinstance(error, LegatoError)


@contextlib.contextmanager
def late_messages(seed):
    """Messages of legato take longer, at random; the list inside has one entry for each message that is launched."""
    from legato.pytorch.network.channel import _BackendChannel, _GlooChannel, _QueuedWork

    if "support.late.device" in sys.modules:  # whose messages are late
        launched, launch = [], _BackendChannel.__call__
        counted = lambda *arguments: launched.append(arguments[2]) or launch(*arguments)  # noqa: E731
        with patch.object(_BackendChannel, "__call__", counted):
            yield launched
        return
    rng, launch = random.Random(f"{seed} late {dist.get_rank()}"), _GlooChannel.__call__
    rate = random.Random(f"{seed} late").choice([0.05, 0.3, 0.9])

    launched = []

    def late(channel, buffer, message):
        launched.append(message)
        if rng.random() > rate:
            return launch(channel, buffer, message)
        busy = isinstance(channel._last, _QueuedWork) and not channel._last.is_completed()
        before, delay = None if busy else channel._last, rng.choice([5e-4, 2e-3, 5e-3])
        written = torch.cuda.current_stream().record_event() if buffer.is_cuda else None

        def carry_out():
            time.sleep(delay)
            channel._carry_out(before, written, buffer, message)

        channel._last = channel._queue(carry_out)
        return channel._last

    _GlooChannel.__call__ = late
    try:
        yield launched
    finally:
        _GlooChannel.__call__ = launch


@contextlib.contextmanager
def drawn_decisions(job):
    """`plan="auto"` observes few steps, and after short tournaments the plan stays that is drawn.

    In most programs it is drawn, too, which plans compete.
    """
    import legato.auto
    from legato.pytorch.runtime.attached import attachment, tournament

    rng = random.Random(f"{job.seed} decisions")
    steps, rounds = rng.choice([1, 2]), rng.choice([1, 1, 2])
    planned = rng.choice([_planned_here, job.planned, job.planned])

    class Decided(tournament.Tournament):
        """By a clock that shows which plan is to win."""

        def __init__(self, plans, gather, clock, *more):
            first = plans[rng.choice([0, rng.randrange(len(plans)), -1])]
            clock = types.SimpleNamespace(now=float, seconds=lambda *_: 1.0 + (self.plan is not first))
            super().__init__(plans, gather, clock, *more)

    with (
        short_tournaments(),
        patch.multiple(legato.auto, WARMUP_STEPS=1, OBSERVED_STEPS=2 * steps, _planned=planned),
        patch.multiple(tournament, FEWEST_ROUNDS=rounds, MOST_ROUNDS=rounds),
        patch.object(attachment, "Tournament", Decided),
    ):
        yield


def run(seed, names, kind, long=False, accelerated=False):
    """On a rank: {log, messages, said, error, legatos, traceback} of a program under `ddp`, `dry`, `legato` or `auto`.

    What legato says on standard error is `said`.
    """
    faulthandler.register(signal.SIGUSR1, open(_where(os.getpid()), "w"), all_threads=False)  # noqa: SIM115
    torch.manual_seed(2 * seed + dist.get_rank())
    result = {"error": None, "legatos": False, "traceback": ""}
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        late = sys.modules.get("support.late.device")
        if accelerated:
            torch.accelerator.synchronize()
            stack.enter_context(torch.device(ACCELERATOR))
            if late:
                late.races()
                late.seed(seed + 7 * dist.get_rank())
            else:
                torch.use_deterministic_algorithms(True, warn_only=True)
        said, launched = stack.enter_context(contextlib.redirect_stderr(io.StringIO())), []
        job = Job(seed, kind, long, accelerated)
        for without in (Bare, Lookahead, LookaheadOfTimm):  # torch puts hooks around `step` of their classes in a copy
            stack.enter_context(patch.object(without, "step", without.step))
        try:
            if kind in LEGATOS:
                launched = stack.enter_context(late_messages(seed))
                stack.enter_context(drawn_decisions(job))
            if "sharded_plans" in names:
                job.shard = random.Random(f"{seed} shard").choice(["optimizer", "gradients"])
            for name in sorted(names, key=lambda name: name not in HABITS["model"]):
                function = next(habits[name] for habits in HABITS.values() if name in habits)
                function(job, random.Random(f"{seed} {name}"))
            if kind == "dry" and not {"compiled_part", "compiled_ddp"} & {*names}:  # which have buckets of their own
                job.options["bucket_cap_mb"] = 1e-5
            job.train()
            if accelerated:
                torch.accelerator.synchronize()
                if races := late and late.races():
                    raise Race("; ".join(races[:3]))
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip()
            result |= {"error": text, "legatos": kind in LEGATOS and is_legatos(error),
                       "traceback": traceback.format_exc()}  # fmt: skip
        finally:
            for function in job.cleanups:
                function()
    return result | {"log": job.notes(), "messages": len(launched), "said": said.getvalue(), "part": job.part}


def _where(process):
    """The file in which a rank that hangs says where it is."""
    return Path(tempfile.gettempdir(), f"legato-programs-{process}")


class Pool:
    """Ranks that are replaced when they hang or fail, and now and then."""

    #: What a rank runs, and the module whose command runs it.
    program, command = staticmethod(run), "support.programs"

    def __init__(self, size=2, backend="gloo"):
        self.backend, self._runs = backend, 0
        self._over = "gloo" if ACCELERATOR == "cuda" else backend
        self._ranks = Ranks(size, self._over)

    def run(self, seed, names, kind, long=False):
        """The results of `run` by rank; a rank that does not answer has the error "hangs"."""
        self._ranks.begin(self.program, seed, names, kind, long, self.backend == "late")
        results, patience = [None] * self._ranks.size, time.monotonic() + PATIENCE_S[kind]
        while None in results and time.monotonic() < patience:
            for rank, pipe in enumerate(self._ranks._pipes):
                if results[rank] is None and pipe.poll(0.005):
                    results[rank] = self._received(pipe)
                    if results[rank]["error"]:
                        # what DDP refuses on one rank is refused
                        patience = min(patience, time.monotonic() + AFTER_A_FAILURE_S * (kind != "ddp"))
        self._runs += 1
        ranks = [process.pid for process in self._ranks._processes]
        results = [r or self._lost("hangs", self._place(rank)) for r, rank in zip(results, ranks, strict=True)]
        if self._runs >= 2 * PROGRAMS or any(r["error"] for r in results):
            self.renew(force=any(r["error"] for r in results))
        return results

    def renew(self, force=False):
        """Replace the ranks."""
        self.close(force)
        self._ranks, self._runs = Ranks(self._ranks.size, self._over), 0

    def _received(self, pipe):
        try:
            ok, result = pipe.recv()
            return result if ok else self._lost(result.splitlines()[0], result)
        except (EOFError, ConnectionResetError):
            return self._lost("died", "")

    def _lost(self, error, where):
        return {"error": error, "legatos": False, "traceback": where, "log": [], "messages": 0, "said": ""}

    def _place(self, rank):
        """Where the main thread of a rank is."""
        with contextlib.suppress(OSError):
            os.kill(rank, signal.SIGUSR1)
            time.sleep(0.3)
            found = re.findall(r'File ".*/(.*?/.*?)", line (\d+) in (.*)', _where(rank).read_text())
            return " <- ".join(f"{file}:{line} {function}" for file, line, function in found[:25])

    def close(self, force=False):
        self._ranks.close(force)
        for process in self._ranks._processes:
            _where(process.pid).unlink(missing_ok=True)


def verdict(pool, seed, names, other="legato"):
    """("equal" | "refused by DDP" | "refused" | "fails", what there is to say); `other` may be "dry auto"."""
    kind, long = other.split()[0], other.endswith("auto")
    stock = pool.run(seed, names, "ddp", long)
    for result in stock:
        if result["error"] and result["error"] != "hangs":
            return "refused by DDP", result["error"]
    if any(result["error"] for result in stock):
        return "refused by DDP", "hangs"
    ours = pool.run(seed, names, kind, long)
    errors = [result["error"] for result in ours]
    said = re.sub(r"^legato: (an all-reduce takes .*; )?| \(median.*", "", ours[0]["said"], flags=re.M).strip()
    refusals = _refusals(ours, stock)
    if any(errors) and not refusals:
        lines = [f"rank {rank}: {result['error']}" for rank, result in enumerate(ours)]
        places = [f"rank {rank}: {result['traceback'][-1000:]}" for rank, result in enumerate(ours)]
        return "fails", "\n".join([*lines, *places, f"legato says: {said}"])
    for rank, (expected, found) in enumerate(zip(stock, ours, strict=True)):
        if found["error"]:
            continue
        for a, b in itertools.zip_longest(expected["log"], found["log"]):
            if a != b and pool.run(seed, names, "ddp", long)[rank]["log"] != expected["log"]:
                return "refused by DDP", "ends otherwise each time"
            if a != b:
                return "fails", f"on rank {rank}, under DDP {a}, found {b}\nlegato says: {said}"
    if refusals:
        return "refused", refusals[0]
    if kind == "auto":
        return "equal", said or "nothing was decided"
    return "equal", "" if ours[0]["messages"] or kind == "dry" else f"no message was legato's: {said}"


def _refusals(ours, stock):
    """The errors by which legato refuses a program, the same on all ranks of a model; none if any other has failed.

    Ranks of other models may then wait for these ranks.
    """
    by_part = collections.defaultdict(set)
    for result, other in zip(ours, stock, strict=True):
        said = re.sub(r"\d+", "N", str(result["error"]))
        by_part[tuple(other["part"])].add((said, result["legatos"], result["error"] in (None, "hangs")))
    same = all(len(told) == 1 and (legatos or harmless) for told in by_part.values() for _, legatos, harmless in told)
    return [result["error"] for result in ours if result["legatos"]] if same else []


def smaller(pool, seed, names, other):
    """Drop habits as long as the program fails without them."""
    for name in list(names):
        fewer = [n for n in names if n != name]
        if fewer and verdict(pool, seed, fewer, other)[0] == "fails":
            names = fewer
    return names


def report(pool, seed, names, what, other="legato", whole=False):
    """The habits without which a program does not fail, and what is said of it."""
    least = names if whole else smaller(pool, seed, names, other)
    outcome, said = ("fails", what) if whole else verdict(pool, seed, least, other)
    said = said if outcome == "fails" else f"nothing this time, but before: {what}"
    options = "".join(f" --{option}" for option in (*other.split(), pool.backend) if option not in ("legato", "gloo"))
    command = f"PYTHONPATH=tests python -m {pool.command}{options} --one {seed} --habits {','.join(least)}"
    return least, (
        f"seed {seed} fails: {what.splitlines()[0]}\n  habits: {', '.join(names)}\n  {command}\n  says: {said}"
    )


def check(seeds, kind, backend="gloo", pool_of=None, drawn_for=None):
    """Fail unless the programs of these seeds are equal or refused, and most of them equal; none hangs under DDP."""
    outcomes, failures = collections.Counter(), []
    patient = patch.multiple(
        sys.modules[__name__],
        PATIENCE_S=dict.fromkeys(PATIENCE_S, support.PATIENCE_S),
        AFTER_A_FAILURE_S=support.PATIENCE_S,
    )  # a busy machine may take long
    with patient, contextlib.ExitStack() as stack:
        pool = None if pool_of else stack.enter_context(contextlib.closing(Pool(backend=backend)))
        for seed in seeds:
            names = drawn_for(seed) if drawn_for else drawn(seed, auto=kind == "auto", late=backend == "late")
            on = pool or pool_of(seed)
            outcome, what = verdict(on, seed, names, kind)
            outcomes[outcome] += 1
            if outcome == "fails":
                failures.append(report(on, seed, names, what, kind)[1])
    assert not failures, "\n".join(failures)
    assert outcomes["equal"] > len(seeds) / 2, outcomes


def arguments():
    """The parser of the command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:100", help="FIRST:LAST")
    parser.add_argument("--one", type=int, help="a single seed")
    parser.add_argument("--habits", help="these in place of those drawn")
    parser.add_argument("--auto", action="store_true", help='legato makes its plans (plan="auto")')
    parser.add_argument("--dry", action="store_true", help="both sides are stock DDP")
    parser.add_argument("--whole", action="store_true", help="make no program that fails smaller")
    return parser


def explore(options, pool_of, drawn_for):
    """Run the programs of the seeds, on `pool_of(seed)`, with the habits `drawn_for(seed)`; print what comes out."""
    first, last = (options.one, options.one + 1) if options.one is not None else map(int, options.seeds.split(":"))
    other = " ".join(["dry"] * options.dry + ["auto"] * options.auto) or "legato"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warnings of DDP on the ranks
    began, counts, reasons = time.monotonic(), collections.Counter(), collections.Counter()
    for seed in range(first, last):
        pool, names = pool_of(seed), options.habits.split(",") if options.habits else drawn_for(seed)
        outcome, what = verdict(pool, seed, names, other)
        counts[outcome] += 1
        if outcome == "fails":
            least, text = report(pool, seed, names, what, other, options.whole)
            what = f"{what.splitlines()[0]} ({', '.join(least)})"
            print(text, flush=True)
        elif outcome == "refused":
            print(f"seed {seed} is refused: {', '.join(names)}", flush=True)
        for line in what.splitlines() if outcome == "equal" else [" ".join(what.split())]:
            reasons[outcome, re.sub(r"\d+", "N", line)[:150]] += 1
        if seed + 1 == last or (seed + 1 - first) % 50 == 0:
            seconds = (time.monotonic() - began) / (seed + 1 - first)
            print(f"{seed + 1 - first} programs, {seconds:.2f} s each:", dict(counts), flush=True)
    for (outcome, what), count in reasons.most_common():
        print(f"{count:5} {outcome}: {what}")


def main():
    parser = arguments()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slow", action="store_true", help="draw slow habits as well")
    parser.add_argument("--late", action="store_true", help="on an accelerator whose kernels run later than their call")
    options = parser.parse_args()
    with contextlib.closing(Pool(options.ranks, "late" if options.late else "gloo")) as pool:
        explore(options, lambda _: pool, lambda seed: drawn(seed, options.slow, options.auto, options.late))


if __name__ == "__main__":
    main()
