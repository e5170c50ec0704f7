"""Cost of cutting compiled graphs, and the times and the order in which messages are then sent.

In one process, where messages arrive at once:

    python benchmarks/compiled.py [--backends aot_eager,inductor] [--models resnet-50,...] [--blocks 10]
    python benchmarks/compiled.py --order 50 --models inception-v3,towers,gpt2-small

For each model and backend of `torch.compile`, the benchmark measures the CPU time of an
iteration with a plan of twelve messages, whose graphs are cut. It divides this time by the time
with a plan of one message, whose graphs are whole, and by the time with
DistributedDataParallel, which splits graphs by modules. Each kind runs in a separate process;
the processes take turns in blocks of three iterations, and a ratio is the median over pairs of
neighbouring blocks. Then the benchmark prints when each message is sent, as a share of the
backward pass, with and without cuts.

With `--order`, it trains with `caramel`'s plan for a captured step, and counts the
iterations in which gradients become ready in the order of the plan.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import tempfile
import time
from typing import Any

BLOCK = 3
MESSAGES = 12
KINDS = ("whole", "cut", "ddp")


def plan_of(model: Any, messages: int) -> Any:
    """So many messages of about the same size, the last parameters' first."""
    from legato.core.plan import Message, Plan, Slice
    from legato.pytorch.parameters import trained_parameters

    slices = [Slice(n, 0, p.numel() * p.element_size()) for n, p in reversed(trained_parameters(model).items())]
    total, sent = sum(s.stop for s in slices), 0
    groups: list[list[Slice]] = [[] for _ in range(messages)]
    for piece in slices:
        groups[min(messages - 1, sent * messages // total)].append(piece)
        sent += piece.stop
    return Plan(f"{messages} messages", tuple(Message(tuple(group)) for group in groups if group))


def trainings() -> dict[str, Any]:
    import torch
    from contention import more_models
    from torch import nn

    from legato.lab.demo.models import MODELS, Training

    class Towers(nn.Module):
        """Two towers of different widths, and their product."""

        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(512, 512), nn.GELU())))
            self.right = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.GELU())))
            self.a, self.b = nn.Linear(512, 256), nn.Linear(1024, 256)

        def forward(self, x: Any, y: Any) -> Any:
            return (self.a(self.left(x)) * self.b(self.right(y))).mean()

    def towers() -> Training:
        model = Towers()
        x, y = torch.randn(64, 512), torch.randn(64, 1024)
        return Training(model, torch.optim.SGD(model.parameters(), lr=1e-3), lambda m: m(x, y), 64)

    def inception() -> Training:
        model = inception_v3()
        x = torch.randn(4, 3, 139, 139)
        return Training(model, torch.optim.SGD(model.parameters(), lr=1e-3), lambda m: m(x).square().mean(), 4)

    return {**MODELS, **more_models(), "towers": towers, "inception-v3": inception}


