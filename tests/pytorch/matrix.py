"""The equality matrix: what training scripts do, under DDP and under a random plan. Everything here runs on the ranks.

A row returns how far its weights are from DDP's (0.0: bit for bit).
"""

import copy
import inspect
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import build, distance, random_plan, train, wrap

from legato.pytorch import distribute
from legato.pytorch.gate import GatedParameter

STEPS = 20


class Dense(nn.Module):
    """Matrices only, as Muon wants them."""

    def __init__(self, dtype=None):
        super().__init__()
        self.first, self.second = nn.Linear(12, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.third = nn.Linear(16, 10, bias=False)
        self.to(dtype or torch.get_default_dtype())

    def forward(self, x):
        return self.third(F.gelu(self.second(F.gelu(self.first(x.to(self.first.weight.dtype))))))

    def batch(self, generator):
        return torch.randn(4, 12, generator=generator), torch.randint(0, 10, (4,), generator=generator)


class Mixed(Dense):
    """Layers of three dtypes, with biases."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 16, dtype=torch.bfloat16), nn.Linear(16, 16, dtype=torch.float64)
        self.third = nn.Linear(16, 10)

    def forward(self, x):
        x = F.gelu(self.first(x.bfloat16()))
        return self.third(F.gelu(self.second(x.double())).float())


class Complex(Dense):
    """A complex weight."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(16, 16, dtype=torch.complex64)

    def forward(self, x):
        return self.third(self.second(self.first(x).to(torch.complex64)).abs())


class Reentrant(nn.Module):
    """Re-entrant checkpointing; the first gradient comes from a backward pass inside the backward pass."""

    def __init__(self, which):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.which = which

    def forward(self, x):
        x.requires_grad_()
        for i, layer in enumerate(self.layers):
            x = F.gelu(checkpoint(layer, x, use_reentrant=True) if i in self.which else layer(x))
        return x[:, :10]

    batch = Dense.batch


class Wandering(nn.Module):
    """Takes another way in every iteration and on every rank."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 10)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        first = (self.calls + dist.get_rank()) % 4
        for way in range(first, 4, 1 + self.calls % 2):
            x = F.gelu(self.ways[way](x))
        return self.head(x)

    batch = Dense.batch


def compared(make, optimizer_of, steps=STEPS, ddp=None, after=None, **training):
    """Train what `make` makes, with DDP and with legato; returns the distance of the weights.

    `after(kind, wrapped, optimizer)` runs once the model is wrapped, and may return what `train` needs.
    """
    trained = []
    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = make()
        wrapped, optimizer = wrap(kind, model, optimizer_of(model.parameters()), **(ddp or {} if kind == "ddp" else {}))
        extra = (after(kind, wrapped, optimizer) or {}) if after else {}
        trained.append(train(wrapped, optimizer, steps, **training, **extra))
    return distance(*trained)


def apart(expected, found):
    """How far two lists of numbers are from each other."""
    return max(abs(a - b) for a, b in zip(expected, found, strict=True))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


# ---- optimizers ------------------------------------------------------------------------

#: Every optimizer of torch.optim; those that cannot be compared on dense gradients with `step()` say why.
OTHERWISE = {"Optimizer": "the base class", "LBFGS": "training.equality_lbfgs", "SparseAdam": "sparse gradients only"}
OPTIMIZERS = sorted(
    n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
)


def variants(name):
    """Keyword arguments to try: the defaults, and each switch that the optimizer has."""
    parameters = inspect.signature(getattr(torch.optim, name)).parameters
    base = {"weight_decay": 0.01} if "weight_decay" in parameters else {}
    switches = ("foreach", "maximize", "fused", "amsgrad", "nesterov", "centered", "capturable", "differentiable")
    yield base
    for switch in switches:
        if switch in parameters:
            needs = {"momentum": 0.9} if switch == "nesterov" else {}
            yield {**base, **needs, switch: True}
    if "momentum" in parameters:
        yield {**base, "momentum": 0.9}


def optimizer_variants(name):
    """{variant: distance, or the error that both raise}."""
    found = {}
    for options in variants(name):
        outcomes = []
        for kind in ("ddp", "legato"):
            torch.manual_seed(7)
            model = Dense()
            try:
                optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **options)
                wrapped, optimizer = wrap(kind, model, optimizer)
                outcomes.append(train(wrapped, optimizer, STEPS))
                waits = kind == "ddp" or type(model.third.weight) is GatedParameter
                assert waits or "differentiable" in options, f"{name} steps whole"
                wrapped.state_dict()
            except (RuntimeError, ValueError, AssertionError) as error:
                outcomes.append(f"{type(error).__name__}: {str(error)[:60]}")
        if all(isinstance(o, str) for o in outcomes):
            found[str(options)] = 0.0 if outcomes[0] == outcomes[1] else outcomes
        else:
            found[str(options)] = outcomes if any(isinstance(o, str) for o in outcomes) else distance(*outcomes)
    return {variant: result for variant, result in found.items() if result != 0.0}


def several_optimizers():
    """Muon for the matrices and Adam for the rest, both managed; and a second one that legato knows nothing of."""
    worst = 0.0
    for managed in (True, False):
        trained = []
        for kind in ("ddp", "legato"):
            model = build("Attention")
            matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
            rest = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
            muon, other = torch.optim.Muon(matrices, lr=1e-2), adam(rest)
            wrapped, muon = wrap(kind, model, muon)
            if kind == "legato" and managed:
                wrapped.manage(other)

            def both(optimizer, i, other=other):
                optimizer.step()
                other.step()
                other.zero_grad()

            trained.append(train(wrapped, muon, STEPS, step=both))
        worst = max(worst, distance(*trained))
    return worst


# ---- learning rates -------------------------------------------------------------------

PER_STEP = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 0.1, step_size_up=4),
    "Cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "Sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [4],
    ),
}


def scheduler_per_step(name, early):
    """A scheduler made before or after `distribute`; updates wait for their reads in both cases."""
    waits = []

    def stepping(kind, wrapped, optimizer):
        schedule = made.pop() if early else PER_STEP[name](optimizer)

        def step(optimizer, i):
            optimizer.step()
            waits.append(type(wrapped.module.first.weight) is GatedParameter)
            schedule.step()

        return {"step": step}

    made = []

    def optimizer_of(parameters):
        optimizer = sgd(parameters)
        if early:
            made.append(PER_STEP[name](optimizer))
        return optimizer

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Seems like `optimizer.step")
        warnings.filterwarnings("error", "Detected call of `lr_scheduler.step")
        worst = compared(Dense, optimizer_of, after=stepping)
    return worst, waits == [False] * STEPS + [True] * STEPS


def scheduler_per_epoch():
    """ReduceLROnPlateau on the loss of an evaluation after each epoch of five steps."""
    trained = []
    for kind in ("ddp", "legato"):
        model = build("Convolutional")
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        x, y = model.batch(torch.Generator().manual_seed(5))
        for epoch in range(4):
            train(wrapped, optimizer, 5, seed=epoch)
            wrapped.eval()
            with torch.inference_mode():
                loss = F.cross_entropy(wrapped(x), y)
            wrapped.train()
            dist.all_reduce(loss)
            schedule.step(loss.item())
        trained.append(wrapped)
    return distance(*trained)


# ---- precision ------------------------------------------------------------------------


def autocast(optimizer_name):
    """The forward pass under autocast; updates, which run inside it, do not."""
    trained = []
    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = Dense()
        wrapped, optimizer = wrap(kind, model, getattr(torch.optim, optimizer_name)(model.parameters(), lr=1e-2))
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(STEPS):
            x, y = model.batch(generator)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(wrapped(x), y)
            loss.backward()
            optimizer.step()
        trained.append(wrapped)
    return distance(*trained)


def scaled(fused=False):
    """fp16 autocast with GradScaler and clipping; now and then the gradients of one rank overflow."""
    trained = []
    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = Dense()
        wrapped, optimizer = wrap(kind, model, torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for i in range(STEPS):
            x, y = model.batch(generator)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(wrapped(x), y)
            if i % 5 == 2 and dist.get_rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if i % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        trained.append((wrapped, scaler.get_scale()))
    (ddp, scale), (ours, same) = trained
    return distance(ddp, ours) if scale == same and scale != 2.0**10 else (scale, same)


def precision(dtype):
    """Parameters and gradients of one dtype, cast before the model is distributed."""
    return compared(lambda: Dense(dtype), adam if dtype == torch.float64 else sgd)


def mixed():
    return compared(Mixed, sgd)


def complex_weights():
    return compared(Complex, sgd)


def not_finite(value):
    """One rank's gradients are NaN or infinite from step 5 on: all ranks get the same weights as under DDP."""
    states = []
    for kind in ("ddp", "legato"):
        model = build("Convolutional")
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
        train(wrapped, optimizer, 5)
        if dist.get_rank() == 1:
            model.head.weight.register_hook(lambda g: torch.full_like(g, value))
        train(wrapped, optimizer, 3)
        states.append([p.detach().clone() for p in wrapped.parameters()])
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*states, strict=True))
    return same and not all(p.isfinite().all() for p in states[1])


