"""On a GPU: capture by events, and the runtime with gloo on CUDA tensors and with NCCL. Skipped where there is none."""

import pytest
import torch
from support import training
from support.automatic import OBSERVED
from support.ranks import Ranks, on_ranks
from support.rows import row
from support.training import OPTIMIZERS, distance, train, trained, under_both, wrap
from torch.nn import functional as F

import legato
from legato.pytorch import attachment, capture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

DEVICE = "cuda"


def build(name):
    """A model of `training` on the GPU, and so its batches."""
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = training.build(name).to(DEVICE)
    batch = model.batch
    model.batch = lambda generator: tuple(t.to(DEVICE) for t in batch(generator))
    return model


@row()
@pytest.mark.parametrize("model", ["Convolutional", "Attention", "Recurrent", "Checkpointed"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adam-fused"])
def test_gloo_on_cuda_tensors(kind, model, optimizer):
    return trained(kind, build(model), optimizer, steps=8)


@under_both
def with_adam(kind, model):
    return trained(kind, build(model), "adam", steps=8)


@pytest.mark.parametrize("model", ["Convolutional", "Attention"])
def test_nccl_on_one_gpu(model):
    ranks = Ranks(1, backend="nccl")
    try:
        assert ranks.run(with_adam, model) == [0.0]
    finally:
        ranks.close()


@pytest.mark.parametrize("model", ["Convolutional", "Attention", "Recurrent", "Checkpointed"])
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


@on_ranks(2)
def test_automatic_plan():
    models = []
    for kind in ("ddp", "auto"):
        model = build("Convolutional")
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        wrapped, optimizer = wrap(kind, model, optimizer) if kind == "ddp" else legato.distribute(model, optimizer)
        models.append(train(wrapped, optimizer, OBSERVED + 1))
    assert distance(*models) == 0.0 and attachment(wrapped).plan.scheduler != "default-buckets"
