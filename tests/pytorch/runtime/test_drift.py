"""Training that goes at another pace than its plan was made for."""

import random
import statistics
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
import pytest
import torch
import torch.distributed as dist
from support.automatic import short_tournaments
from support.ranks import gathered, on_ranks
from support.training import OPTIMIZERS, build, distance, wrap
from torch.nn import functional as F

import legato.auto
from legato.pytorch import attachment
from legato.pytorch.runtime.attached import drift
from legato.pytorch.runtime.attached.drift import SAMPLE, WINDOW, DriftMonitor
from legato.pytorch.runtime.sending import tracing


class Training:
    """Passes of known pace: what a `DriftMonitor` sees of them, and what it says."""

    def __init__(self, paces):
        self.messages = SimpleNamespace(passes=0, tracer=None)
        self.gathered = []
        self.drift = DriftMonitor(self.gather)
        self.paces = iter(paces)

    def gather(self, mine):
        self.gathered.append(mine)
        return next(self.paces)

    def run(self, windows):
        said = []
        for _ in range(windows * WINDOW):
            text = self.drift.pass_ended(self.messages)
            if text:
                said.append((self.messages.passes // WINDOW, text))
            if self.messages.tracer is not None:
                self.messages.tracer.switch("forward")
            self.messages.passes += 1
        return said


CALM = [(0.1, 0.05), (0.1, 0.06)]


def test_a_lasting_change_is_said_once():
    slow = [(0.1, 0.05), (0.15, 0.06)]
    training = Training([CALM, CALM, slow, slow, slow, slow, CALM, CALM, CALM])
    assert training.run(10) == [
        (4, "computation on rank 1 takes 1.50 times as long"),
        (8, "computation on rank 1 takes 0.67 times as long"),
    ]


def test_one_slow_window_is_no_change():
    slow = [(0.2, 0.2), (0.2, 0.2)]
    assert Training([CALM, slow, CALM, slow, CALM]).run(6) == []


def test_the_network_is_as_fast_as_the_rank_says_that_waits_least():
    waiting = [(0.1, 0.20), (0.1, 0.06)]
    slow = [(0.1, 0.20), (0.1, 0.12)]
    training = Training([CALM, waiting, waiting, slow, slow])
    assert training.run(6) == [(5, "communication takes 2.40 times as long")]


def test_samples_are_short_and_leave_the_user_his_own_tracer():
    training = Training([CALM] * 3)
    traced = 0
    for _ in range(2 * WINDOW):
        training.drift.pass_ended(training.messages)
        traced += training.messages.tracer is not None
        training.messages.passes += 1
    assert traced == 2 * 2 * WINDOW // SAMPLE
    own = training.messages.tracer = SimpleNamespace(switch=lambda state: None)
    training.run(1)
    assert training.messages.tracer is own and len(training.gathered) == 2


class Clock:
    """Of what is traced: only computation takes time, on rank 1 five times as much once it is slow."""

    def __init__(self):
        self.slow, self.time = False, 0.0

    def compute(self, *_):
        self.time += 0.1 if self.slow and dist.get_rank() == 1 else 0.02

    def now(self):
        return self.time

    def seconds(self, start, stop):
        return stop - start


def carried(plan):
    """The plan, which legato carries out even if it is DDP's."""
    return msgspec.structs.replace(plan, carrier="legato")


def slowing_down(replan):
    """(what was said, the plans that stayed) in a training in which rank 1 slows down; its weights are DDP's."""
    clock, trained, plans, planned = Clock(), [], [], legato.auto._planned
    with (
        short_tournaments(),
        patch.multiple(drift, SAMPLE=5, WINDOW=10),
        patch.object(tracing, "clock_for", lambda device: clock),
        # The pace of DDP's passes is not watched, so legato's carry out its plan, too.
        patch.object(legato.auto, "_planned", lambda *contest: list(map(carried, planned(*contest)))),
    ):
        for kind in ("ddp", "legato"):
            model = build("Convolutional")
            optimizer = OPTIMIZERS["momentum"](model.parameters())
            if kind == "ddp":
                wrapped, optimizer = wrap("ddp", model, optimizer)
            else:
                model.register_forward_hook(clock.compute)
                wrapped, optimizer = legato.distribute(model, optimizer, replan=replan)
            generator = torch.Generator().manual_seed(dist.get_rank())
            for i in range(110):
                clock.slow = i >= 50
                x, y = model.batch(generator)
                optimizer.zero_grad()
                F.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
                attached = attachment(wrapped) if kind == "legato" else None
                if attached and not attached.observed and (not plans or attached.plan is not plans[-1]):
                    plans.append(attached.plan)
            trained.append(wrapped)
    assert distance(*trained) == 0.0
    said = [line for line in sorted(attached._said) if line.startswith("since")]
    return said, [plan.scheduler for plan in plans]


@pytest.mark.slow
@on_ranks(2)
def test_rank_0_says_so():
    said, plans = slowing_down(None)
    expected = f"since the first passes under the plan {plans[0]}, computation on rank 1 takes 5.00 times as long"
    assert said == ([f"{expected}; consider replanning"] if dist.get_rank() == 0 else [])
    assert len(plans) == 1


@pytest.mark.slow
@on_ranks(2)
def test_all_ranks_plan_anew_together():
    said, plans = slowing_down("auto")
    assert gathered(plans) == [plans] * 2
    if dist.get_rank() == 0:
        assert any("computation on rank 1 takes 5.00 times as long; replanning" in line for line in said)
    assert len(plans) >= 2 and "default-buckets" not in plans


def test_noise_is_no_change():
    """Passes that differ by 10%: 1,000 windows, as they are sampled."""
    noise = random.Random(0)

    def pace():
        samples = [
            statistics.mean(noise.gauss(1.0, 0.1) for _ in range(drift._TRACED)) for _ in range(WINDOW // SAMPLE)
        ]
        return statistics.median(samples)

    assert Training([(pace(), pace()), (pace(), pace())] for _ in range(1000)).run(1001) == []
