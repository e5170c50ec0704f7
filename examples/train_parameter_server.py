"""Data-parallel training on parameter servers, with an inference agent that uses the newest parameters.

    torchrun --nproc-per-node 4 examples/train_parameter_server.py

This runs two workers, one server and one agent. To use your own plan:

    legato capture examples/train_parameter_server.py:training -o w.json
    legato plan w.json --workers 2 --servers 1 --scheduler tac -o plan.json
    torchrun --nproc-per-node 4 examples/train_parameter_server.py plan.json
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import legato


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
        *(nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def training():
    """Return the model, its optimizer, and the loss of one step, for `legato capture`."""
    model, optimizer = build()
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    return model, optimizer, lambda: F.cross_entropy(model(images), labels)


def examples(seed):
    """Yield noisy samples of ten patterns, and their labels."""
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(seed)
    while True:
        labels = torch.randint(0, 10, (16,), generator=random)
        yield patterns[labels] + torch.randn(16, 3, 32, 32, generator=random), labels


def train(model, optimizer):
    """Train on a worker, with the loop of a single process."""
    batches = examples(model.worker)
    for step in range(40):
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if model.worker == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)


def infer(model):
    """Pull the newest parameters on the agent and evaluate them, until training ends."""
    images, labels = next(examples(99))
    while model.training_goes_on:
        model.pull()
        with torch.no_grad():
            right = (model(images).argmax(1) == labels).float().mean()
    print(f"agent: {right:.0%} correct after {model.iteration} updates", flush=True)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = build()
    plan = sys.argv[1] if len(sys.argv) > 1 else None
    legato.parameter_servers(model, optimizer, train, servers=1, agents=1, infer=infer, plan=plan)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
