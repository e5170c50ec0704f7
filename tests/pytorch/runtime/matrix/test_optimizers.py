"""Optimizers, learning rates, and what an optimizer's state goes through."""

import copy
import inspect
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from support.rows import SHARDED, in_mode, row
from support.strategies import some
from support.training import (
    SHARD,
    STEPS,
    Dense,
    adam,
    build,
    distance,
    first_passes,
    sgd,
    train,
    trained,
    under_both,
    wrap,
)
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional as F
from torch.optim import adam as adam_file

from legato.pytorch import attachment
from legato.pytorch.runtime.attached import deferred
from legato.pytorch.runtime.sharding.shards import ELEMENTWISE
from legato.pytorch.runtime.waiting.gate import GatedParameter
from legato.pytorch.runtime.waiting.readers import WATCHED

# ---- optimizers of torch ---------------------------------------------------------------

#: The base class, one that needs closures (test_runtime.py), and one for sparse gradients only.
OTHERWISE = {"Optimizer", "LBFGS", "SparseAdam"}
ALONE = {kind.__name__ for kind in ELEMENTWISE}
REST = {
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ALONE | OTHERWISE
}


def variants(name):
    """Keyword arguments to try: the defaults, and each switch that the optimizer has."""
    parameters = inspect.signature(getattr(torch.optim, name)).parameters
    base = {"weight_decay": 0.01} if "weight_decay" in parameters else {}
    yield base
    switches = ("foreach", "maximize", "fused", "amsgrad", "nesterov", "centered", "capturable", "differentiable")
    for switch in switches:
        if switch in parameters:
            yield {**base, **({"momentum": 0.9} if switch == "nesterov" else {}), switch: True}
    if "momentum" in parameters:
        yield {**base, "momentum": 0.9}


def outcome(kind, name, options):
    """The trained model, or the error that the optimizer raises with these options."""
    torch.manual_seed(7)
    model = Dense()
    try:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **options)
        wrapped, optimizer = wrap(kind, model, optimizer)
        train(wrapped, optimizer, STEPS)
        waits = type(model.third.weight) is GatedParameter
        wrapped.state_dict()
    except (RuntimeError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    assert kind == "ddp" or waits or "differentiable" in options, f"{name} steps whole"
    return wrapped


def worst_variant(name):
    worst = 0.0
    for options in variants(name):
        ddp, ours = outcome("ddp", name, options), outcome("legato", name, options)
        if SHARD and "differentiable" in options:
            assert ours == f"InputError: optimizer: a differentiable {name} cannot be sharded"
        elif isinstance(ddp, str):
            assert ours == ddp, options
        else:
            assert not isinstance(ours, str), (options, ours)
            worst = max(worst, distance(ddp, ours))
    return worst


@row("four ranks", *SHARDED)
@pytest.mark.parametrize("name", some(sorted(ALONE), ["Adam", "SGD"]))
def test_elementwise_optimizers_in_all_their_variants(name):
    return worst_variant(name)


@row()
@pytest.mark.parametrize("name", sorted(REST))
def test_other_optimizers_in_all_their_variants(name):
    return worst_variant(name)


# ---- several optimizers, several models, and other uses of them ------------------------


@row("views", "four ranks")
@pytest.mark.parametrize("managed", [True, False])
def test_muon_for_the_matrices_and_adam_for_the_rest(kind, managed):
    """Both managed, or one that legato knows nothing of."""
    model = build("Attention")
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    muon, other = torch.optim.Muon(matrices, lr=1e-2), adam(rest)
    wrapped, muon = wrap(kind, model, muon)
    if kind == "legato" and managed:
        attachment(wrapped).manage(other)

    def both(optimizer, i):
        optimizer.step()
        other.step()
        other.zero_grad()

    return train(wrapped, muon, STEPS, step=both)


@row("views", "four ranks")
def test_two_optimizers_with_common_parameters(kind):
    """One zeroes its gradients while the other's updates wait."""
    model = Dense()
    first = torch.optim.SGD([model.first.weight], lr=0.05)
    wrapped, second = wrap(kind, model, sgd(model.parameters()))
    if kind == "legato":
        attachment(wrapped).manage(first)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for i in range(STEPS):
        x, y = model.batch(generator)
        if i % 3 == 0:
            second.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        second.step()
        first.zero_grad()
    return wrapped


@row("views", "four ranks")
def test_one_optimizer_over_two_models(kind):
    models = Dense(), Dense()
    optimizer = adam([p for model in models for p in model.parameters()])
    first, second = (wrap(kind, model, optimizer, seed)[0] for seed, model in enumerate(models))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x, y = models[0].batch(generator)
        optimizer.zero_grad()
        (F.cross_entropy(first(x), y) + F.cross_entropy(second(x), y)).backward()
        optimizer.step()
    return nn.ModuleList([first.module, second.module])


@row("views", "four ranks", *SHARDED)
def test_hyper_parameters_that_are_tensors(kind):
    """Inside a tuple, and changed in place right after `step()`."""
    model = Dense()
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=betas, foreach=False)
    wrapped, optimizer = wrap(kind, model, optimizer)

    def step(optimizer, i):
        optimizer.step()
        betas[0].mul_(0.9)

    return train(wrapped, optimizer, STEPS, step=step)