# ---- what models do -------------------------------------------------------------------


def reentrant(which):
    return compared(lambda: Reentrant(which), sgd)


def wandering():
    return compared(Wandering, adam, ddp={"find_unused_parameters": True})


def unfrozen():
    """Parameters that are unfrozen, frozen and unfrozen again, against a DDP that is made anew each time."""
    trained = []
    for kind in ("ddp", "legato"):
        model = build("Partial")
        model.never.requires_grad_(False)
        optimizer = adam(model.parameters())
        wrapped, optimizer = wrap(kind, model, optimizer, **({"find_unused_parameters": True} if kind == "ddp" else {}))
        train(wrapped, optimizer, 10)
        for thawed in (model.frozen, model.never, model.body):
            thawed.requires_grad_(True)
            if kind == "ddp":
                wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
            train(wrapped, optimizer, 10, seed=12)
            model.body.requires_grad_(False)
            train(wrapped, optimizer, 5, seed=13)
        trained.append(wrapped)
    return distance(*trained)


def added():
    """A module that is added after the model was distributed takes part, with rank 0's values."""
    trained = []
    for kind in ("ddp", "legato"):
        model = build("Partial")
        optimizer = sgd(model.parameters())
        options = {"find_unused_parameters": True}
        wrapped, optimizer = wrap(kind, model, optimizer, **(options if kind == "ddp" else {}))
        train(wrapped, optimizer, 5)
        torch.manual_seed(100 + dist.get_rank())
        model.frozen = nn.Sequential(model.frozen, nn.Linear(12, 12))
        optimizer.add_param_group({"params": model.frozen[1].parameters(), "lr": 0.02})
        if kind == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model, **options)
        trained.append(train(wrapped, optimizer, 10))
    return distance(*trained)


