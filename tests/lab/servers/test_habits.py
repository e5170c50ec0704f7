"""Training scripts that touch gradients, parameters or the optimizer: DDP's weights, or one clear line.

Two workers: the servers' sums are DDP's bit for bit (`test_servers.py`), so all else must be, too.
"""

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks, gathered, on_ranks
from support.serving import SHORT_S, Net, backward, batch, build, distance, from_ddp, loop, serve, values
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from legato.core.errors import LegatoError

pytestmark = pytest.mark.slow

# ---- habits that give DDP's weights --------------------------------------------------


def between(model, optimizer, parts, part, touch, steps=5):
    """A loop that calls `touch(model, step)` between the backward pass and the step."""
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step, parts, part)
        touch(model, step)
        optimizer.step()


def clips_the_norm(model, optimizer, parts, part):
    def touch(model, step):
        nn.utils.clip_grad_norm_(model.parameters(), 1e9 if step == 2 else 0.1)

    between(model, optimizer, parts, part, touch)


def clips_values(model, optimizer, parts, part):
    between(model, optimizer, parts, part, lambda model, step: nn.utils.clip_grad_value_(model.parameters(), 0.01))


def edits_gradients(model, optimizer, parts, part):
    def touch(model, step):
        net = model.module
        net.conv.bias.grad = None
        net.conv.weight.grad = torch.full_like(net.conv.weight, 0.01 * step)
        net.out.weight.grad.data.mul_(0.5)
        if net.sometimes.weight.grad is None:
            net.sometimes.weight.grad = torch.ones_like(net.sometimes.weight)

    between(model, optimizer, parts, part, touch)


def logs_on_one_worker(model, optimizer, parts, part):
    def touch(model, step):
        if part == 0:
            assert all(p.grad is None or p.grad.norm() >= 0 for p in model.parameters())

    between(model, optimizer, parts, part, touch)


