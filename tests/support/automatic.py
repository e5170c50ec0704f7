"""Short trainings under `plan="auto"`, for the ranks of a test."""

import io
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import torch

import legato
import legato.auto
from legato.core import files
from legato.core.plan import Message, Plan, Slice
from legato.pytorch.network.calibrate import calibrate, sizes_up_to
from legato.pytorch.runtime.attached import tournament
from support import training

#: Steps until the tournament begins, and until a short one has ended.
OBSERVED, DECIDED = 13, 35
#: What competes under `hasty`.
CONTESTS = ("ddp", "plan", "turns")


@contextmanager
def short_tournaments(again=False):
    """Tournaments of two rounds, in which a turn has one timed step.

    Unless what comes before is done `again`, these ranks measure their network once for all decisions, and rank 0 plans
    without another process.
    """
    usual = {
        name: getattr(tournament, name)
        for name in ("FEWEST_ROUNDS", "MOST_ROUNDS", "FEWEST_STEPS", "TURN_S", "FIRST_UNTIMED")
    }
    decides = legato.auto.calibrate, legato.auto._planned
    vars(tournament).update(FEWEST_ROUNDS=2, MOST_ROUNDS=2, FEWEST_STEPS=1, TURN_S=0.0, FIRST_UNTIMED=1)
    if not again:
        legato.auto.calibrate, legato.auto._planned = _calibrated_once, _planned_here
    try:
        yield
    finally:
        vars(tournament).update(usual)
        legato.auto.calibrate, legato.auto._planned = decides


@contextmanager
def hasty(contest):
    """`training.wrap` leaves the plan to legato, which observes two steps, and lets these compete: DDP's passes alone
    (`ddp`), a random plan with forward overlap alone (`plan`), or both and a plan without it, in `turns`.
    """

    def planned(task, _):
        tensors = {tensor.name: tensor.nbytes for tensor in task.workload.tensors}
        all_together = Message(tuple(Slice(name, 0, size) for name, size in tensors.items()))
        every = Plan("ddp", (all_together,), carrier="ddp")
        flat = Plan("flat", tuple(Message((Slice(name, 0, size),)) for name, size in tensors.items()))
        overlapped = msgspec.structs.replace(flat, scheduler="overlapped", forward_overlap=task.overlap)
        return {"ddp": [every], "plan": [overlapped], "turns": [every, overlapped, flat]}[contest]

    steps = legato.auto.WARMUP_STEPS, legato.auto.OBSERVED_STEPS
    with short_tournaments():
        legato.auto.WARMUP_STEPS, legato.auto.OBSERVED_STEPS = 0, 2
        legato.auto._planned = planned
        training.AUTOMATIC.append(True)
        try:
            with training.first_passes(2):
                yield
        finally:
            training.AUTOMATIC.clear()
            legato.auto.WARMUP_STEPS, legato.auto.OBSERVED_STEPS = steps


def hastily(contest, case, *arguments):
    """A case in which plans are legato's own."""
    with hasty(contest):
        return case(*arguments)


#: What has been measured, by the ranks of a group.
_NETWORKS = {}


def _calibrated_once(group, sizes, compute):
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    if ranks not in _NETWORKS:
        _NETWORKS[ranks] = calibrate(group, sizes=sizes_up_to(100_000), compute=lambda: None)
    return _NETWORKS[ranks]


def _planned_here(contest, _=None):
    from legato.schedule.compare import hold_contest

    streams, said = (sys.stdin, sys.stdout), io.BytesIO()
    sys.stdin, sys.stdout = (SimpleNamespace(buffer=b) for b in (io.BytesIO(msgspec.json.encode(contest)), said))
    try:
        hold_contest()
    finally:
        sys.stdin, sys.stdout = streams
    return [files.decode(plan, Plan, "a plan") for plan in said.getvalue().splitlines()]


def made(kind, model, optimizer, **options):
    """A model and its optimizer under DDP, or under plans of legato's own."""
    optimizer = training.OPTIMIZERS[optimizer](model.parameters())
    return training.wrap(kind, model, optimizer) if kind == "ddp" else legato.distribute(model, optimizer, **options)


def as_by_ddp(run, again=False):
    """The model that `run("auto")` trains, to the weights that `run("ddp")` gives it."""
    with short_tournaments(again):
        expected, found = run("ddp"), run("auto")
    assert training.distance(expected, found) == 0.0
    return found
