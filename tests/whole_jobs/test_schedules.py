"""Schedules: their bubbles in closed form, and any of them beside an independent simulation."""

import itertools
import random
from fractions import Fraction

import pytest
from support.strategies import seeds

from legato.core.errors import InputError
from legato.core.program import clock
from legato.whole_jobs.pipeline import STEPS, coarse
from legato.whole_jobs.schedules import SCHEDULES, Action, schedule

SIZES = [(1, 1), (1, 5), (2, 2), (2, 7), (4, 4), (4, 9), (5, 20), (16, 32)]
COSTS = [(1, 2, 0), (1, 1, 1), (3, 5, 2), (2, 2, 2), (5, 7, 3)]


def run(plan, passes, sends, overlapped):
    """When each worker has done its passes."""
    lanes, lines = coarse(plan, passes, overlapped=overlapped)
    times = clock(lanes, lines, [sends[min(stage, stage + STEPS[kind])] for stage, kind in lines])
    assert all(len(own) == len(lane) for own, lane in zip(times.actions, lanes, strict=True)), "a circle"
    return times.lanes


def check(plan, stages, microbatches):
    """Each stage is on one worker and does each pass of each micro-batch once, in order; gradients of weights are
    passes of their own for all of its micro-batches or for none."""
    every = [action for actions in plan for action in actions]
    assert len(set(every)) == len(every)
    assert {(one.stage, one.microbatch) for one in every} == set(itertools.product(range(stages), range(microbatches)))
    for stage in range(stages):
        (own,) = (
            [one for one in actions if one.stage == stage] for actions in plan if stage in {a.stage for a in actions}
        )
        split = any(one.kind == "weights" for one in own)
        for microbatch in range(microbatches):
            kinds = [one.kind for one in own if one.microbatch == microbatch]
            assert kinds == ["forward", "backward", *(["weights"] if split else [])]


def ends(plan, stages, forward, backward, weights, send=0.0, overlapped=True):
    passes = {"forward": forward, "backward": backward, "weights": weights}
    return run(plan, [passes] * stages, [send] * (stages - 1), overlapped)


@pytest.mark.parametrize(("workers", "microbatches"), SIZES)
@pytest.mark.parametrize(("forward", "backward", "weights"), COSTS)
def test_bubbles_in_closed_form(workers, microbatches, forward, backward, weights):
    """(p-1)/m of the work under GPipe and 1F1B; (p-1)(F+B-W) in all under ZB-H1."""
    both = backward + weights
    for name in ("gpipe", "1f1b"):
        plan = schedule(name, workers, microbatches)
        work = microbatches * (forward + both)
        assert max(ends(plan, workers, forward, both, 0)) == work * (1 + Fraction(workers - 1, microbatches))
    if microbatches >= workers:
        plan = schedule("zero-bubble", workers, microbatches)
        bubble = (workers - 1) * (forward + backward - weights)
        work = microbatches * (forward + backward + weights)
        assert max(ends(plan, workers, forward, backward, weights)) == work + bubble


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 2), (2, 4), (4, 4), (4, 12), (8, 32), (16, 16)])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (1, 1), (3, 5)])
def test_bubble_of_chunks(workers, microbatches, chunks, forward, backward):
    """(p-1)/(v m) of the work."""
    plan = schedule("interleaved", workers, microbatches, chunks)
    work = microbatches * chunks * (forward + backward)
    share = Fraction(workers - 1, microbatches * chunks)
    assert max(ends(plan, workers * chunks, forward, backward, 0)) == work * (1 + share)


@pytest.mark.parametrize(("workers", "microbatches"), SIZES)
def test_micro_batches_that_are_held(workers, microbatches):
    """All of them under GPipe, as many as stages from here under 1F1B, and as many as stages under ZB-H1."""

    def most(actions, last):
        held = [0]
        for action in actions:
            held.append(held[-1] + (action.kind == "forward") - (action.kind == last))
        return max(held)

    for worker in range(workers):
        assert most(schedule("gpipe", workers, microbatches)[worker], "backward") == microbatches
        assert most(schedule("1f1b", workers, microbatches)[worker], "backward") == min(workers - worker, microbatches)
        assert most(schedule("zero-bubble", workers, microbatches)[worker], "weights") <= min(workers, microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 1), (2, 2), (3, 6), (4, 12)])