def inception_v3() -> Any:
    """Inception-v3 (Szegedy et al. 2015, without the auxiliary classifier): 94 convolutions in branches."""
    import torch
    from torch import nn

    class Branches(nn.Module):
        """Runs branches on the same input, and concatenates their results."""

        def __init__(self, *branches: Any) -> None:
            super().__init__()
            self.branches = nn.ModuleList(branches)

        def forward(self, x: Any) -> Any:
            return torch.cat([branch(x) for branch in self.branches], 1)

    def conv(inputs: int, outputs: int, kernel: Any = 1, stride: int = 1, same: bool = True) -> Any:
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (size[0] // 2, size[1] // 2) if same else 0
        convolution = nn.Conv2d(inputs, outputs, size, stride, padding, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU())

    def chain(inputs: int, *layers: Any) -> Any:
        units = []
        for outputs, *options in layers:
            units.append(conv(inputs, outputs, *options))
            inputs = outputs
        return nn.Sequential(*units)

    def pooled(inputs: int, outputs: int) -> Any:
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(inputs, outputs))

    def a(n: int, pool: int) -> Any:
        fives, threes = chain(n, (48,), (64, 5)), chain(n, (64,), (96, 3), (96, 3))
        return Branches(conv(n, 64), fives, threes, pooled(n, pool))

    def c(n: int) -> Any:
        wide, tall = (1, 7), (7, 1)
        short = chain(768, (n,), (n, wide), (192, tall))
        return Branches(
            conv(768, 192), short, chain(768, (n,), (n, tall), (n, wide), (n, tall), (192, wide)), pooled(768, 192)
        )

    def split(n: int) -> Any:
        return Branches(conv(n, 384, (1, 3)), conv(n, 384, (3, 1)))

    def e(n: int) -> Any:
        first, second = nn.Sequential(conv(n, 384), split(384)), nn.Sequential(*chain(n, (448,), (384, 3)), split(384))
        return Branches(conv(n, 320), first, second, pooled(n, 192))

    half = (3, 2, False)
    stem = chain(3, (32, *half), (32, 3, 1, False), (64, 3)), nn.MaxPool2d(3, 2)
    stem += chain(64, (80,), (192, 3, 1, False)), nn.MaxPool2d(3, 2)
    b = Branches(conv(288, 384, *half), chain(288, (64,), (96, 3), (96, *half)), nn.MaxPool2d(3, 2))
    tall = chain(768, (192,), (192, (1, 7)), (192, (7, 1)), (192, *half))
    d = Branches(chain(768, (192,), (320, *half)), tall, nn.MaxPool2d(3, 2))
    blocks = *stem, a(192, 32), a(256, 64), a(288, 64), b, c(128), c(160), c(160), c(192), d, e(1280), e(2048)

    class Inception(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(2048, 1000)

        def forward(self, x: Any) -> Any:
            return self.head(self.blocks(x).mean((2, 3)))

    return Inception()


def child(model: str, backend: str, kind: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    from legato.pytorch import attach, attachment

    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        torch.manual_seed(0)
        training = trainings()[model]()
        optimizer = training.optimizer
        training.model.compile(backend=backend)
        if kind == "ddp":
            wrapped: Any = torch.nn.parallel.DistributedDataParallel(training.model)
        else:
            plan = plan_of(training.model, MESSAGES if kind == "cut" else 1)
            wrapped, optimizer = attach(training.model, optimizer, plan)

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                training.loss(wrapped).backward()
                optimizer.step()

        began = time.perf_counter()
        steps(4)
        pipe.send(time.perf_counter() - began)
        while pipe.recv():
            start = time.process_time()
            steps(BLOCK)
            pipe.send((time.process_time() - start) / BLOCK)
        moments = []
        if kind != "ddp":
            with attachment(wrapped).trace() as timelines:
                steps(3)
            spans = timelines[0].spans
            backward_s = max(s.end_s for s in spans if s.kind == "backward")
            moments = sorted(s.start_s / backward_s for s in spans if s.kind == "message")
        pipe.send(moments)
        dist.destroy_process_group()


def measure(model: str, backend: str, blocks: int) -> None:
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for kind in KINDS:
        pipes[kind], theirs = context.Pipe()
        processes.append(context.Process(target=child, args=(model, backend, kind, theirs)))
        processes[-1].start()
        theirs.close()
        warm_s = pipes[kind].recv()
        print(f"{model:10} {backend:9} {kind:5} first steps in {warm_s:.1f} s", flush=True)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(blocks):
        for kind, pipe in pipes.items():
            pipe.send(True)
            times[kind].append(pipe.recv())
    moments = {}
    for kind, pipe in pipes.items():
        pipe.send(False)
        moments[kind] = pipe.recv()
    for process in processes:
        process.join()
    over = {
        kind: statistics.median(a / b for a, b in zip(times["cut"], times[kind], strict=True))
        for kind in ("whole", "ddp")
    }
    cut_ms = statistics.median(times["cut"]) * 1e3
    print(f"{model:10} {backend:9} cut {cut_ms:.1f} ms: {over['whole']:.3f} of whole, {over['ddp']:.3f} of DDP")
    for kind in ("whole", "cut"):
        print(f"{'':10} {kind}: messages at " + ", ".join(f"{moment:.0%}" for moment in moments[kind]), flush=True)


def follow(model: str, backend: str, iterations: int) -> None:
    """Print in how many iterations gradients become ready in the order of caramel's plan."""
    import torch.distributed as dist

    from legato.core.cluster import Cluster
    from legato.pytorch import attach
    from legato.pytorch.recording.capture import capture
    from legato.pytorch.runtime.attached.graph_sender import GraphSender
    from legato.schedule import schedule

    def noted(self: GraphSender, parameter: Any, grad: Any) -> None:
        found.append(self.reducer.delivery.by_parameter[id(parameter)].name)
        hand_over(self, parameter, grad)

    found: list[str] = []
    hand_over = GraphSender.hand_over
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        training = trainings()[model]()
        training.model.compile(backend=backend)
        workload = capture(training.model, training.optimizer, lambda: training.loss(training.model), runs=1)
        plan = schedule("caramel", workload, Cluster.derive(4, 1e9, 30e-6))
        place = {op: k for k, op in enumerate(plan.op_order or workload.iteration_order())}
        ready = {tensor.name: place[tensor.ready_after] for tensor in workload.tensors}
        captured = [ready[t.name] for t in sorted(workload.tensors, key=lambda t: t.ready_after)]
        wrapped, optimizer = attach(training.model, training.optimizer, plan)
        GraphSender.hand_over = noted  # type: ignore[method-assign]
        followed = []
        for _ in range(iterations + 3):
            found.clear()
            optimizer.zero_grad()
            training.loss(wrapped).backward()
            optimizer.step()
            places = [ready[name] for name in found]
            followed.append(len(set(found)) == len(ready) and places == sorted(places))
        moved = sum(a > b for a, b in itertools.pairwise(captured))
        dist.destroy_process_group()
    print(
        f"{model:12} {backend:9} {len(ready)} gradients of {len(plan.node_order)} nodes in order in "
        f"{sum(followed[3:])} of {iterations} iterations; {moved} would be out of order in the captured one",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="aot_eager,inductor")
    parser.add_argument("--models", default="resnet-50,gpt2-small,bert,towers")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--order", type=int, metavar="ITERATIONS", help="how long to train in caramel's order")
    chosen = parser.parse_args()
    for backend in chosen.backends.split(","):
        for model in chosen.models.split(","):
            if chosen.order:
                follow(model, backend, chosen.order)
            else:
                measure(model, backend, chosen.blocks)


if __name__ == "__main__":
    main()
