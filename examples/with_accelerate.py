"""Use legato with Hugging Face Accelerate, in place of its DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/with_accelerate.py

Accelerate prepares everything except the model, because `accelerator.prepare` would
wrap it in DDP. `backward`, `accumulate` and `clip_grad_norm_` work as usual.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import legato


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    data = TensorDataset(torch.randn(256, 32), torch.randint(0, 10, (256,)))
    loader = accelerator.prepare(DataLoader(data, batch_size=8))

    model, optimizer = legato.distribute(model, optimizer)
    optimizer, schedule = accelerator.prepare(optimizer, schedule)

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
