"""What real ranks do in the tests of training scripts that touch gradients, parameters or the optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from legato.pytorch.servers import parameter_servers
from support.serving import PATIENCE_S, Net, batch, build, distance, loop, values


def backward(model, step, part, parts):
    images, labels = batch(step, part, parts)
    F.cross_entropy(model(images), labels).backward()


def between(model, optimizer, parts, part, touch, steps=5):
    """A loop that calls `touch(model, step)` between the backward pass and the step."""
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step, part, parts)
        touch(model, step)
        optimizer.step()


# ---- habits that must give DDP's weights: f(model, optimizer, workers, worker) --------------


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
        backward(model, step, part, parts)
        optimizer.step()
        seen = [k.clone() for k in kept]
        with torch.no_grad():
            answer = torch.func.functional_call(model.module.out, dict(model.module.out.named_parameters()), x)
            assert all(torch.equal(a, p) for a, p in zip(seen, model.module.out.parameters(), strict=True))
            assert torch.equal(answer, F.linear(x, *seen))


def drops_gradients(model, optimizer, parts, part):
    for step in range(6):
        backward(model, step, part, parts)
        if step % 3:
            optimizer.step()
        (optimizer if step % 2 else model).zero_grad()
    backward(model, 7, part, parts)  # is never used


def keeps_gradients(model, optimizer, parts, part):
    """No `zero_grad()` at all, and clipping of what has added up."""
    for step in range(4):
        backward(model, step, part, parts)
        if step == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def zeroes_without_none(model, optimizer, parts, part):
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        backward(model, step, part, parts)
        optimizer.step()


def freezes(model, optimizer, parts, part):
    for step in range(4):
        model.module.conv.requires_grad_(step < 2)
        optimizer.zero_grad()
        backward(model, step, part, parts)
        optimizer.step()


def uses_a_closure(model, optimizer, parts, part):
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            backward(model, step, part, parts)

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


def against_ddp(habit, kind="Net", placement="round-robin", scheduled=False):
    """Largest difference of two workers on two servers from DDP; 0.0 on servers."""
    make, habit = globals()[kind], globals()[habit]
    group = dist.new_group(range(2))

    def training():
        torch.manual_seed(7)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduled else None
        return model, optimizer, scheduler

    def run(model, optimizer, part, scheduler):
        for _ in range(2 if scheduled else 1):
            habit(model, optimizer, 2, part)
            if scheduler is not None:
                scheduler.step()
        return values(model)

    theirs = None
    if dist.get_rank() < 2:
        model, optimizer, scheduler = training()
        wrapped = nn.parallel.DistributedDataParallel(
            model, process_group=group, find_unused_parameters=kind != "Reentrant", broadcast_buffers=False
        )
        theirs = run(wrapped, optimizer, dist.get_rank(), scheduler)
    model, optimizer, scheduler = training()
    ours = parameter_servers(
        model, optimizer, lambda m, o: run(m, o, m.worker, scheduler), servers=2, placement=placement
    )
    return 0.0 if ours is None else distance(theirs, ours)


def plain(model, optimizer, parts, part):
    loop(model, optimizer, parts, part)


def one_worker_clips():
    """One worker and three servers: the difference from a process that clips by itself."""
    ours = None

    def train(model, optimizer):
        clips_the_norm(model, optimizer, 1, 0)
        return values(model)

    ours = parameter_servers(*build(), train, servers=dist.get_world_size() - 1)
    if ours is None:
        return 0.0
    model, optimizer = build()
    clips_the_norm(model, optimizer, 1, 0)
    return distance(values(model), ours)


def averages_seen():
    """On workers: whether `.grad` is one and the same everywhere between backward and step."""

    def train(model, optimizer):
        backward(model, 0, model.worker, model.workers)
        found = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        return found

    return parameter_servers(*build(), train, servers=1)


def state_afterwards():
    """Whether the optimizer of a worker has the whole state when training is over."""
    model, optimizer = build("adamw")
    parameter_servers(model, optimizer, loop, servers=1)
    if dist.get_rank() == dist.get_world_size() - 1:
        return True
    state = optimizer.state_dict()["state"]
    steps = [3 if name.startswith("sometimes") else 5 for name, _ in model.named_parameters()]
    return type(optimizer) is torch.optim.AdamW and {i: int(s["step"]) for i, s in state.items()} == dict(
        enumerate(steps)
    )


# ---- what is refused ------------------------------------------------------------------


def _after_it_was_sent(model, optimizer):
    def double(parameter):
        parameter.grad.mul_(2.0)

    model.module.out.weight.register_post_accumulate_grad_hook(double)
    loop(model, optimizer)


def _from_a_reference(model, optimizer):
    gradients = []
    for step in range(2):
        optimizer.zero_grad(set_to_none=False)
        backward(model, step, 0, 1)
        for gradient in gradients:
            gradient.mul_(0.5)
        optimizer.step()
        model.flush()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]


def _weights(model, optimizer):
    for step in range(8):
        loop(model, optimizer, steps=1, first=step)
        if step == 6:
            with torch.no_grad():
                model.module.conv.weight.mul_(0.5)


def _weights_unseen(model, optimizer):
    for step in range(3):
        loop(model, optimizer, steps=1, first=step)
        model.module.conv.weight.data.clamp_(-0.01, 0.01)


def _weights_before_step(model, optimizer):
    def touch(model, step):
        with torch.no_grad():
            model.module.out.bias.add_(1.0)

    between(model, optimizer, 1, 0, touch)


def _a_checkpoint(model, optimizer):
    other = Net()
    model.module.load_state_dict(other.state_dict())
    loop(model, optimizer)


def _another_layer(model, optimizer):
    loop(model, optimizer, steps=1)
    model.module.out = nn.Linear(8, 5)
    loop(model, optimizer, steps=1)


def _state(model, optimizer):
    loop(model, optimizer, steps=1)
    optimizer.state.clear()


def _hooks(model, optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)
    loop(model, optimizer)


def _two_backward_passes(model, optimizer):
    backward(model, 0, 0, 1)
    backward(model, 1, 0, 1)


def _half_a_backward_pass(model, optimizer):
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


def _fused_and_scaled(model, optimizer):
    optimizer.grad_scale = torch.ones(1)
    loop(model, optimizer)


def _one_drops(model, optimizer):
    backward(model, 0, 0, 1)
    (optimizer.step if model.worker else optimizer.zero_grad)()
    loop(model, optimizer)


def _one_clips(model, optimizer):
    backward(model, 0, 0, 1)
    if model.worker:
        nn.utils.clip_grad_value_(model.parameters(), 1e-6)
    optimizer.step()
    model.flush()


def refused(case):
    """Workers do `case`, and end in good order if it fails."""
    failed = []

    def train(model, optimizer):
        try:
            globals()[case](model, optimizer)
        except Exception as error:
            failed.append(error)

    try:
        parameter_servers(*build(), train, servers=1, patience_s=PATIENCE_S)
    finally:
        for error in failed:
            raise error


def other_state():
    """One rank alone has loaded a checkpoint."""
    model, optimizer = build()
    if dist.get_rank() == 1:
        loop(model, optimizer, steps=1)
    parameter_servers(model, optimizer, loop, servers=1, patience_s=PATIENCE_S)
