"""A profiler's trace of one step of FSDP2 on a GPU, which does what the rules in `legato.fsdp` say.

The host marks what it does as torch does, and runs far ahead of its device.
"""

import random
from contextlib import contextmanager

from legato.core.wrapping import Group, Wrapping
from legato.fsdp.rules import _Rules
from support.kineto_samples import Recorder

#: Microseconds between two events of the host, and what the optimizer takes.
TICK_US, UPDATE_US = 10, 50
COMPUTE, GATHER, SCATTER, REPLICAS = 7, 20, 21, 22


def trace(units, wrapping, costs, precision, *, rank=0, workers=None, number=3):
    """(the text of a trace, the step that the rules predict)."""
    rules = _Rules(units, wrapping, costs, precision)
    step = rules.step()
    run = _Traced(units, wrapping, costs, precision, Recorder(rank, workers or costs.ranks), rules.moments, step.pieces)
    run.write()
    return run.finished(number, step.seconds), step


def random_wrapping(seed, units):
    """Groups of 1 to 3 units, some of them left to the root, with depths and buffers."""
    draw, groups, at = random.Random(seed), [], 0
    while at < len(units):
        size = draw.randint(1, 3)
        if draw.random() < 0.8:
            paths = tuple(unit.path for unit in units[at : at + size])
            groups.append(Group(paths, draw.choice([True, True, False, 4])))
        at += size
    return Wrapping("traced", tuple(groups), draw.choice([0, 2]), draw.choice([0, 2, 3]), draw.choice([1, 2]))


class _Traced(_Rules):
    def __init__(self, units, wrapping, costs, precision, recorder, moments, pieces):
        super().__init__(units, wrapping, costs, precision)
        self.recorder, self.precision, self.moments, self.pieces = recorder, precision, moments, pieces
        self.now = TICK_US  # of the host
        self.batch, self.callback = 0, None

    def tick(self):
        self.now += TICK_US
        return self.now

    @contextmanager
    def mark(self, what, k=None):
        group = None if k is None or k == self.root else self.wrapping.groups[k]
        path = "" if group is None else f" ({', '.join(group.modules)})"
        begun = self.tick()
        yield
        self.recorder.event("user_annotation", f"FSDP::{what}{path}", 1, begun, self.tick() - begun)

    def kernel(self, name, start_s, end_s, stream=COMPUTE, **args):
        self.recorder.launch(self.tick(), 1, start_s * 1e6, (end_s - start_s) * 1e6, name, stream, **args)

    def finished(self, number, seconds):
        end = self.tick()
        self.recorder.event("user_annotation", "Optimizer.step#AdamW.step", 1, end, 3 * TICK_US)
        self.kernel("update", seconds, seconds + UPDATE_US * 1e-6)
        mark = ("user_annotation", f"ProfilerStep#{number}", 1, 0, self.tick() + TICK_US)
        self.recorder.event(*mark)
        self.recorder.events.insert(0, self.recorder.events.pop())
        return self.recorder.text()

    def _forward(self):
        self.batch += 1
        with self.mark("root_pre_forward"):
            pass
        self.recorder.event("cpu_op", "aten::linear", 1, self.tick(), 1, **{"Sequence number": self.batch})
        super()._forward()

    def _backward(self, **options):
        self.begun = self.tick()
        super()._backward(**options)
        mark = "FSDP::root_post_backward_callback"
        self.recorder.event("user_annotation", mark, 1, self.callback, self.tick() - self.callback)

    def _by_name(self):
        node = {"Sequence number": self.batch, "Fwd thread id": 1}
        name = "autograd::engine::evaluate_function: MmBackward0"
        self.recorder.event("cpu_op", name, 1, self.begun, self.tick() - self.begun, **node)
        self.callback = self.tick()
        return super()._by_name()

    def _before_forward(self, k):
        with self.mark("pre_forward", k):
            super()._before_forward(k)

    def _after_forward(self, k):
        with self.mark("post_forward", k):
            super()._after_forward(k)

    def _before_backward(self, k):
        with self.mark("pre_backward", k):
            super()._before_backward(k)

    def _after_backward(self, k, *args):
        with self.mark("post_backward_accumulate", k):
            pass
        if len(self.buffers) >= self.wrapping.buffers:
            with self.mark("post_backward_rs_wait", k):
                pass
        super()._after_backward(k, *args)

    def _gather(self, k):
        ranks = self.groups[k].reshard if self.state[k].in_host else self.costs.ranks
        before = len(self.issued)
        super()._gather(k)
        if len(self.issued) > before:
            piece, size = self.pieces[before], self.precision.gathered
            with self.mark("all_gather", k):
                self.kernel("copy in", piece.start_s, piece.start_s, GATHER)
                self.collective("AllGather", "_allgather_base", piece, piece.nbytes // ranks, size, ranks, GATHER)

    def _copy_out(self, k, *, forward):
        before = len(self.issued)
        super()._copy_out(k, forward=forward)
        if len(self.issued) > before:
            with self.mark("all_gather_copy_out", k):
                self.kernel("copy out", self.pieces[before].start_s, self.pieces[before].end_s)

    def _reduce(self, k, everywhere):
        packed, before, ranks = self.moments[len(self.actions)], len(self.issued), self.costs.ranks
        super()._reduce(k, everywhere)
        nbytes, size = self.groups[k].scattered, self.precision.reduced
        with self.mark("post_backward_reduce", k):
            self.kernel("chunk cat", packed - self.costs.copy_s_per_byte * nbytes, packed)
            piece = self.pieces[before]
            self.collective("ReduceScatter", "_reduce_scatter_base", piece, nbytes, size, ranks, SCATTER)
            for piece in self.pieces[before + 1 : len(self.issued)]:
                self.collective("AllReduce", "allreduce", piece, piece.nbytes, size, 2, REPLICAS)
            self.kernel("divide", piece.end_s, piece.end_s, SCATTER)

    def collective(self, kernel, name, piece, nbytes, itemsize, ranks, stream):
        described = {"Collective name": name, "In msg nelems": nbytes // itemsize, "Group size": ranks}
        described["dtype"] = {2: "BFloat16", 4: "Float"}[itemsize]
        self.kernel(f"ncclDevKernel_{kernel}_RING_LL", piece.start_s, piece.end_s, stream, **described)

    def _compute(self, kind, u, seconds, *, gradients=0):
        group = self.groups[self.group_of[u]]
        if kind == "forward" and self.group_of[u] != self.root and u != group.first:
            with self.mark("pre_forward", self.group_of[u]):
                pass
        super()._compute(kind, u, seconds, gradients=gradients)
        self.kernel(
            f"{kind} {self.units[u].path}",
            self.pieces[len(self.issued) - 1].start_s,
            self.pieces[len(self.issued) - 1].end_s,
        )