def scales(model, optimizer, parts, part):
    """Steps 1 and 3 have an infinite gradient on one worker, so that none may step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        optimizer.zero_grad()
        images, labels = batch(step, part, parts)
        loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss * (float("inf") if step in (1, 3) and part == 1 else 1.0)).backward()
        if step == 4:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def keeps_the_memory(model, optimizer, parts, part):
    """What reads a parameter past its gate sees the new value at once: kept memory, and a module of its own."""
    kept = [p.data for p in model.module.out.parameters()]
    x = torch.ones(2, model.module.out.in_features)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step, parts, part)
        optimizer.step()
        seen = [k.clone() for k in kept]
        with torch.no_grad():
            answer = torch.func.functional_call(model.module.out, dict(model.module.out.named_parameters()), x)
            assert all(torch.equal(a, p) for a, p in zip(seen, model.module.out.parameters(), strict=True))
            assert torch.equal(answer, F.linear(x, *seen))


def drops_gradients(model, optimizer, parts, part):
    for step in range(6):
        backward(model, step, parts, part)
        if step % 3:
            optimizer.step()
        (optimizer if step % 2 else model).zero_grad()
    backward(model, 7, parts, part)  # is never used


def keeps_gradients(model, optimizer, parts, part):
    """No `zero_grad()` at all, and clipping of what has added up."""
    for step in range(4):
        backward(model, step, parts, part)
        if step == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def zeroes_without_none(model, optimizer, parts, part):
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        backward(model, step, parts, part)
        optimizer.step()


def freezes(model, optimizer, parts, part):
    for step in range(4):
        model.module.conv.requires_grad_(step < 2)
        optimizer.zero_grad()
        backward(model, step, parts, part)
        optimizer.step()


def uses_a_closure(model, optimizer, parts, part):
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            backward(model, step, parts, part)

        optimizer.step(closure)


class Odd(Net):
    """A frozen layer, a weight that is used twice, and layers that are computed anew in the backward pass."""

    reentrant = False

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.sometimes.weight = self.out.weight = nn.Parameter(torch.randn(8, 8) / 8)
        self.out.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return super().forward(x)[:, :5] + checkpoint(self.again, x, use_reentrant=self.reentrant)

    def again(self, x):
        return self.frozen(self.conv(x).flatten(2).mean(2))[:, :5]


class Reentrant(nn.Module):
    """Whose first gradients come from a backward pass inside the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(75, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return checkpoint(lambda x: self.last(self.second(x).relu()), x, use_reentrant=True)


@on_ranks(4)
@pytest.mark.parametrize(
    "habit",
    [
        clips_the_norm, clips_values, edits_gradients, logs_on_one_worker, scales, drops_gradients,
        zeroes_without_none, freezes, uses_a_closure, keeps_the_memory,
    ],
)  # fmt: skip
def test_weights_are_those_of_ddp(habit):
    assert from_ddp(run=habit) == 0.0


@on_ranks(4)
@pytest.mark.parametrize("habit", [clips_the_norm, edits_gradients])
def test_weights_are_those_of_ddp_where_parameters_are_cut(habit):
    assert from_ddp(run=habit, placement="equal") == 0.0


@on_ranks(4)
@pytest.mark.parametrize(("make", "habit"), [(Odd, loop), (Odd, clips_values), (Reentrant, loop)])
def test_weights_of_odd_models_are_those_of_ddp(make, habit):
    assert from_ddp(run=habit, make=make, find_unused_parameters=make is Odd) == 0.0


def made_with_a_scheduler(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return optimizer


def schedules(model, optimizer, parts, part):
    for _ in range(3):
        loop(model, optimizer, parts, part, steps=2)
        optimizer.scheduler.step()


@on_ranks(4)
def test_a_scheduler_that_was_made_before():
    assert from_ddp(made_with_a_scheduler, schedules) == 0.0


@on_ranks(4)
def test_gradients_add_up_over_steps_where_nobody_zeroes_them():
    """Sums of averages, and averages of sums, are rounded differently."""
    assert from_ddp(run=keeps_gradients) <= 1e-6


@on_ranks(4)
def test_a_worker_alone_clips_as_one_process():
    def train(model, optimizer):
        clips_the_norm(model, optimizer, 1, 0)
        return values(model)

    ours = serve(*build(), train, servers=3)
    if dist.get_rank() == 0:
        model, optimizer = build()
        assert distance(train(model, optimizer), ours) == 0.0


@on_ranks(4)
def test_gradients_are_averages_where_they_are_read():
    def train(model, optimizer):
        backward(model, 0, model.workers, model.worker)
        found = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        return found

    first, *others, _ = gathered(serve(*build(), train))
    assert len(others) == 2 and all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@on_ranks(4)
def test_the_optimizer_has_its_state_when_training_is_over():
    model, optimizer = build("adamw")
    serve(model, optimizer, loop)
    if dist.get_rank() < 3:
        steps = [3 if name.startswith("sometimes") else 5 for name, _ in model.named_parameters()]
        assert type(optimizer) is torch.optim.AdamW
        state = optimizer.state_dict()["state"]
        assert {i: int(s["step"]) for i, s in state.items()} == dict(enumerate(steps))


# ---- what is refused -----------------------------------------------------------------


def changes_what_was_sent(model, optimizer):
    def double(parameter):
        parameter.grad.mul_(2.0)

    model.module.out.weight.register_post_accumulate_grad_hook(double)
    loop(model, optimizer)


def changes_kept_gradients(model, optimizer):
    gradients = []
    for step in range(2):
        optimizer.zero_grad(set_to_none=False)
        backward(model, step)
        for gradient in gradients:
            gradient.mul_(0.5)
        optimizer.step()
        model.flush()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]


def changes_weights(model, optimizer):
    for step in range(8):
        loop(model, optimizer, steps=1, first=step)
        if step == 6:
            with torch.no_grad():
                model.module.conv.weight.mul_(0.5)


def changes_weights_unseen(model, optimizer):
    for step in range(3):
        loop(model, optimizer, steps=1, first=step)
        model.module.conv.weight.data.clamp_(-0.01, 0.01)


def changes_weights_before_the_step(model, optimizer):
    def touch(model, step):
        with torch.no_grad():
            model.module.out.bias.add_(1.0)

    between(model, optimizer, 1, 0, touch)


def loads_weights(model, optimizer):
    other = Net()
    model.module.load_state_dict(other.state_dict())
    loop(model, optimizer)


def replaces_a_layer(model, optimizer):
    loop(model, optimizer, steps=1)
    model.module.out = nn.Linear(8, 5)
    loop(model, optimizer, steps=1)


def clears_the_state(model, optimizer):
    loop(model, optimizer, steps=1)
    optimizer.state.clear()


def hooks_the_step(model, optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)
    loop(model, optimizer)


def runs_two_backward_passes(model, optimizer):
    backward(model, 0)
    backward(model, 1)


def breaks_a_backward_pass(model, optimizer):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("broken")

    images, labels = batch(0)
    out = model.module.out
    model.module.out = nn.Identity()
    features = Broken.apply(model.module(images))
    model.module.out = out
    try:
        F.cross_entropy(out(features), labels).backward()
    except ValueError:
        loop(model, optimizer)


def scales_a_fused_optimizer(model, optimizer):
    optimizer.grad_scale = torch.ones(1)
    loop(model, optimizer)


def drops_on_one_worker(model, optimizer):
    backward(model, 0)
    (optimizer.step if model.worker else optimizer.zero_grad)()
    loop(model, optimizer)


def clips_on_one_worker(model, optimizer):
    backward(model, 0)
    if model.worker:
        nn.utils.clip_grad_value_(model.parameters(), 1e-6)
    optimizer.step()
    model.flush()


def refused(case, **options):
    """Workers do `case`, and end in good order if it fails."""
    failed = []

    def train(model, optimizer):
        try:
            case(model, optimizer)
        except Exception as error:
            failed.append(error)

    try:
        serve(*build(), train, **options)
    finally:
        for error in failed:
            raise error


def refused_soon(case):
    refused(case, patience_s=SHORT_S)


@pytest.fixture(scope="module")
def three_ranks():
    ranks = Ranks(3)
    yield ranks
    ranks.close(force=True)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (changes_what_was_sent, "the gradient of 'out.weight' was changed after it went to the servers"),
        (changes_kept_gradients, "was changed after it went to the servers"),
        (changes_weights, "parameter 'conv.weight' was changed on this worker, but the servers hold it"),
        (changes_weights_unseen, "parameter 'conv.weight' was changed on this worker, but the servers hold it"),
        (changes_weights_before_the_step, "parameter 'out.bias' was changed on this worker, but the servers hold it"),
        (loads_weights, "was changed on this worker, but the servers hold it"),
        (replaces_a_layer, "the model has other parameters now, which the servers do not know"),
        (clears_the_state, "InputError: the optimizer's state is on the servers"),
        (hooks_the_step, "InputError: the optimizer has hooks on its step"),
        (runs_two_backward_passes, "a backward pass began before the gradients of the previous one were used"),
        (scales_a_fused_optimizer, "InputError: GradScaler lets a fused optimizer scale its gradients"),
    ],
)
def test_what_the_servers_could_not_follow_is_refused(three_ranks, case, expected):
    texts = [text for ok, text in three_ranks.outcomes(refused, case) if not ok]
    assert any(expected in text.splitlines()[0] for text in texts), texts


