"""On an accelerator: streams, capture by events, and the runtime over the accelerator's backend.

On a GPU where there is one, over gloo on CUDA tensors and over NCCL; else on the late device (`support.late`), whose
races fail a row, too.
"""

from contextlib import nullcontext

import msgspec
import pytest
import torch
from support import late, training
from support.automatic import OBSERVED
from support.command import run
from support.ranks import Ranks, on_ranks
from support.rows import AUTO, SHARDED, row
from support.training import OPTIMIZERS, Dense, adam, distance, random_plan, train, trained, under_both, wrap
from torch.nn import functional as F

import legato
from legato.core import files
from legato.core.workload import Op, Tensor, Workload
from legato.pytorch import attachment, capture
from legato.schedule import SCHEDULERS

#: The late device has no kernel of an LSTM.
MODELS = ["Convolutional", "Attention", "Checkpointed", *(["Recurrent"] if torch.cuda.is_available() else [])]
CUDA = torch.cuda.is_available()
DEVICE, BACKEND = ("cuda", "gloo") if CUDA else ("late", "late")
pytestmark = pytest.mark.skipif(not (CUDA or late.can_be_built()), reason="no GPU, and no compiler for the late device")


def build(name):
    """A model of `training` on the GPU, and so its batches."""
    if CUDA:
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)
    model = training.build(name).to(DEVICE)
    batch = model.batch
    model.batch = lambda generator: tuple(t.to(DEVICE) for t in batch(generator))
    return model


@row()
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "optimizer", ["adam", *(pytest.param(o, marks=pytest.mark.slow) for o in ("momentum", "adam-fused"))]
)
def test_models_and_optimizers(kind, model, optimizer):
    return trained(kind, build(model), optimizer, steps=8)


def current_stream():
    return torch.accelerator.current_stream()


def slowly():
    """Let what the device does next be late, by about a millisecond of a GPU."""
    if CUDA:
        torch.cuda._sleep(2_000_000)


class Branched(Dense):
    """A layer runs on a stream of its own, next to others."""

    def __init__(self):
        super().__init__()
        self.side = torch.nn.Linear(16, 16)
        self.stream = torch.Stream(DEVICE)

    def forward(self, x):
        main, x = current_stream(), self.first(x)
        self.stream.wait_stream(main)
        y = self.second(F.gelu(x))
        with self.stream:
            z = self.side(x)
        main.wait_stream(self.stream)
        return self.third(F.gelu(y + z))


@row(*SHARDED, *AUTO)
@pytest.mark.parametrize("on_side", ["average", "copies", "branch", "step", "passes", "batches"])
def test_streams(kind, on_side):
    """What runs on a stream of its own, and waits for the other one as CUDA wants it, reads what it reads under DDP."""
    torch.manual_seed(7)
    model = (Branched() if on_side == "branch" else Dense()).to(DEVICE)
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    side, main = torch.Stream(DEVICE), current_stream()
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    averages = [torch.zeros_like(p) for p in model.parameters()]
    copies = [torch.zeros(p.shape, pin_memory=True) for p in model.parameters()]
    found = []

    def on(*cases):
        if on_side not in cases:
            return nullcontext()
        side.wait_stream(main)
        return side

    for step in range(12):
        with on("batches"):
            x, y = (t.pin_memory().to(DEVICE, non_blocking=True) for t in model.batch(generator))
        main.wait_stream(side)
        with on("passes"):
            optimizer.zero_grad()
            slowly()
            F.cross_entropy(wrapped(x), y).backward()
        main.wait_stream(side)
        with on("passes", "step"):
            slowly()
            optimizer.step()
        main.wait_stream(side)
        if on_side in ("average", "copies"):
            with torch.no_grad(), on("average", "copies"):
                slowly()
                for p, average, copy in zip(model.parameters(), averages, copies, strict=True):
                    average.lerp_(p, 0.1) if on_side == "average" else copy.copy_(p, non_blocking=True)
            if step % 3 == 2:
                side.synchronize()
                found += [copy.clone() for copy in copies]
    torch.accelerator.synchronize()
    return model, averages + found


