"""Schedules of a pipeline as data: the actions of each worker, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from legato.core.errors import InputError, unknown_name

__all__ = ["SCHEDULES", "Action", "Schedule", "schedule"]


class Action(NamedTuple):
    """A pass of a micro-batch through a stage.

    `backward` computes the gradients of activations. It also computes the gradients of weights, unless the stage has a
    separate action `weights` for the same micro-batch.
    """

    stage: int
    microbatch: int
    kind: Literal["forward", "backward", "weights"]


#: The actions of each worker, in their order.
Schedule: TypeAlias = list[list[Action]]


def gpipe(workers: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return GPipe: all forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965)."""
    return _in_turns(workers, microbatches, lambda worker: microbatches)


def one_forward_one_backward(workers: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return 1F1B: a forward pass for each later stage, then alternating passes (PipeDream-flush, arXiv 2006.09503)."""
    return _in_turns(workers, microbatches, lambda worker: workers - 1 - worker)


def _in_turns(workers: int, microbatches: int, ahead: Callable[[int], int], chunks: int = 1) -> Schedule:
    """Return a schedule in which each worker runs `ahead` forward passes, then alternates forward and backward passes.

    With several chunks, the next `workers` micro-batches go forward through one chunk, then through the next chunk.
    Backward passes do the same in reverse, from the last chunk on (arXiv 2104.04473, section 2.2).
    """
    passes = []
    for index in range(microbatches * chunks):
        block, inside = divmod(index, workers * chunks)
        passes.append((inside // workers, block * workers + inside % workers) if chunks > 1 else (0, index))
    result: Schedule = []
    for worker in range(workers):
        forward = [Action(chunk * workers + worker, one, "forward") for chunk, one in passes]
        backward = [Action((chunks - 1 - chunk) * workers + worker, one, "backward") for chunk, one in passes]
        first = min(ahead(worker), len(passes))
        actions = forward[:first]
        for one, back in zip(forward[first:], backward, strict=False):
            actions += [one, back]
        result.append(actions + backward[len(passes) - first :])
    return result


def interleaved(workers: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return 1F1B with several chunks per worker (arXiv 2104.04473, section 2.2).

    The number of micro-batches must be a multiple of the number of workers.
    """
    if chunks == 1:
        return one_forward_one_backward(workers, microbatches)
    if microbatches % workers:
        raise InputError(f"microbatches: {microbatches} (expected a multiple of the {workers} stages)")
    return _in_turns(workers, microbatches, lambda worker: 2 * (workers - 1 - worker) + (chunks - 1) * workers, chunks)


def zero_bubble(workers: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return ZB-H1: 1F1B in which gradients of weights are computed after more urgent gradients (arXiv 2401.10241).

    Worker r delays the weights' gradients of r micro-batches. In 1F1B, it holds activations of r fewer micro-batches
    than worker 0, so now all workers hold the same number.
    """
    result: Schedule = []
    for worker, actions in enumerate(one_forward_one_backward(workers, microbatches)):
        own, weights = [], 0
        for action in actions:
            own.append(action)
            if action.kind == "backward" and action.microbatch >= worker:
                own.append(Action(worker, weights, "weights"))
                weights += 1
        result.append(own + [Action(worker, one, "weights") for one in range(weights, microbatches)])
    return result


#: Schedules by name: functions of the numbers of workers, of micro-batches, and of chunks per worker.
SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def schedule(name: str, workers: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return the schedule with this name. Raises `InputError` on an unknown name or unsuitable numbers."""
    if name not in SCHEDULES:
        raise unknown_name("schedule", name, SCHEDULES)
    return SCHEDULES[name](workers, microbatches, chunks)
