"""Rows of the equality matrix: optimizers, learning rates, precision. Everything here runs on the ranks."""

import inspect
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from legato.pytorch import attachment
from legato.pytorch.runtime.waiting.gate import GatedParameter
from legato.pytorch.runtime.waiting.readers import WATCHED
from support.matrix_rows import STEPS, Dense, adam, compared, sgd
from support.training import build, distance, train, under_both, wrap


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


# ---- optimizers ------------------------------------------------------------------------

#: Every optimizer of torch.optim; those that cannot be compared on dense gradients with `step()` say why.
OTHERWISE = {
    "Optimizer": "the base class",
    "LBFGS": "equality_lbfgs",
    "SparseAdam": "sparse gradients only",
}
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
                attachment(wrapped).manage(other)

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
    return worst, waits == [False] * (STEPS + WATCHED - 1) + [True] * (STEPS - WATCHED + 1)


@under_both
def scheduler_per_epoch(kind):
    """ReduceLROnPlateau on the loss of an evaluation after each epoch of five steps."""
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
    return wrapped


# ---- precision ------------------------------------------------------------------------


@under_both
def autocast(kind, optimizer_name):
    """The forward pass under autocast; updates, which run inside it, do not."""
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
    return wrapped


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