def test_named_schedules_are_valid(name, workers, microbatches):
    chunks = 2 if name == "interleaved" else 1
    check(schedule(name, workers, microbatches, chunks), workers * chunks, microbatches)


def test_a_circle_of_waiting_workers():
    """Worker 0 puts stage 2 before stage 0, whose output stage 1 needs for stage 2."""
    kinds = ("forward", "backward")
    plan = [[Action(stage, 0, kind) for stage in stages for kind in kinds] for stages in ((2, 0), (1, 3))]
    check(plan, 4, 1)
    with pytest.raises(AssertionError, match="a circle"):
        ends(plan, 4, 1, 1, 0)


def test_unknown_schedules_and_impossible_numbers():
    with pytest.raises(InputError, match="did you mean 'interleaved'"):
        schedule("interleave", 2, 4)
    with pytest.raises(InputError, match="microbatches: 3"):
        schedule("interleaved", 2, 3, 2)


def random_schedule(draw, stages, microbatches, workers):
    """A schedule without circles: any order of all actions that inputs allow, divided among workers."""
    home = [draw.randrange(workers) for _ in range(stages)]
    split = [draw.random() < 0.5 for _ in range(stages)]
    open_actions = [Action(0, one, "forward") for one in range(microbatches)]
    plan = [[] for _ in range(workers)]
    while open_actions:
        stage, one, kind = action = open_actions.pop(draw.randrange(len(open_actions)))
        plan[home[stage]].append(action)
        if kind == "forward":
            open_actions.append(Action(*((stage + 1, one, kind) if stage + 1 < stages else (stage, one, "backward"))))
        elif kind == "backward":
            open_actions += [Action(stage - 1, one, kind)] * (stage > 0)
            open_actions += [Action(stage, one, "weights")] * split[stage]
    return plan


def brute_force(plan, passes, sends, overlapped):
    """The least times that satisfy every rule, raised one by one until none is violated, in exact arithmetic."""
    last = len(passes) - 1
    done = {action: Fraction(0) for actions in plan for action in actions}
    there = dict(done)

    def target(action):
        stage = action.stage + {"forward": 1, "backward": -1, "weights": last + 1}[action.kind]
        return action._replace(stage=stage) if 0 <= stage <= last else None

    senders = {target(action): action for action in done}
    changed = True
    while changed:
        changed = False
        for actions in plan:
            for k, action in enumerate(actions):
                before = actions[k - 1] if k else None
                start = Fraction(0) if before is None else done[before] if overlapped else there[before]
                if action in senders:
                    start = max(start, there[senders[action]])
                end = start + passes[action.stage][action.kind]
                arrival = end
                if target(action) is not None:
                    same = [a for a in actions[:k] if (a.stage, a.kind) == (action.stage, action.kind)]
                    line = there[same[-1]] if same and overlapped else Fraction(0)
                    arrival = max(end, line) + sends[min(action.stage, target(action).stage)]
                if (end, arrival) != (done[action], there[action]):
                    done[action], there[action] = end, arrival
                    changed = True
    return [max((done if overlapped else there)[a] for a in actions) if actions else 0 for actions in plan]


@pytest.mark.parametrize("seed", seeds(200))
def test_any_schedule_takes_what_brute_force_says(seed):
    draw = random.Random(seed)
    stages, microbatches = draw.randint(1, 6), draw.randint(1, 5)
    plan = random_schedule(draw, stages, microbatches, draw.randint(1, 4))
    check(plan, stages, microbatches)
    passes = [
        {kind: Fraction(draw.randint(0, 40), 8) for kind in ("forward", "backward", "weights")} for _ in range(stages)
    ]
    sends = [Fraction(draw.randint(0, 16), 8) for _ in range(stages - 1)]
    as_floats = [{kind: float(seconds) for kind, seconds in one.items()} for one in passes]
    for overlapped in (True, False):
        found = run(plan, as_floats, [float(one) for one in sends], overlapped)
        assert found == brute_force(plan, passes, sends, overlapped)
