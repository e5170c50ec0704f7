"""A profiler's trace of one training step, made by a small model of a GPU: every figure in it is known.

The host launches two forward kernels, a backward pass of two layers whose DDP
bucket is sent after each, and an optimizer kernel. Times are microseconds.
"""

import json

LAYERS = 2
#: Of each layer: elements of its weight (float).
ELEMENTS = (1000, 3000)


class Recorder:
    def __init__(self, rank=0, workers=2, shapes=True):
        self.events, self.shapes, self._correlation = [], shapes, 100
        self.header = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": workers},
        }

    def event(self, cat, name, tid, ts, dur, **args):
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def launch(self, host, tid, start, dur, name="kernel", stream=7, **args):
        self._correlation += 1
        self.event("cuda_runtime", "cudaLaunchKernel", tid, host, 2, correlation=self._correlation)
        self.event("kernel", name, stream, start, dur, stream=stream, correlation=self._correlation, **args)

    def text(self):
        return json.dumps(self.header | {"traceEvents": self.events, "traceName": "made"})


def record(rank=0, workers=2, shapes=True, late_us=0, at_us=0, number=3, recorder=None, sequence=70):
    """One step that begins at `at_us`; this rank's collectives wait for one that is `late_us` late.

    The forward pass has sequence numbers from `sequence` on.
    """
    r = recorder or Recorder(rank, workers, shapes)
    t = at_us
    r.event("user_annotation", f"ProfilerStep#{number}", 1, t, 1000)
    for layer in range(LAYERS):
        r.event("cpu_op", "aten::linear", 1, t + 10 + 50 * layer, 30, **{"Sequence number": sequence + layer})
        r.launch(t + 20 + 50 * layer, 1, t + 25 + 100 * layer, 100, f"forward{layer}")
    # The device computes until 225. The host is late with the backward pass: it launches at 300.
    for k, layer in enumerate(reversed(range(LAYERS))):
        host = t + 300 + 150 * k
        node = {"Sequence number": sequence + layer, "Fwd thread id": 1}
        r.event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 2, host - 10, 30, **node)
        r.event("cpu_op", "MmBackward0", 2, host - 5, 20, **node)
        r.launch(host, 2, host + 5, 120, f"backward{layer}")
        r.event("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 2, host + 30, 60)
        dims = {"Input Dims": [[ELEMENTS[layer]]], "Input type": ["float"]} if shapes else {}
        r.event("cpu_op", "torch::autograd::AccumulateGrad", 2, host + 35, 5, **dims)
        r.event("user_annotation", "nccl:all_reduce", 2, host + 60, 20)
        sizes = {"Collective name": "allreduce", "In msg nelems": ELEMENTS[layer], "dtype": "Float"}
        r.launch(host + 65, 2, host + 130, 40 + late_us, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, **sizes)
    # The last transfer ends at 620 + late; the optimizer's kernel is launched at 600 and waits for it.
    r.event("user_annotation", "Optimizer.step#SGD.step", 1, t + 595, 100)
    r.launch(t + 600, 1, t + 620 + late_us, 50, "update")
    return r


def accumulated(sends_early=False):
    """A step of 2,000 us with two forward and two backward passes; only the second is followed by the optimizer."""
    r = record()
    r.events[0]["dur"] = 2000
    early = ("Optimizer", "update") if sends_early else ("Optimizer", "update", "nccl")
    dropped = {e["args"].get("correlation") for e in r.events if e["name"].startswith(early)} - {None}
    r.events = [e for e in r.events if not e["name"].startswith(early) and e["args"].get("correlation") not in dropped]
    first = len(r.events)
    record(at_us=1000, recorder=r, sequence=80)
    del r.events[first]  # its step's mark
    return r


#: When the host begins each step of `ahead`, and ends the last one, in microseconds: unevenly, and far ahead.
HOST_US = (0, 400, 500, 2400, 2900)
#: When the device begins the first of them, and how long it takes for each.
FREE_US, PERIOD_US = 1200, 1000


def ahead(rank=0, workers=2, late_us=0, unlaunched=False, shapes=True, sized=True):
    """Four steps of a job whose host runs ahead of its device, which is never idle.

    Of each period the device computes for 940 us, and sends for 310, of which 60
    are exposed. The second transfer of each step waits `late_us` more. With
    `unlaunched` the device runs kernels before that were launched before the
    trace began.
    """
    r = Recorder(rank, workers, shapes)
    if unlaunched:
        for name, stream, start, dur in (("backward", 7, 100, 900), ("ncclDevKernel_AllReduce", 20, 150, 1050)):
            r.event("kernel", name, stream, start, dur, stream=stream, correlation=1)
    for k, host in enumerate(HOST_US[:-1]):
        begin = FREE_US + (PERIOD_US + late_us) * k
        r.event("user_annotation", f"ProfilerStep#{k}", 1, host, HOST_US[k + 1] - host)
        for layer in range(LAYERS):
            r.event("cpu_op", "aten::linear", 1, host + 1 + 5 * layer, 4, **{"Sequence number": 70 + layer})
            r.launch(host + 2 + 5 * layer, 1, begin + 150 * layer, 150, f"forward{layer}")
        sends = [(600, 250), (900, 60 + late_us)]
        for layer, (sent, takes) in zip(reversed(range(LAYERS)), sends, strict=True):
            at = host + 20 + 20 * (LAYERS - layer)
            node = {"Sequence number": 70 + layer, "Fwd thread id": 1}
            r.event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 2, at, 5, **node)
            r.event("cpu_op", "MmBackward0", 2, at + 1, 3, **node)
            r.launch(at + 2, 2, begin + 300 * (LAYERS - layer), 300, f"backward{layer}")
            r.event("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 2, at + 6, 8)
            dims = {"Input Dims": [[ELEMENTS[layer]]], "Input type": ["float"]} if shapes else {}
            r.event("cpu_op", "torch::autograd::AccumulateGrad", 2, at + 7, 1, **dims)
            r.event("user_annotation", "nccl:all_reduce", 2, at + 9, 3)
            sizes = (
                {"Collective name": "allreduce", "In msg nelems": ELEMENTS[layer], "dtype": "Float"} if sized else {}
            )
            r.launch(at + 10, 2, begin + sent, takes, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, **sizes)
        r.event("user_annotation", "Optimizer.step#SGD.step", 1, host + 80, 10)
        r.launch(host + 81, 1, begin + 960 + late_us, 40, "update")
    return r


def on_host(*collectives, rank=0, workers=2, zero_us=()):
    """One step of 1,000 us on a CPU, under gloo: it computes 100 us forward, 100 backward, and 40 in the optimizer.

    The parameter of 1,000 elements has its gradient at 440. Operators of no length run at the times `zero_us`.
    """
    r = Recorder(rank, workers)
    r.event("user_annotation", "ProfilerStep#3", 1, 0, 1000)
    r.event("cpu_op", "aten::linear", 1, 10, 100, **{"Sequence number": 70})
    node = {"Sequence number": 70, "Fwd thread id": 1}
    r.event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 1, 300, 115, **node)
    r.event("cpu_op", "AddmmBackward0", 1, 305, 110, **node)
    r.event("cpu_op", "aten::mm", 1, 310, 100)
    r.event("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 1, 420, 60)
    dims = {"Input Dims": [[1000]], "Input type": ["float"]}
    r.event("cpu_op", "torch::autograd::AccumulateGrad", 1, 425, 5, **dims)
    r.event("user_annotation", "Optimizer.step#SGD.step", 1, 800, 100)
    r.event("cpu_op", "aten::add_", 1, 810, 40)
    for at in zero_us:
        r.event("cpu_op", "aten::resolve_neg", 1, at, 0)
    for collective in collectives:
        issued(r, **collective)
    return r


def issued(r, op, mark, at, begins, takes, elements=1000, kind="float", wait=None, inside=(), waits_by="wait_tensor"):
    """A collective that the operator `c10d::op` issues and gloo's thread carries out, and who waits for it until when.

    `inside` are the (category, name, start, duration) of what surrounds the operator.
    """
    for category, name, start, dur in inside:
        r.event(category, name, 1, start, dur)
    shape = {"Input Dims": [[elements]], "Input type": [kind]}
    scatters = op == "_reduce_scatter_base_"
    dims = [[elements // 2], [elements]] if scatters else [[[elements]], []]
    types = [kind, kind] if scatters else ["TensorList", ""]
    r.event("cpu_op", f"c10d::{op}", 1, at, 4, **{"Input Dims": dims, "Input type": types})
    r.event("cpu_op", "aten::chunk", 1, at + 1, 2)
    r.event("user_annotation", f"gloo:{mark}", 9, begins, takes, **shape)
    r.event("cpu_op", "aten::copy_", 9, begins + 1, takes - 2)
    if wait is not None and waits_by == "wait_tensor":
        r.event("cpu_op", "_c10d_functional::wait_tensor", 1, at + 5, wait - at - 5)
        r.event("cpu_op", "aten::view", 1, at + 6, 1)
    elif wait is not None:
        r.event("python_function", waits_by, 1, at + 5, wait - at - 5)
