"""Train a small network with DistributedDataParallel and legato.

    torchrun --nproc-per-node 2 examples/train.py

To capture its training step: legato capture examples/train.py:training -o w.json
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import legato


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
        *(nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


def training():
    """Return the model, its optimizer, and the loss of one step, for `legato capture`."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))

    def loss():
        return F.cross_entropy(model(images), labels)

    return model, optimizer, loss


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = legato.distribute(model, optimizer)

    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(dist.get_rank())
    for step in range(300):
        labels = torch.randint(0, 10, (16,), generator=random)
        images = patterns[labels] + torch.randn(16, 3, 32, 32, generator=random)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}, plan {legato.attachment(model).plan.scheduler}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