class Averager:
    def average_parameters(self, params):
        pass


class Odd(nn.Parameter):
    """Not of a class for which torch has kernels that update many parameters."""


@row()
def test_the_kernels_that_torch_chooses_for_all_parameters(kind):
    """With one odd parameter, torch updates each by itself; on a GPU, its kernels for many have other last bits."""
    model = build("Attention")
    model.norm.weight = Odd(model.norm.weight.detach())
    chosen, choose = set(), adam_file._default_to_fused_or_foreach

    def choice(*arguments, **options):
        fused, foreach = choose(*arguments, **options)
        chosen.add(foreach)
        return fused, foreach

    with (
        patch.object(adam_file, "_default_to_fused_or_foreach", choice),
        patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", lambda: ["cpu"]),
    ):
        return trained(kind, model, "adam"), [torch.tensor(sorted(chosen))]


@row("views", "four ranks")
def test_an_optimizer_that_was_never_initialized(kind):
    """`PostLocalSGDOptimizer` does not call `Optimizer.__init__`."""
    return trained(kind, Dense(), lambda parameters: PostLocalSGDOptimizer(adam(parameters), Averager()))


@row("views", "four ranks", *SHARDED)
def test_closures(kind):
    """`step(closure)` of an optimizer that is not LBFGS, as Lightning calls it: updates wait all the same."""
    model, waits = Dense(), []
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x, y = model.batch(generator)

        def closure(x=x, y=y):
            loss = F.cross_entropy(wrapped(x), y)
            optimizer.zero_grad()
            loss.backward()
            return loss

        with torch.no_grad():
            assert optimizer.step(closure) > 0
        waits.append(type(model.third.weight) is GatedParameter)
    assert waits == [kind == "legato" and i >= WATCHED - 1 for i in range(STEPS)]
    return wrapped


