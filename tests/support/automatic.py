"""Training under `plan="auto"`; everything here runs on the ranks."""

import torch
from torch.nn import functional as F

import legato
import legato.auto
from legato.core.errors import CaptureError
from support.training import OPTIMIZERS, build, distance, train, wrap


def automatic(model_name, steps=14):
    """Weights under plan="auto" against DDP's, and what the plan became."""
    trained = []
    for kind in ("ddp", "auto"):
        model = build(model_name)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        if kind == "ddp":
            wrapped, optimizer = wrap("ddp", model, optimizer)
        else:
            wrapped, optimizer = legato.distribute(model, optimizer)
            before = wrapped.plan.scheduler
        trained.append(train(wrapped, optimizer, steps))
    hooks = len(wrapped._forward_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return distance(*trained), before, wrapped.plan.scheduler, hooks


def automatic_with_changing_steps():
    """Steps that differ from one another cannot be planned for: the buckets stay, and so do the weights."""
    trained = []
    for kind in ("ddp", "auto"):
        model = build("Checkpointed")
        plain = model.forward
        calls = [0]

        def changing(x, plain=plain, calls=calls):
            calls[0] += 1
            return plain(x) if calls[0] % 3 else plain(x) + torch.sin(x[:, :10])

        model.forward = changing
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        wrapped, optimizer = wrap("ddp", model, optimizer) if kind == "ddp" else legato.distribute(model, optimizer)
        trained.append(train(wrapped, optimizer, 14))
    return distance(*trained), wrapped.plan.scheduler


def automatic_that_cannot_be_recorded():
    """The recorder refuses this optimizer's step every time: the buckets stay, on all ranks, and nobody hangs."""

    def refuse(*_):
        raise CaptureError("not this one")

    recorder, legato.auto.Recorder = legato.auto.Recorder, refuse
    try:
        model = build("Convolutional")
        wrapped, optimizer = legato.distribute(model, OPTIMIZERS["sgd"](model.parameters()))
        train(wrapped, optimizer, 14)
    finally:
        legato.auto.Recorder = recorder
    return wrapped.plan.scheduler


def calibrated():
    from legato.core import files
    from legato.pytorch import calibrate

    found = calibrate(sizes=(1024, 65536, 2**20))
    cost = found.cluster.cost("gloo")
    return files.identity(found.cluster), found.cluster.workers, cost.cost(2**20), [s.seconds for s in found.samples]


def automatic_with_sparse_inputs():
    """The recorder knows dense tensors only: the buckets stay, and training goes on."""
    trained = []
    for kind in ("ddp", "auto"):
        model = build("Checkpointed")
        plain = model.forward
        model.forward = lambda x, plain=plain: torch.sparse.mm(torch.eye(len(x)).to_sparse(), plain(x))
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        wrapped, optimizer = wrap("ddp", model, optimizer) if kind == "ddp" else legato.distribute(model, optimizer)
        trained.append(train(wrapped, optimizer, 14))
    return distance(*trained), wrapped.plan.scheduler


def automatic_for_two_models():
    """An encoder and a decoder, each with its own wrapper and optimizer, are observed in the same steps."""
    trained = []
    for kind in ("ddp", "auto"):
        torch.manual_seed(7)
        pair = []
        for layers in ((8, 16, 4), (4, 16, 8)):
            model = torch.nn.Sequential(torch.nn.Linear(*layers[:2]), torch.nn.GELU(), torch.nn.Linear(*layers[1:]))
            optimizer = OPTIMIZERS["momentum"](model.parameters())
            pair.append(wrap("ddp", model, optimizer) if kind == "ddp" else legato.distribute(model, optimizer))
        (encoder, first), (decoder, second) = pair
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for _ in range(14):
            x = torch.randn(4, 8, generator=generator)
            first.zero_grad()
            second.zero_grad()
            F.mse_loss(decoder(encoder(x)), x).backward()
            first.step()
            second.step()
        trained.append(torch.nn.ModuleList([encoder.module, decoder.module]))
    return distance(*trained), [encoder.plan.scheduler, decoder.plan.scheduler]