def compiled(when, backend):
    """`torch.compile` before or after the model is distributed, or in place."""
    trained = []
    for kind in ("ddp", "legato"):
        torch._dynamo.reset()
        torch.manual_seed(7)
        plain = Dense()
        module = torch.compile(plain, backend=backend) if when == "before" else plain
        wrapped, optimizer = wrap(kind, module, sgd(plain.parameters()))
        if when == "in place":
            plain.compile(backend=backend)
        run = torch.compile(wrapped, backend=backend) if when == "after" else wrapped
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(8):
            x, y = plain.batch(generator)
            optimizer.zero_grad()
            F.cross_entropy(run(x), y).backward()
            optimizer.step()
        trained.append(wrapped)
    return distance(*trained)


def compiled_function():
    """A compiled function that takes parameters while they wait for their update."""
    trained = []
    for kind in ("ddp", "legato"):
        torch._dynamo.reset()
        torch.manual_seed(7)
        model = Dense()
        run = torch.compile(lambda x, w: F.gelu(x @ w.T), backend="aot_eager")
        model.forward = lambda x, m=model, f=run: m.third(f(f(x, m.first.weight), m.second.weight))
        wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
        trained.append(train(wrapped, optimizer, 8))
    return distance(*trained)


def own_hooks():
    """Hooks on parameters, modules, and whole backward passes, that look and that change."""
    seen = {"ddp": [], "legato": []}

    def hooked(kind, wrapped, optimizer):
        model, log = wrapped.module, seen[kind]
        model.first.weight.register_hook(lambda g: g * 0.5)
        model.first.register_forward_pre_hook(lambda m, x: (x[0] * 1.01,))
        model.second.register_forward_hook(lambda m, x, y: log.append(m.weight.norm().item()))
        model.second.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.9,))
        model.third.register_full_backward_pre_hook(lambda m, go: (go[0] * 1.1,))
        wrapped.register_forward_hook(lambda m, x, y: log.append(y.sum().item()))

    found = compared(Dense, adam, after=hooked)
    return max(found, apart(*seen.values()))


def late_hooks():
    """Hooks on gradients that are registered last of all, and change what is sent."""

    def hooked(kind, wrapped, optimizer):
        def clamp(p):
            p.grad.clamp_(-0.01, 0.02)

        def scale(p):
            p.grad = p.grad * 1.5

        for p in wrapped.module.parameters():
            p.register_post_accumulate_grad_hook(clamp)
            p.register_post_accumulate_grad_hook(scale)

    return compared(Dense, adam, after=hooked)


