"""Build a `Workload` from the ops and gradients of one traced step."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Sequence

from legato.core.errors import InputError
from legato.core.workload import Op, Phase, Tensor, Workload
from legato.ingest.traced import Gradient, Notes, TracedOp

__all__ = ["assemble", "mirrored_readers"]


def assemble(
    name: str,
    ops: Sequence[TracedOp],
    gradients: Sequence[Gradient],
    notes: Notes,
    *,
    keep_idle: bool,
    device: str,
    untraced_s: float | None,
    together: Collection[int] = (),
) -> Workload:
    """Build the workload of one step.

    With `keep_idle`, the duration of an op includes the time for which the device was idle because the host had not
    launched the op, since no plan can avoid this time. The optimizer's time is divided among the tensors in proportion
    to their bytes, as if each parameter were updated when its gradient arrives. `together` has the optimizer's ops that
    need all gradients and run before the update of any parameter. Raises `InputError` if there is no gradient, or no
    computation in the backward pass.
    """
    if not gradients:
        raise InputError("no gradient transfers and no parameters found (expected all-reduces in the backward pass)")
    forward, backward = _of_phase(ops, "forward"), _of_phase(ops, "backward")
    if not backward:
        raise InputError("no computation found in the backward pass")
    place = {old: new for new, old in enumerate([*forward, *backward])}
    built = [_op(ops[old], old, place, keep_idle) for old in place]
    gradients = _with_readers(gradients, ops, notes)
    optimizer = _of_phase(ops, "optimizer")
    together_s, update_s = (
        math.fsum(_seconds(ops[i], keep_idle) for i in optimizer if (i in together) is all_of_them)
        for all_of_them in (True, False)
    )
    first = (len(built),) if together_s > 0 else ()
    built += [Op("all gradients", "optimizer", together_s) for _ in first]
    total = sum(gradient.nbytes for gradient in gradients)
    tensors = []
    for gradient in gradients:
        before = bisect.bisect_right(backward, gradient.ready_after)
        ready = place[backward[before - 1]] if before else len(forward)
        readers = sorted(place[r] for r in gradient.readers or () if place.get(r, len(ops)) < len(forward))
        readers += first
        if update_s > 0:
            readers.append(len(built))
            built.append(Op(f"update {gradient.name}", "optimizer", update_s * gradient.nbytes / total, first))
        tensors.append(Tensor(gradient.name, gradient.nbytes, ready, tuple(readers)))
    if update_s > 0:
        notes.assume("the optimizer's time is divided among the tensors in proportion to their bytes")
    tensors.sort(key=lambda tensor: tensor.ready_after)
    return Workload(name, tuple(built), tuple(tensors), 1, device, untraced_s)


def _of_phase(ops: Sequence[TracedOp], phase: Phase) -> list[int]:
    return [i for i, op in enumerate(ops) if op.phase == phase]


def _op(op: TracedOp, index: int, place: dict[int, int], keep_idle: bool) -> Op:
    here = place[index]
    needs = {here - 1} if op.deps is None else {place[d] for d in op.deps if d in place}
    return Op(op.name, op.phase, _seconds(op, keep_idle), tuple(sorted(d for d in needs if 0 <= d < here)))


def _seconds(op: TracedOp, keep_idle: bool) -> float:
    return op.duration_s + (op.gap_s if keep_idle else 0.0)


def _with_readers(gradients: Sequence[Gradient], ops: Sequence[TracedOp], notes: Notes) -> list[Gradient]:
    if all(gradient.readers is not None for gradient in gradients):
        return list(gradients)
    notes.lacks(
        "which forward ops read which parameter",
        "the forward pass reads parameters in the reverse of the order in which their gradients appear",
    )
    mirror = mirrored_readers(ops, [gradient.ready_after for gradient in gradients])
    return [
        gradient
        if gradient.readers is not None
        else Gradient(gradient.name, gradient.nbytes, gradient.ready_after, reader)
        for gradient, reader in zip(gradients, mirror, strict=True)
    ]


def mirrored_readers(ops: Sequence[TracedOp], ready_after: Sequence[int]) -> list[tuple[int, ...]]:
    """Return, for each gradient, the forward op that reads its parameter, as if the backward pass ran in reverse order.

    For example, if a gradient is ready after 30% of the backward pass's time, its parameter is first read after 70% of
    the forward pass's time.
    """
    forward, backward = _of_phase(ops, "forward"), _of_phase(ops, "backward")
    if not forward or not backward:
        return [() for _ in ready_after]
    ends = list(itertools.accumulate(ops[i].duration_s for i in backward))
    starts = [0.0, *itertools.accumulate(ops[i].duration_s for i in forward)][:-1]
    total = starts[-1] + ops[forward[-1]].duration_s
    found: list[tuple[int, ...]] = []
    for index in ready_after:
        at = bisect.bisect_right(backward, index) - 1
        share = ends[at] / ends[-1] if at >= 0 and ends[-1] > 0 else 0.0
        reader = max(bisect.bisect_right(starts, (1 - share) * total) - 1, 0)
        found.append((forward[reader],))
    return found