#: What is refused where the other ranks are waited for until patience ends.
AWAITED = {
    breaks_a_backward_pass: "the last backward pass did not finish",
    drops_on_one_worker: "rank 1 (worker 1): optimizer.step() after the backward pass, but zero_grad() on rank 0",
    clips_on_one_worker: "rank 1 (worker 1): changed other gradients before optimizer.step() than rank 0",
}


@pytest.fixture(scope="module")
def awaited():
    """Their outcomes, by case; all wait at once."""
    trainings = {case: Ranks(3) for case in AWAITED}
    try:
        for case, ranks in trainings.items():
            ranks.begin(refused_soon, case)
        yield {case: [ranks.answer(rank, case.__name__) for rank in range(3)] for case, ranks in trainings.items()}
    finally:
        for ranks in trainings.values():
            ranks.close(force=True)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "expected"), AWAITED.items())
def test_what_the_servers_could_not_follow_is_refused_though_nobody_answers(awaited, case, expected):
    texts = [text for ok, text in awaited[case] if not ok]
    assert any(expected in text.splitlines()[0] for text in texts), texts


@on_ranks(4)
def test_a_checkpoint_that_one_rank_alone_has_loaded_is_noticed():
    model, optimizer = build()
    if dist.get_rank() == 1:
        loop(model, optimizer, steps=1)
    with pytest.raises(LegatoError, match=r"rank 1: optimizer's state: state.*load the same checkpoint on every rank"):
        serve(model, optimizer, loop)