def missing_gradient():
    """A custom function that gives None for its gradient, on one rank and on both."""

    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, silent):
            ctx.silent = silent
            return weight.clone()

        @staticmethod
        def backward(ctx, grad):
            return None if ctx.silent else grad, None

    class Model(Dense):
        calls = 0

        def forward(self, x):
            self.calls += 1
            silent = self.calls % 3 == 0 or (self.calls % 3 == 1 and dist.get_rank() == 1)
            return super().forward(F.linear(x, Silent.apply(self.before, silent)))

        def __init__(self):
            super().__init__()
            self.before = nn.Parameter(torch.randn(12, 12) / 4)

    return compared(Model, sgd, ddp={"find_unused_parameters": True})


def local_after_sending():
    """A backward pass that is not sent, after one that was, and before the step: added to the average."""
    trained = []
    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = Dense()
        wrapped, optimizer = wrap(kind, model, sgd(model.parameters()))
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(STEPS):
            (x, y), (u, v) = model.batch(generator), model.batch(generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(x), y)
            with wrapped.no_sync():
                other = F.cross_entropy(wrapped(u), v)
            loss.backward()
            with wrapped.no_sync():
                other.backward()
            optimizer.step()
        trained.append(wrapped)
    return distance(*trained)


def averaged():
    """Averages of the weights over time: of the model, and of the wrapped model."""
    averages = {}
    for kind in ("ddp", "legato"):
        model = build("Convolutional")
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
        swa = torch.optim.swa_utils
        ema = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
        outer = swa.AveragedModel(wrapped, use_buffers=True)
        shadow = copy.deepcopy(wrapped)
        x, _ = model.batch(torch.Generator().manual_seed(3))
        for i in range(6):
            train(wrapped, optimizer, 2, seed=i)
            ema.update_parameters(model)
            outer.update_parameters(wrapped)
        shadow.eval()
        averages[kind] = [*ema.parameters(), *outer.parameters(), *outer.buffers(), shadow(x)]
        assert list(wrapped.state_dict()) == list(shadow.state_dict())
    return max((a - b).abs().max().item() for a, b in zip(*averages.values(), strict=True))


def inference():
    """Evaluation in inference mode right after a step, whose updates are then still to come."""
    trained = []
    for kind in ("ddp", "legato"):
        model = build("Attention")
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
        x, _ = model.batch(torch.Generator().manual_seed(0))
        outputs = []
        for i in range(4):
            train(wrapped, optimizer, 1 + i % 2, seed=i)
            with torch.inference_mode(), torch.random.fork_rng():
                outputs.append(wrapped(x).sum().item())
        trained.append((wrapped, outputs))
    (ddp, expected), (ours, found) = trained
    return max(distance(ddp, ours), apart(expected, found))


def closures():
    """`step(closure)` of an optimizer that is not LBFGS, as Lightning calls it: updates wait all the same."""
    trained, waits = [], []
    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = Dense()
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(STEPS):
            x, y = model.batch(generator)

            def closure(x=x, y=y, wrapped=wrapped, optimizer=optimizer):
                loss = F.cross_entropy(wrapped(x), y)
                optimizer.zero_grad()
                loss.backward()
                return loss

            with torch.no_grad():
                assert optimizer.step(closure) > 0
            waits.append(type(model.third.weight) is GatedParameter)
        trained.append(wrapped)
    return distance(*trained) if waits == [False] * STEPS + [True] * STEPS else waits


# ---- going on after a failure ------------------------------------------------------------


class Failing(Dense):
    """Raises in its forward or its backward pass, on some ranks, in some calls."""

    def __init__(self):
        super().__init__()
        self.fails = None

    def forward(self, x):
        if self.fails == "forward":
            raise MemoryError("no more")
        x = F.gelu(self.second(F.gelu(self.first(x))))
        if self.fails == "backward":

            def fail(grad):
                raise MemoryError("no more")

            x.register_hook(fail)
        return self.third(x)


