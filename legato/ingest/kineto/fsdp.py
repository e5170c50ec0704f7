"""The groups of FSDP2 in the steps of a trace: their gathers, their reductions, and their computation.

[Note: the marks of FSDP2] On the host, `fully_shard` marks the hooks of each group (`FSDP::pre_forward (layers.0)`),
and inside each hook the work of FSDP2 itself (`FSDP::all_gather (layers.0)`). The computation of a group is what the
host launches from the group's pre-forward hook to its post-forward hook, and from its pre-backward hook to its
reduction. If groups are nested, computation belongs to the innermost group. Computation outside all groups belongs to
the root, whose marks name no module. The hook of a list of modules runs before each module of the list, but the hook's
name lists the modules in the order of `named_modules()`. A device's wait for its host counts as a part of the next
computation, because other groups would not change this wait.
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from legato.ingest.kineto.step import TracedStep
from legato.ingest.kineto.trace.activities import collectives, describe
from legato.ingest.traced import Sharded, ShardedGroup

__all__ = ["sharded"]

_NAME = re.compile(r"FSDP::(\w+)(?: \((.*)\))?( \[pg=\d+\])?$")
_ROOT = ""
#: Work of FSDP itself, which is no computation of the model.
_OWN = re.compile(r"all_gather|all_gather_copy_out|post_backward_(accumulate|reshard|reduce)")


class _Mark(NamedTuple):
    start_s: float
    end_s: float
    what: str
    path: str


class _State(NamedTuple):
    """The state of the host: whether FSDP's own work runs, the group whose hook ran last, and the group that computes.

    `part` is the number of the module in the computing group. If the root computes, `part` is the number of the
    previous group (-1 for none).
    """

    own: _Mark | None
    hook: str
    path: str
    part: int


class _Sent(NamedTuple):
    """A collective of a group: the bytes of all ranks, and how many groups ahead of its own group it was issued."""

    backward: bool
    nbytes: int
    seconds: float
    ranks: int
    itemsize: int
    ahead: int


def sharded(steps: Sequence[TracedStep], chosen: int, workers: int | None) -> Sharded | None:
    """Return the groups of a step with median times over similar steps, or None if there are no marks of FSDP2.

    The steps belong to one rank and are not trimmed yet.
    """
    walks = [_Walk(step, workers or 1) for step in steps]
    mine = walks[chosen]
    if not mine.batches:
        return None
    alike = [w for w in walks if (w.order, w.batches, w.parts) == (mine.order, mine.batches, mine.parts)]

    def median(backward: bool, path: str, part: int = 0) -> float:
        return statistics.median(walk.seconds[backward, path, part] for walk in alike) / mine.batches

    gathers, scatters = ([sent for walk in alike for sent in walk.sent(kind)] for kind in ("gather", "scatter"))
    ranks = max((sent.ranks for sent in gathers), default=1)
    copied = sum(walk.copied_nbytes for walk in alike)
    forward_s = {path: tuple(median(False, path, j) for j in range(mine.parts[path])) for path in mine.order}
    return Sharded(
        groups=tuple(mine.group(path, forward_s[path], median(True, path), ranks) for path in mine.order),
        root=mine.group(_ROOT, (), 0.0, ranks),
        root_s=tuple((median(False, _ROOT, k), median(True, _ROOT, k)) for k in range(-1, len(mine.order))),
        ranks=ranks,
        gathered_itemsize=max((sent.itemsize for sent in gathers), default=4),
        reduced_itemsize=max((sent.itemsize for sent in scatters), default=4),
        gathers=tuple((sent.nbytes, sent.seconds) for sent in gathers if sent.ranks == ranks),
        gathers_in_host=tuple((sent.nbytes, sent.seconds) for sent in gathers if sent.ranks < ranks),
        scatters=tuple((sent.nbytes, sent.seconds) for sent in scatters),
        copy_s_per_byte=sum(walk.copying_s for walk in alike) / copied if copied else 0.0,
        micro_batches=mine.batches,
        buffers=mine.buffers,
        update_s=statistics.median(walk.update_s for walk in alike),
        odd=mine.odd,
    )


def _late(marks: Sequence[_Mark]) -> set[str]:
    """Return the groups that are reduced only after the backward pass has ended."""
    ends = [m for m in marks if m.what == "root_post_backward_callback"]
    reduced = (m for m in marks if m.what == "post_backward_accumulate")
    return {m.path for m in reduced if any(end.start_s <= m.start_s <= end.end_s for end in ends)}


class _Walk:
    """A walk through one step, in the order in which the host launched it."""

    def __init__(self, step: TracedStep, workers: int) -> None:
        self.step, self.workers = step, workers
        self.order: list[str] = []  # the groups, in the order of the forward pass
        self.parts: dict[str, int] = {}  # the number of modules of each group
        self.opened: Counter[str] = Counter()  # the number of forward passes of each group
        self.batches, self.odd = 0, ""
        self.seconds: dict[tuple[bool, str, int], float] = defaultdict(float)  # by pass, group and part
        self.collectives: dict[tuple[str, str], list[_Sent]] = defaultdict(list)  # by kind and group
        # by mark, the time when its gradients were packed and its collective was issued
        self.reduced_at: dict[_Mark, float] = {}
        self.update_s = self.copying_s = 0.0
        self.copied_nbytes = 0
        marks = list(self._marks())
        self.late = _late(marks)
        self.times: list[float] = []
        self.states: list[_State] = []
        self._follow(marks)
        reductions = [m.what for m in sorted(marks) if m.what in ("post_backward_reduce", "post_backward_rs_wait")]
        self.buffers = max([*reductions, "post_backward_rs_wait"].index("post_backward_rs_wait"), 1)
        if self.batches:
            self._send()
            # a group may be gathered without being used
            used = [m.path for m in marks if m.what == "all_gather_copy_out"]
            self.copied_nbytes = sum(sent.nbytes for path in used for sent in self.collectives["gather", path][:1])
            self.copied_nbytes += sum(sent.nbytes for sent in self.sent("scatter"))
            self._compute()
            for path, times in self.opened.items():
                if times > self.batches:
                    self.odd = f"{path} runs more than once in a forward pass"

    def sent(self, kind: str) -> Iterator[_Sent]:
        return (sent for (what, _), same in self.collectives.items() if what == kind for sent in same)

    def group(self, path: str, forward_s: tuple[float, ...], backward_s: float, ranks: int) -> ShardedGroup:
        gathers, scatters = (self.collectives[kind, path] for kind in ("gather", "scatter"))
        passes = [sent for sent in gathers if not sent.backward], [sent for sent in gathers if sent.backward]
        within = min((sent.ranks for sent in passes[1]), default=0)
        gathered, scattered = (max((sent.nbytes for sent in sent_), default=0) for sent_ in (gathers, scatters))
        ahead, again = (max((sent.ahead for sent in one), default=0) for one in passes)
        reshard = within if 0 < within < ranks else within > 0
        counts, late = (len(gathers), len(scatters)), path in self.late
        modules = tuple(path.split(", ")) if path else ()
        return ShardedGroup(
            modules, gathered, scattered, reshard, (ahead, again), *counts, forward_s, backward_s, not late
        )

    def _marks(self) -> Iterator[_Mark]:
        trace, interval = self.step.trace, self.step.interval
        columns, names = trace.annotation, [_NAME.match(name) for name in trace.names]
        rows = np.array([name is not None for name in names], dtype=bool)[columns.name]
        rows &= (columns.start >= interval.start_s) & (columns.start < interval.end_s)
        for row in np.flatnonzero(rows).tolist():
            found = names[int(columns.name[row])]
            assert found is not None
            if found[3]:
                self.odd = "the groups are sharded over several meshes"
            yield _Mark(float(columns.start[row]), float(columns.end[row]), found[1], found[2] or _ROOT)

    def _backward(self, moment_s: float) -> bool:
        return self.step.phases.within(moment_s) == "backward"

    def _follow(self, marks: Sequence[_Mark]) -> None:
        """Record how the state of the host changes at the start and the end of each mark."""
        lasting = [m for m in marks if m.start_s < m.end_s]
        edges = [(m.start_s, True, m) for m in lasting] + [(m.end_s, False, m) for m in lasting]
        own, hook, behind = list[_Mark](), _ROOT, -1
        opened: dict[str, int] = {}  # for each computing group, the innermost last, the number of its module
        for moment, begins, mark in sorted(edges):
            if _OWN.fullmatch(mark.what):
                own = [*own, mark] if begins else [m for m in own if m != mark]
            if begins:
                hook = mark.path if mark.what in ("pre_forward", "pre_backward") else hook
                behind = self._begin(mark, opened, behind)
            path = next(reversed(opened), _ROOT)
            self.times.append(moment)
            self.states.append(_State(own[-1] if own else None, hook, path, opened.get(path, behind)))

    def _begin(self, mark: _Mark, opened: dict[str, int], behind: int) -> int:
        """Open or close a group; return the number of the group before the root's next computation (-1 for none)."""
        what, path, backward = mark.what, mark.path, self._backward(mark.start_s)
        if what == "root_pre_forward" and not backward:
            self.batches += 1
            opened.clear()
            return -1
        if what == "pre_forward" and not backward and path:
            if path not in self.order:
                self.order.append(path)
            self.opened[path] += path not in opened
            opened[path] = opened.get(path, -1) + 1
            self.parts[path] = max(self.parts.get(path, 0), opened[path] + 1)
            return self.order.index(path)
        if what == "pre_backward" and path in self.order and path not in opened:
            for late in self.late:  # the group's computation has ended, although the group is not reduced yet
                opened.pop(late, None)
            opened[path] = 0
            return self.order.index(path) - 1
        if what == "post_backward_accumulate" or (what == "post_forward" and not backward):
            opened.pop(path, None)
        return behind

    def _at(self, moment_s: float) -> _State:
        k = bisect_right(self.times, moment_s) - 1
        return self.states[k] if k >= 0 else _State(None, _ROOT, _ROOT, -1)

    def _send(self) -> None:
        """Record the collectives of each group."""
        step = self.step
        issued = sorted(collectives(step.trace, step.interval.start_s, step.interval.end_s), key=lambda a: a.host_s)
        for activity, transfer in zip(issued, step.transfers, strict=True):
            state, found = self._at(activity.host_s), describe(step.trace, activity)
            if state.own is None:
                continue
            if found.kind not in ("all_gather", "reduce_scatter"):
                self.odd = "gradients are all-reduced, too, because the model is replicated (HSDP)"
                continue
            if found.nbytes is None:
                self.odd = "the trace does not tell the sizes of the collectives (record_shapes=True records them)"
            path, backward, nbytes = state.own.path, self._backward(activity.host_s), found.nbytes or 0
            kind, ranks, ahead = "scatter", found.ranks or self.workers, 0
            if found.kind == "all_gather":
                kind, nbytes = "gather", nbytes * ranks
            else:
                self.reduced_at[state.own] = activity.host_s
            if path in self.order and state.hook in self.order:
                ahead = self.order.index(path) - self.order.index(state.hook)
            seconds = max(transfer.end_s - transfer.began_s, 0.0)
            sent = _Sent(backward, nbytes, seconds, ranks, found.itemsize or 4, -ahead if backward else ahead)
            self.collectives[kind, path].append(sent)

    def _compute(self) -> None:
        """Add up the times of computation, including the device's waits for its host before each computation."""
        step = self.step
        passes_end_s = max((p.end_s for p in step.phases.passes), default=step.phases.backward_s)
        busy = [(op.start_s, op.end_s, float(host)) for op, host in zip(step.ops, step.host_s, strict=True)]
        busy += [(t.start_s, t.end_s, math.nan) for t in step.transfers]
        until = computed = step.begin_s
        idle_s = 0.0
        for start, end, host_s in sorted(busy, key=lambda span: span[:2]):
            idle_s += max(start - until, 0.0)
            until = max(until, end)
            if math.isnan(host_s):
                continue
            state = self._at(host_s)
            if state.own is not None:
                packs = host_s < self.reduced_at.get(state.own, host_s) or state.own.what == "all_gather_copy_out"
                if packs or not step.on_device:  # on a device, other work of FSDP runs on other streams
                    self.copying_s += end - start
                continue
            took, idle_s, computed = idle_s + max(end - max(start, computed), 0.0), 0.0, max(computed, end)
            if host_s > passes_end_s:
                self.update_s += took
            else:
                self.seconds[self._backward(host_s), state.path, state.part] += took
        self.update_s += idle_s + max(step.end_s - until, 0.0)
