"""Random models, plans and optimizers, with random delays and random looks on every rank.

    PYTHONPATH=tests python -m support.chaos [--rounds 100] [--ranks 4] [--seed 0] [--backend late]

Every round trains one random model three times: under DDP, under a random plan,
and under that plan again with chaos: each rank sleeps at random before hooks,
ops and messages, and looks at random at parameters, gradients, checkpoints. The
chaos may change nothing: the weights are those of the calm run bit for bit on
any number of ranks, and DDP's bit for bit on two.
"""

import argparse
import hashlib
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from legato.pytorch import attach, attachment
from legato.pytorch.device import group_device
from support.training import random_plan

ITERATIONS = 30


class Random(nn.Module):
    """A random graph of layers: branches, layers used twice or never, some only in some iterations on some ranks."""

    def __init__(self, seed):
        super().__init__()
        rng = random.Random(seed)
        self.width = rng.choice([8, 16, 32])
        self.layers = nn.ModuleList(self._layer(rng) for _ in range(rng.randint(3, 10)))
        self.head = nn.Linear(self.width, 10)
        self.ways = [rng.sample(range(len(self.layers)), rng.randint(1, len(self.layers))) for _ in range(4)]
        self.twice = rng.random() < 0.5
        self.calls = 0

    def _layer(self, rng):
        kind = rng.choice(["linear", "norm", "embedding-like", "dropout"])
        if kind == "linear":
            return nn.Linear(self.width, self.width, bias=rng.random() < 0.5)
        if kind == "norm":
            return nn.LayerNorm(self.width)
        if kind == "dropout":
            return nn.Sequential(nn.Dropout(0.1), nn.Linear(self.width, self.width))
        return nn.Sequential(nn.Linear(self.width, 3 * self.width), nn.Tanh(), nn.Linear(3 * self.width, self.width))

    def forward(self, x):
        self.calls += 1
        way = self.ways[(self.calls + dist.get_rank() * (self.calls % 3 == 0)) % len(self.ways)]
        for i in way * (2 if self.twice else 1):
            x = x + torch.tanh(self.layers[i](x))
        return self.head(x)

    def batch(self, generator):
        return torch.randn(4, self.width, generator=generator), torch.randint(0, 10, (4,), generator=generator)


class Chaos:
    """Sleeps and looks, on this rank alone, at moments of its own."""

    def __init__(self, seed):
        self._rng = random.Random(f"{seed} {dist.get_rank()}")
        self._rate = self._rng.choice([0.02, 0.1, 0.3])

    def sleep(self, *_):
        if self._rng.random() < self._rate:
            time.sleep(self._rng.choice([1e-4, 1e-3, 4e-3]))

    def invade(self, model):
        """Before the model is distributed: delays in front of the runtime's own hooks, and in front of every op."""
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.sleep)
        for module in model.modules():
            module.register_forward_pre_hook(self.sleep)
            module.register_full_backward_pre_hook(self.sleep)

    def delay_messages(self, wrapped):
        messages = attachment(wrapped).reducer.messages
        launch = messages.launch

        def late(bucket):
            self.sleep()
            launch(bucket)

        messages.launch = late

    def look(self, wrapped, optimizer):
        what, rng = self._rng.random(), self._rng
        parameters = list(wrapped.parameters())
        if what < 0.1:
            wrapped.state_dict()
        elif what < 0.2:
            optimizer.state_dict()
        elif what < 0.4:
            _ = rng.choice(parameters).grad
        elif what < 0.5:
            rng.choice(parameters).sum()
        elif what < 0.55:
            attachment(wrapped).flush()
        self.sleep()


def train(seed, kind):
    """The weights, as a hash, after some iterations of the training that the seed stands for."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    device = group_device(dist.group.WORLD)
    model = Random(seed).to(device)
    name = rng.choice(["SGD", "Adam", "AdamW", "RMSprop", "Adafactor", "NAdam"])
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=rng.choice([1e-3, 1e-2]))
    plan = random_plan(model, seed, forward_overlap=rng.random() < 0.8)
    debug, accumulate, clip, views = (rng.random() < 0.3 for _ in range(4))
    chaos = Chaos(seed) if kind == "chaos" else None
    if chaos:
        chaos.invade(model)
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    else:
        wrapped, optimizer = attach(
            model, optimizer, plan, gradient_as_bucket_view=views, debug=debug and kind == "chaos"
        )
    if chaos:
        chaos.delay_messages(wrapped)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    look = (lambda: chaos.look(wrapped, optimizer)) if chaos else (lambda: None)
    for i in range(ITERATIONS):
        optimizer.zero_grad(set_to_none=i % 4 != 3)
        look()
        if accumulate:
            x, y = (tensor.to(device) for tensor in model.batch(generator))
            with wrapped.no_sync():
                F.cross_entropy(wrapped(x), y).backward()
        x, y = (tensor.to(device) for tensor in model.batch(generator))
        loss = F.cross_entropy(wrapped(x), y)
        look()
        loss.backward()
        look()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        look()
    state = b"".join(v.cpu().double().numpy().tobytes() for v in wrapped.state_dict().values())
    return hashlib.sha256(state).hexdigest()


def rounds(first, count):
    """[(seed, what differs)] of some rounds; empty when nothing does."""
    wrong = []
    for seed in range(first, first + count):
        kinds = ["calm", "chaos"] + (["ddp"] if dist.get_world_size() == 2 else [])
        hashes = {kind: train(seed, kind) for kind in kinds}
        if len(set(hashes.values())) > 1:
            wrong.append((seed, hashes))
    return wrong


def main():
    from support.ranks import Ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="gloo", help="late: on the accelerator without a GPU (support.late)")
    options = parser.parse_args()
    ranks, began, done = Ranks(options.ranks, options.backend), time.monotonic(), 0
    while done < options.rounds:
        count = min(10, options.rounds - done)
        results = ranks.run(rounds, options.seed + done, count)
        assert all(r == results[0] for r in results), results
        assert results[0] == [], results[0]
        done += count
        seconds = time.monotonic() - began
        print(
            f"{done} rounds, {2 * done * ITERATIONS} iterations on {options.ranks} ranks, {seconds:.0f} s", flush=True
        )
    ranks.close()


if __name__ == "__main__":
    main()