@on_ranks(2)
def test_step_returns_the_loss_of_its_closure_in_ddps_passes_too():
    """Also after `detach()`, when it looks at no parameters any more."""
    model = Dense()
    with first_passes(2):
        wrapped, optimizer = wrap("legato", model, adam(model.parameters()))

    def closure():
        loss = wrapped(torch.ones(1, 12)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    attachment(wrapped).detach()
    with patch.object(deferred, "_depends_on_others") as looks:
        assert optimizer.step(closure) > 0
    assert not looks.called


@row("views", "four ranks")
def test_a_hook_on_the_step_sees_the_new_weights(kind):
    model, seen = Dense(), []
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    optimizer.register_step_post_hook(lambda *_: seen.append(model.first.weight.sum()))
    return train(wrapped, optimizer, STEPS), seen


@on_ranks(2)
def test_hooks_on_an_optimizer_that_loaded_a_state_run_once():
    model, calls = Dense(), []
    wrapped, optimizer = wrap("legato", model, adam(model.parameters()))
    train(wrapped, optimizer, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(wrapped, optimizer, 3)
    assert len(calls) == 3


# ---- learning rates --------------------------------------------------------------------

schedulers = torch.optim.lr_scheduler
PER_STEP = {
    "StepLR": lambda o: schedulers.StepLR(o, 3, 0.5),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-3, 0.1, step_size_up=4),
    "Cosine": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5),
    "Sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.9)], [4]
    ),
}


@row()
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("name", sorted(PER_STEP))
def test_schedulers_per_step(kind, name, early):
    """A scheduler that is made before or after the model is distributed; updates wait in both cases."""
    model, waits = Dense(), []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Seems like `optimizer.step")
        warnings.filterwarnings("error", "Detected call of `lr_scheduler.step")
        optimizer = sgd(model.parameters())
        schedule = PER_STEP[name](optimizer) if early else None
        wrapped, optimizer = wrap(kind, model, optimizer)
        schedule = schedule or PER_STEP[name](optimizer)

        def step(optimizer, i):
            optimizer.step()
            waits.append(type(model.first.weight) is GatedParameter)
            schedule.step()

        train(wrapped, optimizer, STEPS, step=step)
    assert waits == [kind == "legato" and i >= WATCHED - 1 for i in range(STEPS)]
    return wrapped


@row("views", "four ranks", *SHARDED)
def test_a_scheduler_per_epoch(kind):
    """ReduceLROnPlateau on the loss of an evaluation after each epoch of five steps."""
    model = build("Convolutional")
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    schedule = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
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


# ---- other numbers of ranks ------------------------------------------------------------


def save(path):
    """Train ten steps under legato; rank 0's checkpoint is everybody's."""
    torch.manual_seed(7)
    model = Dense()
    wrapped, optimizer = wrap("legato", model, adam(model.parameters()))
    train(wrapped, optimizer, 10)
    state = {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


@under_both
def resumed(kind, path):
    model = Dense()
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()), seed=dist.get_world_size())
    state = torch.load(path)
    wrapped.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return train(wrapped, optimizer, 10, seed=50)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saving", "on_two", "on_three"),
    [((), [()], ()), (["sharded optimizer"], [(), ["sharded gradients"]], ["sharded optimizer"])],
    ids=["plain", "sharded"],
)
def test_resuming_on_another_number_of_ranks(two_ranks, three_ranks, tmp_path, saving, on_two, on_three):
    path = str(tmp_path / "checkpoint.pt")
    two_ranks.run(in_mode, saving, save, path)
    for mode in on_two:
        assert two_ranks.run(in_mode, mode, resumed, path) == [0.0, 0.0]
    assert max(three_ranks.run(in_mode, on_three, resumed, path)) < 1e-5


@on_ranks(3)
@pytest.mark.parametrize("optimizer_of", [sgd, adam])
def test_one_process_on_the_whole_batch(optimizer_of):
    """The weights of one process that trains on the batches of all ranks."""
    torch.manual_seed(7)
    model = Dense(torch.float64)
    single = copy.deepcopy(model)
    wrapped, optimizer = wrap("legato", model, optimizer_of(model.parameters()))
    alone = optimizer_of(single.parameters())
    generators = [torch.Generator().manual_seed(rank) for rank in range(dist.get_world_size())]
    for _ in range(STEPS):
        batches = [model.batch(generator) for generator in generators]
        x, y = batches[dist.get_rank()]
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        alone.zero_grad()
        F.cross_entropy(single(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])).backward()
        alone.step()
    assert distance(model, single) < 1e-9