def skipping(where, ranks):
    """Every third step fails on some ranks, is given up by all, and leaves no trace; against steps left out."""
    trained = []
    for kind in ("ddp", "legato"):
        torch.manual_seed(7)
        model = Failing()
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
        generator = torch.Generator().manual_seed(dist.get_rank())
        for i in range(12):
            x, y = model.batch(generator)
            if i % 3 == 2 and kind == "ddp":
                continue
            model.fails = where if i % 3 == 2 and dist.get_rank() in ranks else None
            optimizer.zero_grad()
            failed = torch.zeros(1)
            try:
                F.cross_entropy(wrapped(x), y).backward()
            except MemoryError:
                failed += 1
            dist.all_reduce(failed)
            if failed:
                wrapped.abandon()
            else:
                optimizer.step()
        trained.append(wrapped)
    return distance(*trained)


# ---- checkpoints --------------------------------------------------------------------------


def first_half(path):
    """Train ten steps under legato and save; rank 0's checkpoint is everybody's."""
    torch.manual_seed(7)
    model = Dense()
    wrapped, optimizer = wrap("legato", model, adam(model.parameters()))
    train(wrapped, optimizer, 10)
    if dist.get_rank() == 0:
        torch.save({"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()


def hooks_after_loading():
    """Hooks on an optimizer that has loaded a state run once a step."""
    model, calls = Dense(), []
    wrapped, optimizer = wrap("legato", model, adam(model.parameters()))
    train(wrapped, optimizer, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(wrapped, optimizer, 3)
    return len(calls)


def second_half(path):
    """Resume on these ranks, under DDP and under legato; the distance of the two."""
    trained = []
    for kind in ("ddp", "legato"):
        model = Dense()
        wrapped, optimizer = wrap(kind, model, adam(model.parameters()), seed=dist.get_world_size())
        state = torch.load(path)
        wrapped.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        trained.append(train(wrapped, optimizer, 10, seed=50))
    return distance(*trained)


def whole_batch(optimizer_name):
    """Distance from one process that trains on all ranks' batches together."""
    n = dist.get_world_size()
    torch.manual_seed(7)
    model, single = Dense(torch.float64), None
    single = copy.deepcopy(model)
    make = {"sgd": sgd, "adam": adam}[optimizer_name]
    wrapped, optimizer = wrap("legato", model, make(model.parameters()))
    alone = make(single.parameters())
    generators = [torch.Generator().manual_seed(r) for r in range(n)]
    for _ in range(STEPS):
        batches = [model.batch(g) for g in generators]
        x, y = batches[dist.get_rank()]
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        alone.zero_grad()
        F.cross_entropy(single(torch.cat([b[0] for b in batches])), torch.cat([b[1] for b in batches])).backward()
        alone.step()
    return distance(model, single)


# ---- what must be refused -------------------------------------------------------------------


def cast_afterwards():
    torch.manual_seed(7)
    model = Dense()
    wrapped, optimizer = wrap("legato", model, sgd(model.parameters()))
    model.bfloat16()
    train(wrapped, optimizer, 1)


def replaced_parameter():
    model = Dense()
    wrapped, optimizer = wrap("legato", model, sgd(model.parameters()))
    model.third = nn.Linear(16, 10, bias=False)
    train(wrapped, optimizer, 1)


def step_inside_the_backward_pass():
    model = Dense()
    wrapped, optimizer = wrap("legato", model, sgd(model.parameters()))
    model.first.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    train(wrapped, optimizer, 1)


def caught_and_not_abandoned(where):
    model = Failing()
    wrapped, _ = wrap("legato", model, sgd(model.parameters()))
    x, y = model.batch(torch.Generator())
    model.fails = where
    try:
        F.cross_entropy(wrapped(x), y).backward()
    except MemoryError:
        wrapped(x)


def synchronized_batch_norm():
    """Torch's own refusal on the CPU, the same under both."""
    texts = []
    for kind in ("ddp", "legato"):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(build("Convolutional"))
        try:
            train(*wrap(kind, model, sgd(model.parameters())), 1)
        except ValueError as error:
            texts.append(str(error))
    raise ValueError(texts[0] if len(set(texts)) == 1 else texts)


def other_settings(what):
    """Rank 1 has another setting of torch, another learning rate, or another optimizer."""
    model = Dense()
    mine = dist.get_rank() == 1
    lr = 0.2 if mine and what == "lr" else 0.1
    optimizer = adam(model.parameters()) if mine and what == "optimizer" else torch.optim.SGD(model.parameters(), lr=lr)
    if mine and what == "dtype":
        model.third.double()
    if mine and what == "frozen":
        model.third.requires_grad_(False)
    if mine and what == "torch":
        torch.use_deterministic_algorithms(True)
    try:
        distribute(model, optimizer, random_plan(Dense(), 0))
    finally:
        torch.use_deterministic_algorithms(False)
