"""Training whose pace changes. Everything here runs on the ranks."""

import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

import legato
from legato.pytorch import attachment
from legato.pytorch.runtime import attach as runtime
from legato.pytorch.runtime import drift
from support.automatic import short_tournaments
from support.training import OPTIMIZERS, build, distance, wrap

STEPS, SLOW_FROM = 110, 50


class _Pace:
    """Computation that lasts several times as long on rank 1 from some step on."""

    def __init__(self):
        self.slow = False

    def __call__(self, *_):
        time.sleep(0.1 if self.slow and dist.get_rank() == 1 else 0.02)


def changing(replan):
    """(distance from DDP, what was said, plans that stayed), where rank 1 slows down in the middle of training."""
    before = drift.SAMPLE, drift.WINDOW, runtime.is_ddps
    drift.SAMPLE, drift.WINDOW = 5, 10
    runtime.is_ddps = lambda plan: False  # the pace of DDP's passes is not watched, so legato's carry out its plan, too
    try:
        return _changing(replan)
    finally:
        drift.SAMPLE, drift.WINDOW, runtime.is_ddps = before


def _changing(replan):
    with short_tournaments():
        trained, plans = [], []
        for kind in ("ddp", "legato"):
            pace = _Pace()
            model = build("Convolutional")
            optimizer = OPTIMIZERS["momentum"](model.parameters())
            if kind == "ddp":
                wrapped, optimizer = wrap("ddp", model, optimizer)
            else:
                model.register_forward_hook(pace)
                wrapped, optimizer = legato.distribute(model, optimizer, replan=replan)
            generator = torch.Generator().manual_seed(dist.get_rank())
            for i in range(STEPS):
                pace.slow = i >= SLOW_FROM
                x, y = model.batch(generator)
                optimizer.zero_grad()
                F.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
                attached = attachment(wrapped) if kind == "legato" else None
                if attached and not attached.observed and (not plans or attached.plan is not plans[-1]):
                    plans.append(attached.plan)
            trained.append(wrapped)
        said = [line for line in sorted(attached._said) if line.startswith("since")]
        return distance(*trained), said, [plan.scheduler for plan in plans]
