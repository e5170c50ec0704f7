"""Traces of a job with tensor and data parallelism, made by a small model of its GPUs: every figure in them is known.

Each layer has a kernel and an all-reduce of activations in each pass, which the next kernel waits for. Behind the
backward kernel its gradients are all-reduced on a stream of their own; the optimizer waits for them. Devices begin
`BEGIN_US` after their hosts. Times are microseconds.
"""

import random
from dataclasses import dataclass, field

from support.kineto_samples import Recorder

COMPUTE, TENSOR, DATA = 7, 20, 21
BEGIN_US = 1000
#: Elements of an activation and of a layer's gradient (float).
ACTIVATION, GRADIENT = 512, 3000


@dataclass
class MeshJob:
    """A job of `tensor` x `data` ranks; all that is random comes from `seed`."""

    tensor: int = 2
    data: int = 2
    layers: int = 3
    seed: int = 0
    named: bool = True  # the program names its process groups
    late_us: int = 0  # at most as late is the host with each kernel
    apart_us: int = 0  # at most as far apart are the clocks of the ranks
    forward: dict = field(init=False)

    def __post_init__(self):
        draw = random.Random(self.seed)
        ranks, layers = range(self.ranks), range(self.layers)
        self.forward = {(rank, layer): draw.randint(50, 150) for rank in ranks for layer in layers}
        self.backward = {(rank, layer): draw.randint(100, 300) for rank in ranks for layer in layers}
        self.host = {(rank, k): draw.randint(0, self.late_us) for rank in ranks for k in range(2 * self.layers + 1)}
        self.clock = {rank: draw.randint(0, self.apart_us) for rank in ranks}
        self.sums = draw.randint(20, 60)
        self.gradients = draw.randint(40, 400)
        self.update = {rank: draw.randint(30, 60) for rank in ranks}

    @property
    def ranks(self):
        return self.tensor * self.data

    def groups(self, stream):
        t, n = self.tensor, self.ranks
        if stream == TENSOR:
            return [tuple(range(first, first + t)) for first in range(0, n, t)]
        return [tuple(range(first, n, t)) for first in range(t)]

    def run(self, seconds=None, record=None):
        """When each rank is done, if communications take as many microseconds as `seconds` says of their streams."""
        takes = seconds or {TENSOR: self.sums, DATA: self.gradients}
        now, free = dict.fromkeys(range(self.ranks), 0.0), {}

        def compute(name, took, k):
            for rank in now:
                begins = max(now[rank], self.host[rank, k])
                now[rank] = begins + took[rank]
                if record:
                    record(rank, COMPUTE, name, begins, now[rank], None)

        def communicate(stream, waits):
            for group in self.groups(stream):
                if len(group) == 1:
                    continue
                starts = {rank: max(now[rank], free.get((rank, stream), 0.0)) for rank in group}
                end = max(starts.values()) + takes[stream]
                for rank in group:
                    free[rank, stream] = end
                    now[rank] = end if waits else now[rank]
                    if record:
                        record(rank, stream, "", starts[rank], end, group)

        for layer in range(self.layers):
            compute(f"forward{layer}", {r: self.forward[r, layer] for r in now}, layer)
            communicate(TENSOR, True)
        for layer in reversed(range(self.layers)):
            compute(f"backward{layer}", {r: self.backward[r, layer] for r in now}, 2 * self.layers - 1 - layer)
            communicate(DATA, False)
            communicate(TENSOR, True)
        for rank in now:
            now[rank] = max(now[rank], free.get((rank, DATA), 0.0))
        compute("update", self.update, 2 * self.layers)
        return [now[rank] for rank in range(self.ranks)]

    def traces(self):
        """The text of each rank's trace."""
        made = [_Rank(self, rank) for rank in range(self.ranks)]
        self.run(record=lambda rank, *what: made[rank].add(*what))
        return [rank.text() for rank in made]

    def write(self, folder):
        """The files of the traces, in the order of their ranks."""
        paths = [folder / f"rank{rank}.json" for rank in range(self.ranks)]
        for path, text in zip(paths, self.traces(), strict=True):
            path.write_text(text)
        return paths


class _Rank:
    """What the host of a rank launches, in the order in which it does; it is ahead of its device unless it is late."""

    def __init__(self, job, rank):
        self.job, self.rank, self.at, self.kernels = job, rank, 10 + job.clock[rank], 0
        self.r = Recorder(rank, job.ranks)
        groups = [(str(1 + k), "mesh_tp", g) for k, g in enumerate(job.groups(TENSOR)) if rank in g]
        groups += [(str(100 + k), "mesh_dp", g) for k, g in enumerate(job.groups(DATA)) if rank in g]
        self.group = dict(zip((TENSOR, DATA), groups, strict=True))
        self.r.header["distributedInfo"]["pg_config"] = [
            {"pg_name": name, "pg_desc": desc if job.named else "undefined", "pg_size": len(g), "ranks": list(g)}
            for name, desc, g in groups
        ]

    def add(self, stream, name, start, end, group):
        shift = BEGIN_US + self.job.clock[self.rank]
        if stream != COMPUTE:
            pg, desc, ranks = self.group[stream]
            args = {"Collective name": "allreduce", "dtype": "Float", "Group size": len(ranks)}
            args |= {"In msg nelems": GRADIENT if stream == DATA else ACTIVATION, "Process Group Name": pg}
            args |= {"Process Group Ranks": str(list(ranks)), "Process Group Description": desc}
            if not self.job.named:
                del args["Process Group Description"]
            self._node("AccumulateGrad" if stream == DATA else "MmBackward0")
            self._launch(self.at + 1, shift + start, end - start, "ncclDevKernel_AllReduce_Sum_f32", stream, args)
            return
        if self.kernels == self.job.layers:
            node = {"Sequence number": 70, "Fwd thread id": 1}
            self.r.event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 2, self.at, 3, **node)
            self.at += 5
        if name == "update":
            self.r.event("user_annotation", "Optimizer.step#SGD.step", 1, self.at, 2000)
        host = self.job.host[self.rank, self.kernels]
        self.kernels += 1
        late = host > 0 and start == host
        self._launch(shift + start - 0.5 if late else self.at + 1, shift + start, end - start, name, COMPUTE, {})

    def _node(self, what):
        if self.kernels > self.job.layers:
            self.r.event("cpu_op", f"autograd::engine::evaluate_function: {what}", 2, self.at - 1, 4)

    def _launch(self, host, start, takes, name, stream, args):
        self.r.launch(host, 2, start, takes, name, stream, **args)
        self.at = max(self.at, host) + 5

    def text(self):
        begin = self.job.clock[self.rank]
        self.r.event("user_annotation", "ProfilerStep#3", 1, begin, self.at + 10 - begin)
        return self.r.text()
