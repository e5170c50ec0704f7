"""The work of a pipeline's workers: the passes of a schedule, and the transfers between passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from legato.core import program
from legato.core.program import Compute, Start, Wait
from legato.whole_jobs.schedules import Action, Schedule

__all__ = ["STEPS", "around", "coarse"]

#: How many stages further a pass of each kind sends its result; 0 if it sends nothing.
STEPS = {"forward": 1, "backward": -1, "weights": 0}


def around(
    action: Action,
    work: Iterable[program.Action],
    last: int,
    number: Callable[[int, Action], int],
    *,
    overlapped: bool,
) -> Iterator[program.Action]:
    """Yield a pass's actions: wait for its input, do its `work`, and send the result to the micro-batch's next pass.

    `last` is the last stage. `number(stage, pass)` returns the number of the transfer from a stage to a pass. If
    transfers are `overlapped`, the worker continues while it sends; otherwise it waits until each transfer that it
    sends has ended.
    """
    stage, microbatch, kind = action
    step = STEPS[kind]
    if step and 0 <= stage - step <= last:
        yield Wait(number(stage - step, action))
    yield from work
    if step and 0 <= stage + step <= last:
        sent = number(stage, Action(stage + step, microbatch, kind))
        yield Start(sent)
        if not overlapped:
            yield Wait(sent)


def coarse(
    plan: Schedule, passes_s: Sequence[Mapping[str, float]], *, overlapped: bool
) -> tuple[list[list[program.Action]], list[tuple[int, str]]]:
    """Return lanes with one computation for each pass, and a list with (sending stage, kind of pass) for each transfer.

    A stage sends its transfers in one direction one after another. `passes_s` has the seconds of `forward`, `backward`
    and `weights` of each stage.
    """
    numbers: dict[tuple[int, str, int], int] = {}
    works = [{kind: (Compute(seconds),) for kind, seconds in own.items()} for own in passes_s]
    last = len(works) - 1

    def number(stage: int, target: Action) -> int:
        return numbers.setdefault((stage, target.kind, target.microbatch), len(numbers))

    lanes = [
        [part for one in own for part in around(one, works[one.stage][one.kind], last, number, overlapped=overlapped)]
        for own in plan
    ]
    return lanes, [(stage, kind) for stage, kind, _ in numbers]
