"""The program of a traced job: the computation, communication and waits of each rank in one step.

[Note: what waits for a communication] A trace tells when a rank computes and when it communicates, but seldom which op
waits for which communication. If a device is idle although its next kernel has been launched, and communications end
during this time, the kernel waits for the last of these communications, and for all of them that carry no gradients. If
no kernel waits in this way for a communication, any op that began after the communication's end may depend on it. If
the communication carries gradients, legato assumes that the optimizer waits for it. Otherwise legato assumes that one
op waits: the first that was launched after the communication and began after its end. Earlier ops did not need it.
Nothing in a step waits for a communication that ends after the step. Idle time without such waits stays in the program.

[Note: when a communication is started] The kernel of a communication begins when three things have happened: the host
has launched the kernel, earlier computation has ended, and earlier work on its stream has ended. The communication was
started earlier than its kernel only if the kernel waited for earlier work on its own stream.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from legato.core.errors import InputError
from legato.core.intervals import Intervals
from legato.core.program import Action, Compute, Lane, Program, Start, Wait
from legato.core.text import count
from legato.ingest.communications import Joint, check, communications, matched, numbered
from legato.ingest.kineto.step import ROUNDING_S, TracedStep, transfers_of
from legato.ingest.names import GROUPED, ranks_in_words
from legato.ingest.traced import Notes, TracedTransfer

__all__ = ["clock_shifts", "program"]


def program(
    name: str, steps: Mapping[int, TracedStep], workers: int | None, notes: Notes, *, keep_idle: bool = True
) -> Program:
    """Return the program of one step and its traced time, from the untrimmed steps of all ranks.

    The trace of one rank is enough if all ranks take part in each communication. Raises `InputError` if ranks
    contradict each other, or if a trace does not tell what a communication is.
    """
    number = max(workers or 0, len(steps))
    if missing := [rank for rank in range(number) if rank not in steps]:
        if len(steps) > 1 or _has_groups(steps, number):
            raise InputError(f"traces of {ranks_in_words(missing)}: missing (expected traces of all {number} ranks)")
        notes.assume(f"all {number} ranks compute what rank {next(iter(steps))} computes")
    steps = {rank: _communicating(step) for rank, step in sorted(steps.items())}
    transfers = transfers_of(steps)
    check(transfers, number, notes, grouped=any(step.trace.marks.has_groups for step in steps.values()))
    joints = matched(transfers)
    shifts = clock_shifts(steps, joints)
    begins_s = {rank: steps[rank].begin_s + shift for rank, shift in shifts.items()}
    begin_s = min(begins_s.values())
    joints.sort(key=lambda joint: min(t.start_s + shifts[rank] for rank, t in joint.of(transfers).items()))
    numbers = numbered(joints, steps)
    lanes = []
    for rank, step in steps.items():
        late_s = begins_s[rank] - begin_s if keep_idle else 0.0
        actions = _Walk(step, numbers[rank], keep_idle).actions(late_s)
        lanes.append(Lane((rank,) if len(steps) == number else tuple(range(number)), tuple(actions)))
    _assume(notes, steps, max(begins_s.values()) - begin_s, keep_idle)
    end_s = max(steps[rank].end_s + shift for rank, shift in shifts.items())
    return Program(name, tuple(lanes), tuple(communications(joints, transfers, number, notes)), end_s - begin_s)


def _has_groups(steps: Mapping[int, TracedStep], number: int) -> bool:
    """Return whether some communication is among fewer than all `number` ranks."""
    return any(t.group and len(t.group) < number for own in transfers_of(steps).values() for t in own)


def _communicating(step: TracedStep) -> TracedStep:
    """Return the step with every send and receive separate, and without collectives of a single rank."""
    kept: list[tuple[TracedTransfer, float]] = []
    for transfer, issued in zip(step.transfers, step.issued_s, strict=True):
        if len(transfer.group) == 1 and transfer.kind not in ("send", "recv", GROUPED):
            continue
        parts = [replace(transfer, **part._asdict(), parts=()) for part in transfer.parts]
        kept += [(part, issued) for part in parts or [transfer]]
    return replace(step, transfers=tuple(t for t, _ in kept), issued_s=tuple(issued for _, issued in kept))


def _assume(notes: Notes, steps: Mapping[int, TracedStep], apart_s: float, keep_idle: bool) -> None:
    late = sum(t.end_s > step.end_s + ROUNDING_S for step in steps.values() for t in step.transfers)
    if late:
        notes.assume(f"nothing waits for {count(late, 'communication')} that end after their rank's step")
    notes.assume(
        "computation waits for a communication that ends while it could run; the next op to begin waits for a hidden "
        "communication, and the optimizer waits for gradients"
    )
    if keep_idle:
        notes.assume("devices wait for their hosts as long as traced, whatever the network is")
    if len(steps) > 1 and keep_idle and apart_s > ROUNDING_S:
        notes.assume(f"ranks begin the step up to {apart_s * 1e3:.3g} ms apart, as traced")


def clock_shifts(steps: Mapping[int, TracedStep], joints: Sequence[Joint]) -> dict[int, float]:
    """Return by how much to shift each rank's clock so that a communication ends at the same time on all its ranks.

    Ranks without common communications are shifted so that they begin the step at the same time.
    """
    of_rank: dict[int, list[dict[int, TracedTransfer]]] = {rank: [] for rank in steps}
    transfers = transfers_of(steps)
    for joint in joints:
        same = joint.of(transfers)
        for rank in joint.parts:
            of_rank[rank].append(same)
    shifts: dict[int, float] = {}
    for root in steps:
        if root in shifts:
            continue
        shifts[root], queue = -steps[root].begin_s, [root]
        for rank in queue:
            apart: dict[int, list[float]] = {}
            for same in of_rank[rank]:
                for other in same.keys() - shifts.keys():
                    apart.setdefault(other, []).append(same[rank].end_s - same[other].end_s)
            for other, found in apart.items():
                shifts[other] = shifts[rank] + statistics.median(found)
                queue.append(other)
    return shifts


class _Pause(NamedTuple):
    """A pause from `start_s` to `end_s`, in which nothing is computed because a transfer has not ended."""

    start_s: float
    end_s: float
    awaited: int


class _Walk:
    """A walk through the actions of one rank, in the order of their times."""

    def __init__(self, step: TracedStep, numbers: Mapping[int, int], keep_idle: bool) -> None:
        self.step, self.numbers, self.keep_idle = step, numbers, keep_idle
        order = sorted(range(len(step.ops)), key=lambda i: step.ops[i].start_s)
        self.ops = [step.ops[i] for i in order]
        self.host_s: list[float] = step.host_s[order].tolist()
        self.busy = Intervals((op.start_s, op.end_s) for op in self.ops)

    def actions(self, late_s: float) -> list[Action]:
        """Return the actions of the rank, which begins `late_s` after the first rank."""
        starts = self._starts()
        result: list[Action] = [Compute(late_s, "late")] if late_s > ROUNDING_S else []
        now = self.step.begin_s
        for pause in [*self._pauses(), None]:
            behind = []
            while starts and (pause is None or starts[0][0] <= pause.end_s):
                moment, number = starts.popleft()
                if pause is not None and self._is_behind(number, moment, pause):
                    behind.append((moment, number))
                    continue
                now = self._compute(result, now, moment)
                result.append(Start(self.numbers[number]))
            starts.extendleft(reversed(behind))
            if pause is not None:
                now = self._compute(result, now, pause.start_s)
                result.append(Wait(self.numbers[pause.awaited]))
                now = max(now, pause.end_s)
        self._compute(result, now, self.step.end_s)
        return result

    def _is_behind(self, number: int, moment: float, pause: _Pause) -> bool:
        """Return whether communication `number` can start only after the communication that ends the pause."""
        transfers = self.step.transfers
        begins, ends = transfers[number].start_s, transfers[pause.awaited].end_s
        return moment > pause.start_s and number != pause.awaited and begins >= ends - ROUNDING_S

    def _compute(self, result: list[Action], since: float, until: float) -> float:
        """Add the computation and the idle time between two moments, and return the later moment."""
        if until <= since + ROUNDING_S:
            return max(since, until)
        busy = self.busy.within(since, until).seconds
        if busy > 0:
            result.append(Compute(busy))
        if self.keep_idle and (idle := until - since - busy) > ROUNDING_S:
            result.append(Compute(idle, "idle"))
        return until

    def _starts(self) -> deque[tuple[float, int]]:
        """Return the earliest time at which this rank starts each communication, in order (second note above)."""
        step, found = self.step, list[tuple[float, int]]()
        host, ends = np.array(self.host_s), np.array([op.end_s for op in self.ops])
        latest: dict[tuple[int, ...], float] = {}
        done: dict[int, float] = {}
        for number, (transfer, issued) in enumerate(zip(step.transfers, step.issued_s, strict=True)):
            before = ends[(host < issued) & (ends <= transfer.start_s + ROUNDING_S)]
            ready = min(max(issued, float(before.max()) if len(before) else issued), transfer.start_s)
            queued = ready < done.get(transfer.stream, -math.inf) <= transfer.start_s + ROUNDING_S
            done[transfer.stream] = transfer.end_s
            moment = max(ready if queued else transfer.start_s, step.begin_s, latest.get(transfer.group, -math.inf))
            latest[transfer.group] = moment  # the starts of a group keep their order
            if transfer.kind != "recv":
                found.append((moment, number))
        return deque(sorted(found, key=lambda start: start[0]))

    def _pauses(self) -> list[_Pause]:
        """Return the pauses in which this rank waits for communications, in order of time (first note above)."""
        step, until, left = self.step, self.step.begin_s, set(range(len(self.step.transfers)))
        ends = sorted((transfer.end_s, number) for number, transfer in enumerate(step.transfers))
        found = []
        for op, host in zip(self.ops, self.host_s, strict=True):
            ready = min(step.ready_s(op, host, until), op.start_s)
            if op.start_s > ready:
                first = bisect.bisect_right(ends, (ready, len(ends)))
                last = bisect.bisect_right(ends, (op.start_s + ROUNDING_S, len(ends)))
                mine = [
                    (end, number) for end, number in ends[first:last] if step.issued_s[number] <= max(host, op.start_s)
                ]
                for end, number in mine:
                    if number == mine[-1][1] or not step.transfers[number].carries_gradients:
                        found.append(_Pause(ready, end, number))
                        left.discard(number)
                        ready = end
            until = max(until, op.end_s)
        begins = [op.start_s for op in self.ops]
        updates = [op.start_s for op in self.ops if op.phase == "optimizer"]
        for number in sorted(left):
            if step.transfers[number].end_s <= step.end_s + ROUNDING_S:
                moment = self._hidden(number, begins, updates)
                found.append(_Pause(moment, moment, number))
        return sorted(found)

    def _hidden(self, number: int, begins: list[float], updates: list[float]) -> float:
        """Return when the rank first needs a communication that ended while the rank computed."""
        transfer, issued = self.step.transfers[number], self.step.issued_s[number]
        ended = transfer.end_s - ROUNDING_S
        if transfer.carries_gradients:
            return next(iter(updates[bisect.bisect_left(updates, ended) :]), self.step.end_s)
        later = range(bisect.bisect_left(begins, ended), len(begins))
        return next((begins[k] for k in later if self.host_s[k] >= issued), self.step.end_s)
