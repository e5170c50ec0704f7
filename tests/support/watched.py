"""Trains in one of many ways, for `legato watch`: `watched.py KIND [STEPS]`, started by torchrun or alone.

Rank 0 prints the SHA-256 of all weights at the end.
"""

import gc
import hashlib
import os
import sys
import tempfile
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 30


def stacked(width=64, layers=4):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def batches(steps):
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return [torch.randn(32, 64, generator=generator) for _ in range(steps)]


def train(model, optimizer, steps, forward=None, at=lambda k: None):
    for k, x in enumerate(batches(steps)):
        at(k)
        (model if forward is None else forward)(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(steps, at=lambda k: None):
    model = DistributedDataParallel(stacked(), bucket_cap_mb=0.03)
    train(model, torch.optim.AdamW(model.parameters()), steps, at=at)
    return model


def fsdp(steps):
    from torch.distributed.fsdp import fully_shard

    model = stacked()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    train(model, torch.optim.AdamW(model.parameters()), steps)
    return model


def tensor(steps):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps)
    return model


def pipeline(steps):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    model = stacked(layers=2)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches(steps):
        schedule.step(x) if rank == 0 else schedule.step(target=torch.ones(32, 64))
        optimizer.step()
        optimizer.zero_grad()
    return model


def scaler(steps):
    """A gradient scaler that skips steps, one of them while others are recorded."""
    model = DistributedDataParallel(stacked())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    for k, x in enumerate(batches(steps)):
        loss = model(x).square().mean() * (float("inf") if k in (3, 14) else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def accumulated(steps):
    model = DistributedDataParallel(stacked())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches(steps):
        for k in range(3):
            with model.no_sync() if k < 2 else nullcontext():
                model(x + k).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def adversarial(steps):
    """Two models with an optimizer each; the smaller one steps twice as often."""
    large, small = DistributedDataParallel(stacked(layers=6)), DistributedDataParallel(stacked(layers=2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (large, small)]
    for x in batches(steps):
        for model, optimizer in ((small, optimizers[1]), (small, optimizers[1]), (large, optimizers[0])):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return large


def many(steps):
    """Ten thousand small operators a step."""

    def forward(x):
        for _ in range(3000):
            x = x + 1e-6
        return model(x)

    model = DistributedDataParallel(stacked())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, forward)
    return model


def profiled(steps):
    """A script with a profiler of its own, from step 12 on."""

    def at(k):
        if k == 12:
            profiler.start()
        if k == 20:
            profiler.stop()

    profiler = torch.profiler.profile()
    model = ddp(steps, at)
    assert len(profiler.events()) > 0
    return model


def paused(steps):
    """Between two steps that are recorded, nothing steps for a while."""
    return ddp(steps, lambda k: time.sleep(3) if k == 14 else None)


def dying(steps):
    """The last rank dies while steps are recorded."""
    return ddp(steps, lambda k: os.kill(os.getpid(), 9) if k == 14 and dist.get_rank() else None)


def slowing(steps):
    """Steps that take a hundred times as long from step 100 on, and time in between for a verdict."""
    return ddp(220, lambda k: time.sleep(0 if k < 100 else 0.1))


def restarted(steps):
    """The first attempt fails while steps are recorded."""
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    return ddp(steps, lambda k: sys.exit(1) if k == 14 and first else None)


def loaded(steps):
    """Loader workers that are spawned, with a dataset of the script's `__main__`."""
    model = DistributedDataParallel(stacked())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Numbers(), 32, num_workers=2, multiprocessing_context="spawn")
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32 * STEPS

    def __getitem__(self, k):
        assert type(self).__module__ == "__mp_main__" and "LEGATO_WATCH" not in os.environ
        return torch.full((64,), float(k % 7))


def compiled(steps):
    model = DistributedDataParallel(stacked())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, torch.compile(model, backend="aot_eager"))
    return model


def distributed(steps):
    """With `legato.distribute`, whose updates wait for their readers."""
    from legato.auto import default_buckets, distribute

    model = DistributedDataParallel(stacked(), bucket_cap_mb=0.03)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = distribute(model, optimizer, default_buckets(model))
    train(model, optimizer, steps)
    return model


def accelerated(steps):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = stacked()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for x in batches(steps):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return model


def lightning(steps):
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = stacked()

        def training_step(self, x, _):
            return self.model(x).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    module = Module()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=steps, use_distributed_sampler=False, **quiet
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.stack(batches(steps)), batch_size=None))
    return module


def trainer(steps):
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = stacked()

        def forward(self, x):
            return {"loss": self.model(x).square().mean()}

    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
            logging_strategy="no",
        )  # fmt: skip
        data = [{"x": torch.full((64,), float(k % 7))} for k in range(64)]
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model


def alone(steps):
    model = stacked()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps)
    return model


def digest(model):
    found = hashlib.sha256()
    for parameter in model.parameters():
        tensor = parameter.detach()
        found.update((tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).numpy().tobytes())
    return found.hexdigest()


def new_store():
    """After a restart, gloo would find the addresses of the attempt before in torchrun's store."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        return {}
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    return {"store": dist.PrefixStore(attempt, dist.TCPStore(*place, is_master=False)), **ranks}


def main(kind, steps=STEPS):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if kind not in ("alone", "accelerated", "lightning", "trainer"):
        dist.init_process_group("gloo", **new_store())
    weights = digest(globals()[kind](int(steps)))
    if int(os.environ.get("RANK", "0")) == 0:
        print(weights)
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # the group too, which waits for gloo's threads: one that is left when Python ends may abort it


if __name__ == "__main__":
    main(*sys.argv[1:])
