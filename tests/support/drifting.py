"""Training whose pace changes. Everything here runs on the ranks."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import legato
from legato.pytorch import attachment
from legato.pytorch.runtime.attached import attachment as runtime
from legato.pytorch.runtime.attached import drift
from legato.pytorch.runtime.sending import tracing
from support.automatic import short_tournaments
from support.training import OPTIMIZERS, build, distance, wrap

STEPS, SLOW_FROM = 110, 50


class _Pace:
    """The clock of what is traced: only computation takes time, on rank 1 five times as much from some step on."""

    def __init__(self):
        self.slow, self.now = False, 0.0

    def __call__(self, *_):
        self.now += 0.1 if self.slow and dist.get_rank() == 1 else 0.02

    def perf_counter(self):
        return self.now


def changing(replan):
    """(distance from DDP, what was said, plans that stayed), where rank 1 slows down in the middle of training."""
    before, pace = (drift.SAMPLE, drift.WINDOW, runtime.is_ddps, tracing.time), _Pace()
    drift.SAMPLE, drift.WINDOW, tracing.time = 5, 10, pace
    runtime.is_ddps = lambda plan: False  # the pace of DDP's passes is not watched, so legato's carry out its plan, too
    try:
        return _changing(replan, pace)
    finally:
        drift.SAMPLE, drift.WINDOW, runtime.is_ddps, tracing.time = before


def _changing(replan, pace):
    with short_tournaments():
        trained, plans = [], []
        for kind in ("ddp", "legato"):
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
