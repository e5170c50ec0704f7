"""Use legato with Hugging Face Accelerate; only the line with `prepare` differs from a script without legato.

torchrun --nproc-per-node 2 examples/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from legato.integrations.accelerate import prepare


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    data = TensorDataset(torch.randn(256, 32), torch.randint(0, 10, (256,)))
    loader = DataLoader(data, batch_size=8)
    model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, loader, schedule)

    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    total = sum(p.double().sum().item() for p in model.parameters())
    accelerator.print(f"trained on {accelerator.num_processes} ranks, weights add up to {total:.12f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
