"""Training whose pace changes. Everything here runs on the ranks."""

import logging
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

import legato
from legato.pytorch import attachment
from legato.pytorch.runtime import drift
from support.automatic import short_tournaments
from support.training import OPTIMIZERS, build, distance, wrap

STEPS, SLOW_FROM = 110, 50


class _Said(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class _Pace:
    """Computation that lasts several times as long on rank 1 from some step on."""

    def __init__(self):
        self.slow = False

    def __call__(self, *_):
        time.sleep(0.1 if self.slow and dist.get_rank() == 1 else 0.02)


def changing(replan):
    """(distance from DDP, what was said, plans that stayed), where rank 1 slows down in the middle of training."""
    sample, window = drift.SAMPLE, drift.WINDOW
    drift.SAMPLE, drift.WINDOW = 5, 10
    handler = _Said()
    logging.getLogger("legato").addHandler(handler)
    try:
        return _changing(replan, handler)
    finally:
        drift.SAMPLE, drift.WINDOW = sample, window
        logging.getLogger("legato").removeHandler(handler)


def _changing(replan, handler):
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
                if (
                    kind == "legato"
                    and not attachment(wrapped).observed
                    and (not plans or attachment(wrapped).plan is not plans[-1])
                ):
                    plans.append(attachment(wrapped).plan)
            trained.append(wrapped)
        return distance(*trained), handler.lines, [plan.scheduler for plan in plans]