@row(*AUTO)
def test_gradients_read_on_a_side_stream(kind):
    torch.manual_seed(7)
    model = Dense().to(DEVICE)
    wrapped, optimizer = wrap(kind, model, adam(model.parameters()))
    side, main = torch.Stream(DEVICE), current_stream()
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    norms = []
    for _ in range(12):
        x, y = (t.to(DEVICE) for t in model.batch(generator))
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        side.wait_stream(main)
        with side:
            slowly()
            norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
        main.wait_stream(side)
        for p in model.parameters():
            p.grad.mul_(1 / (1 + norms[-1]))
        optimizer.step()
    torch.accelerator.synchronize()
    return model, norms


@under_both
def with_adam(kind, model):
    return trained(kind, build(model), "adam", steps=8)


def with_rings(name):
    model = build(name)
    plan = random_plan(model, 0)
    rings = tuple(msgspec.structs.replace(message, collective="ring", depth=2) for message in plan.messages)
    wrapped, optimizer = legato.distribute(
        model, adam(model.parameters()), msgspec.structs.replace(plan, messages=rings)
    )
    return distance(train(wrapped, optimizer, 8), trained("ddp", build(name), adam, steps=8))


@pytest.mark.parametrize("model", ["Convolutional", "Attention"])
def test_a_backend_that_queues_on_the_device(model):
    ranks = Ranks(*((1, "nccl") if CUDA else (2, "late")))
    try:
        assert set(ranks.run(with_adam, model)) == set(ranks.run(with_rings, model)) == {0.0}
    finally:
        ranks.close()


def planned(path):
    """How far the weights of a training by a planned file are from those of DDP."""
    model = build("Convolutional")
    wrapped, optimizer = legato.distribute(model, adam(model.parameters()), path)
    return distance(train(wrapped, optimizer, 4), trained("ddp", build("Convolutional"), adam, steps=4))


@pytest.mark.parametrize("shard", [pytest.param("none", marks=pytest.mark.slow), "optimizer"])
def test_plans_of_the_command_line_run_on_any_backend(ranks_of, tmp_path, capsys, shard):
    sizes = {name: p.nbytes for name, p in training.build("Convolutional").named_parameters()}
    phases = [(f"{phase} {name}", phase) for phase in ("forward", "backward") for name in sizes]
    ops = tuple(Op(name, phase, 1e-4, (i - 1,) if i else ()) for i, (name, phase) in enumerate(phases))
    tensors = (Tensor(name, size, len(ops) - 1 - i, (i,)) for i, (name, size) in enumerate(sizes.items()))
    files.write(tmp_path / "w.json", Workload("w", ops, tuple(reversed([*tensors]))))
    for scheduler in SCHEDULERS if shard == "none" else ["legato", "ddp"]:
        path = tmp_path / f"{scheduler}.json"
        options = ("--scheduler", scheduler, "--shard", shard, "--workers", 2, "--bandwidth", "1Gbit", "-o", path)
        code, _, err = run(capsys, "plan", tmp_path / "w.json", *options)
        if "only be simulated" not in err:
            assert code == 0 and ranks_of(2).run(planned, str(path)) == [0.0, 0.0]


@on_ranks(1)
@pytest.mark.filterwarnings("ignore:.*determinis")
@pytest.mark.parametrize("model", MODELS)
def test_capture_by_events(model):
    model = build(model)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    random = torch.Generator().manual_seed(0)

    def loss():
        x, y = model.batch(random)
        return F.cross_entropy(model(x), y)

    order = []
    hooks = [p.register_post_accumulate_grad_hook(lambda _, n=n: order.append(n)) for n, p in model.named_parameters()]
    loss().backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    workload = capture(model, optimizer, loss)
    assert [t.name for t in workload.tensors] == order
    assert workload.compute_s == pytest.approx(workload.untraced_s, rel=1e-6)


@pytest.mark.slow
@on_ranks(2)
def test_automatic_plan():
    models = []
    for kind in ("ddp", "auto"):
        model = build("Convolutional")
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        wrapped, optimizer = wrap(kind, model, optimizer) if kind == "ddp" else legato.distribute(model, optimizer)
        models.append(train(wrapped, optimizer, OBSERVED + 1))
    assert distance(*models) == 0.0 and attachment(wrapped).plan.scheduler != "default-buckets"
