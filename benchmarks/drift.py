"""Cost of observing the pace of training, as a share of the time of training.

    python benchmarks/drift.py [--windows 3]

A model trains in one process, where messages arrive at once. The benchmark
times, including callbacks, everything that runs only for this observation: a
check in every pass, and the tracing of two passes of fifty. The model is small
and every tensor is a message, so the share is larger than in most training.
(Two runs, with and without observation, would differ by less than the noise of
a shared machine.)
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

from legato.core.plan import Message, Plan, Slice
from legato.pytorch import attach, attachment
from legato.pytorch.parameters import trained_parameters
from legato.pytorch.runtime.attached import drift
from legato.pytorch.runtime.attached.drift import DriftMonitor
from legato.pytorch.runtime.sending.tracing import Tracer


class Meter:
    """Adds up the seconds that calls of some methods take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: type, name: str) -> None:
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=3)
    passes = parser.parse_args().windows * drift.WINDOW
    torch.set_num_threads(1)
    meter = Meter()
    for owner, name in (
        (DriftMonitor, "pass_begins"),
        (Tracer, "switch"),
        (Tracer, "message"),
        (Tracer, "end_forward"),
    ):
        meter.watch(owner, name)
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(20)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        slices = [Slice(n, 0, p.numel() * p.element_size()) for n, p in reversed(trained_parameters(model).items())]
        plan = Plan("per tensor", tuple(Message((s,)) for s in slices), forward_overlap=True)
        wrapped, optimizer = attach(model, optimizer, plan)
        x = torch.randn(256, 256)
        start = time.perf_counter()
        for _ in range(passes):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
        attachment(wrapped).flush()
        total = time.perf_counter() - start
        dist.destroy_process_group()
    print(f"{len(slices)} messages, {total / passes * 1e3:.1f} ms a pass, {meter.seconds / total:.3%} of it for this")


if __name__ == "__main__":
    main()
