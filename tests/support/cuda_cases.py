"""What the GPU tests run: the models of `training`, on a device."""

import torch
from torch.nn import functional as F

from legato.pytorch import attachment
from support import training


class _OnDevice:
    """A model's batches, moved to its device."""

    def __init__(self, model, device):
        self._batch, self._device = model.batch, device

    def __call__(self, generator):
        return tuple(t.to(self._device) for t in self._batch(generator))


def build(name, device):
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = training.build(name).to(device)
    model.batch = _OnDevice(model, device)
    return model


def equality(name, optimizer_name, device):
    """Distance of the weights under a random plan from DDP's, on this device."""
    trained = []
    for kind in ("ddp", "legato"):
        model = build(name, device)
        wrapped, optimizer = training.wrap(kind, model, training.OPTIMIZERS[optimizer_name](model.parameters()))
        trained.append(training.train(wrapped, optimizer, 8))
    return training.distance(*trained)


def automatic(name, device="cuda"):
    import legato

    trained = []
    for kind in ("ddp", "auto"):
        model = build(name, device)
        optimizer = training.OPTIMIZERS["momentum"](model.parameters())
        wrapped, optimizer = (
            training.wrap(kind, model, optimizer) if kind == "ddp" else legato.distribute(model, optimizer)
        )
        trained.append(training.train(wrapped, optimizer, 14))
    return training.distance(*trained), attachment(wrapped).plan.scheduler


def captured(name, device="cuda"):
    """Order of the captured tensors, order of hooks in an untraced step, sum of op times, untraced seconds."""
    from legato.pytorch import capture

    model = build(name, device)
    optimizer = training.OPTIMIZERS["momentum"](model.parameters())
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
    return [t.name for t in workload.tensors], order, workload.compute_s, workload.untraced_s
