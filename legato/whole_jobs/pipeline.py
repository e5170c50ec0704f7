"""When a pipeline's workers are done: a simulation of its schedule, action by action."""

from __future__ import annotations

from collections.abc import Sequence

from legato.core.errors import InputError
from legato.whole_jobs.schedules import Action, Schedule

__all__ = ["run"]


def run(
    plan: Schedule, passes_s: Sequence[dict[str, float]], sends_s: Sequence[float], overlapped: bool
) -> list[float]:
    """The time at which each worker has done all its actions, from the beginning of the step.

    `passes_s` has the seconds of `forward`, `backward` and `weights` of each stage, and `sends_s` those of a transfer
    between a stage and the next one. If transfers are `overlapped`, those of a stage in one direction go out one after
    another beside its passes; otherwise the sender waits for each.

    A worker's actions are in order, so each runs until it lacks an input, and whoever makes that input wakes it:
    there is no queue to search. Raises `InputError` if workers wait for each other in a circle.
    """
    last = len(passes_s) - 1
    lanes, position = [0.0] * len(plan), [0] * len(plan)
    lines: dict[tuple[int, str], float] = {}
    arrived: dict[Action, float] = {}
    waiting: dict[Action, int] = {}
    awake = list(range(len(plan)))
    while awake:
        worker = awake.pop()
        actions = plan[worker]
        while position[worker] < len(actions):
            action = actions[position[worker]]
            stage, microbatch, kind = action
            needs_input = (kind == "forward" and stage > 0) or (kind == "backward" and stage < last)
            if needs_input and action not in arrived:
                waiting[action] = worker
                break
            start = max(lanes[worker], arrived[action]) if needs_input else lanes[worker]
            lanes[worker] = end = start + passes_s[stage][kind]
            position[worker] += 1
            target = stage + 1 if kind == "forward" else stage - 1 if kind == "backward" else -1
            if not 0 <= target <= last:
                continue
            line = (stage, kind)
            there = max(end, lines.get(line, 0.0)) + sends_s[min(stage, target)]
            if overlapped:
                lines[line] = there
            else:
                lanes[worker] = there
            made = Action(target, microbatch, kind)
            arrived[made] = there
            if made in waiting:
                awake.append(waiting.pop(made))
    if waiting:
        action, worker = next(iter(waiting.items()))
        what = f"{action.kind} of micro-batch {action.microbatch} on stage {action.stage}"
        raise InputError(f"worker {worker}: waits for the input of {what} (expected a schedule without circles)")
    return lanes
