"""Small training steps, each awkward in its own way; every function returns (model, optimizer, loss)."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from legato.pytorch.recording.capture import to_workload
from legato.pytorch.recording.recorder import Recorder

torch.set_num_threads(1)  # such small ops only wait for threads


class Branches(nn.Module):
    """Inception in small: branches that meet in a concatenation; batch norm and dropout."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.narrow = nn.Conv2d(8, 4, 1)
        self.wide = nn.Sequential(nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1))
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(8, 4, 1))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([self.narrow(x), self.wide(x), self.pooled(x)], 1)
        return self.head(self.drop(x.mean((2, 3))))


class Tied(nn.Module):
    """Output weights tied to the embedding; one frozen parameter, one that nothing uses, one that got no gradient."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.body = nn.Linear(6, 6)
        self.idle = nn.Linear(4, 4)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.cut = nn.Parameter(torch.ones(6))

    def forward(self, x):
        h = self.embed(x)
        h = self.body(self.frozen(h)) + (h * self.cut).detach()
        return self.head(h)[:, -1]


class Recurrent(nn.Module):
    """An LSTM that is called twice in one forward pass."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, 11)

    def forward(self, x):
        out, state = self.lstm(self.embed(x))
        out, _ = self.lstm(self.embed(x.flip(1)), state)
        return self.head(out[:, -1])


class Attention(nn.Module):
    """`nn.MultiheadAttention` reads its parameters functionally."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, x):
        h = self.layer(self.embed(x))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(h)[:, -1]


class Overwriting(nn.Module):
    """Memory that is read and then overwritten; one batch norm for two batches, which it must see in order."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x)
        before = h.mean(0, keepdim=True)
        h.mul_(2)
        return self.head(self.norm(h) + self.norm(x.square()) * before)


class Checkpointed(nn.Module):
    """Three blocks, two of them the same, whose forward pass is computed again in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 6)) for _ in range(2)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def _training(model, x, classes, optimizer):
    y = torch.randint(0, classes, (len(x),))
    return model, optimizer(model.parameters()), lambda: F.cross_entropy(model(x), y)


def _adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def _momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=1e-3)


def _foreach(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


def branches():
    return _training(Branches(), torch.randn(4, 3, 10, 10), 5, _adam)


def tied():
    return _training(Tied(), torch.randint(0, 11, (4, 5)), 11, _momentum)


def recurrent():
    return _training(Recurrent(), torch.randint(0, 11, (4, 5)), 11, _foreach)


def attention():
    return _training(Attention(), torch.randint(0, 11, (4, 5)), 11, _adam)


def attention_in_evaluation():
    model, optimizer, loss = attention()
    model.eval()
    return model, optimizer, loss


def overwriting():
    return _training(Overwriting(), torch.randn(4, 6), 3, _momentum)


def checkpointed():
    return _training(Checkpointed(False), torch.randn(4, 6), 3, _momentum)


def checkpointed_reentrant():
    return _training(Checkpointed(True), torch.randn(4, 6), 3, _foreach)


def watched():
    """Clipped by value in a hook, and the loss looked at before the backward pass."""
    model, optimizer, _ = checkpointed()
    x = torch.randn(4, 6)
    seen = []

    def loss():
        out = model(x)
        seen.append(out.sum().item())
        return out.square().mean() * (1 if seen[-1] > -1e9 else 2)

    model.head.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return model, optimizer, loss


TRAININGS = [
    branches,
    tied,
    recurrent,
    attention,
    attention_in_evaluation,
    overwriting,
    checkpointed,
    checkpointed_reentrant,
    watched,
]


def record_with(recorder, optimizer, loss, tape=None):
    """One recorded step, gradients kept."""
    with recorder.phase("forward"), tape or nullcontext():
        value = loss()
    with recorder.phase("backward"), tape or nullcontext():
        value.backward()
    with recorder.phase("optimizer"):
        optimizer.step()
    return recorder.finish()


def record(model, optimizer, loss, *, tape=None):
    """One recorded step, and the tape (a class) that ran beside the recorder."""
    recorder = Recorder(model, optimizer)
    tape = tape and tape(recorder)
    return record_with(recorder, optimizer, loss, tape), tape


def workload_of(*steps, **options):
    return to_workload(steps, name="w", batch_size=1, device="cpu", **options)
