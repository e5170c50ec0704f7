"""Use legato with Lightning: a callback of the trainer.

torchrun --nproc-per-node 2 examples/with_lightning.py
"""

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from legato.integrations.lightning import Legato


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def main():
    lightning.seed_everything(0, verbose=False)
    model = Classifier()
    data = TensorDataset(torch.randn(256, 32), torch.randint(0, 10, (256,)))
    trainer = lightning.Trainer(
        strategy="ddp",
        callbacks=[Legato()],
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=8), DataLoader(data, batch_size=64))
    if trainer.is_global_zero:
        total = sum(p.double().sum().item() for p in model.parameters())
        print(f"trained on {trainer.world_size} ranks, weights add up to {total:.12f}")


if __name__ == "__main__":
    main()
