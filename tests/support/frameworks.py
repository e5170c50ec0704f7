"""Trainings under Accelerate, transformers and Lightning, with DDP alone and with legato: how far they are apart.

A script for two ranks: `frameworks.py FRAMEWORK`. It prints, in JSON, for each case the distance of the weights, and in
how many passes legato has sent.
"""

import json
import logging
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from legato.pytorch.runtime.attached.attach import attachment_of, find_ddp
from support.training import first_passes, random_plan

SENT = {}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.body(x))


def data():
    torch.manual_seed(1)
    return TensorDataset(torch.randn(192, 32), torch.randint(0, 10, (192,)))


def weights(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def note(case, model):
    """Note in how many backward passes legato has sent."""
    attached = attachment_of(find_ddp(model))
    SENT[case] = attached.reducer.messages.passes if attached is not None and attached.reducer is not None else 0


# ---- Accelerate ----------------------------------------------------------------------------


def accelerated(case, with_legato, precision="no", resume=False, **dynamo):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import TorchDynamoPlugin

    from legato.integrations.accelerate import prepare

    AcceleratorState._reset_state()
    plugin = TorchDynamoPlugin(**dynamo) if dynamo else None
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2, dynamo_plugin=plugin)
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32)
    objects = model, optimizer, DataLoader(data(), batch_size=8), schedule
    plan = random_plan(model, 3)
    prepared = prepare(accelerator, *objects, plan=plan) if with_legato else accelerator.prepare(*objects)
    model, optimizer, loader, schedule = prepared
    for epoch in range(2):
        for i, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients and i % 3:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        if resume and epoch == 0:
            folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(folder)
            accelerator.save_state(folder[0])
            accelerator.wait_for_everyone()
            accelerator.load_state(folder[0])
    if with_legato:
        note(case, model)
    return weights(model)


ACCELERATE = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "resumed": {"resume": True},
    "compiled": {"backend": "aot_eager"},
}


# ---- transformers ----------------------------------------------------------------------------


def trainer(case, with_legato, **arguments):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from legato.integrations.transformers import Legato

    torch.manual_seed(0)
    shape = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=32, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(shape)
    tokens = torch.randint(0, 100, (96, 16))
    examples = [{"input_ids": t, "labels": t} for t in tokens]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "per_device_train_batch_size": 4, "max_steps": 12, "learning_rate": 1e-3, "report_to": [], "use_cpu": True,
            "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "max_grad_norm": 1.0,
            "gradient_accumulation_steps": 2,
        }  # fmt: skip
        arguments = TrainingArguments(folder, **settings, **arguments)
        found = Trainer(model, arguments, train_dataset=examples, eval_dataset=examples[:8])
        if with_legato:
            found.add_callback(Legato(found, plan=random_plan(model, 3)))
            found.add_callback(Noted(case, found))
        found.train()
    return weights(model)


def Noted(case, trainer):  # a class that needs transformers
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_step_end(self, *_, **__):
            note(case, trainer.model_wrapped)

    return Callback()


TRANSFORMERS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 4},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}


# ---- Lightning -------------------------------------------------------------------------------


def lit(case, with_legato, manual=False, **options):
    import lightning

    from legato.integrations.lightning import Legato

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Network()

        def training_step(self, batch, index):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def validation_step(self, batch, index):
            self.net(batch[0])

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    class Adversaries(lightning.LightningModule):
        """Two networks that take turns, each with an optimizer of its own."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.made, self.judge = nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

        def training_step(self, batch, index):
            x, _ = batch
            first, second = self.optimizers()
            for optimizer, loss in (
                (second, lambda: F.softplus(self.judge(self.made(x).detach())).mean()),
                (first, lambda: F.softplus(-self.judge(self.made(x))).mean()),
            ):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss())
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.made, self.judge)]

    class Counted(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            note(case, trainer.strategy.model)

    lightning.seed_everything(0, verbose=False)
    model = Adversaries() if manual else Classifier()
    callbacks = [Legato(plan=random_plan(model, 3)), Counted()] if with_legato else []
    strategy = "ddp_find_unused_parameters_true" if manual else "ddp"
    found = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, **options,
    )  # fmt: skip
    validation = [] if manual else [DataLoader(data(), batch_size=64)]
    found.fit(model, DataLoader(data(), batch_size=8), *validation)
    return weights(model)


LIGHTNING = {
    "fp32": {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
    "bf16": {"precision": "bf16-mixed"},
    "manual": {"manual": True},
}

FRAMEWORKS = {
    "accelerate": (accelerated, ACCELERATE),
    "transformers": (trainer, TRANSFORMERS),
    "lightning": (lit, LIGHTNING),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    run, cases = FRAMEWORKS[sys.argv[1]]
    apart = {}
    for case, options in cases.items():
        with first_passes(2):
            ddp, ours = (run(case, with_legato, **options) for with_legato in (False, True))
        apart[case] = (ddp - ours).abs().max().item()
    if dist.get_rank() == 0:
        print(json.dumps({case: [distance, SENT[case]] for case, distance in apart.items()}))
    dist.destroy_process_group()
