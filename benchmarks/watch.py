"""Cost of `legato watch`: the steps of a training with and without it, in runs that take turns.

    python benchmarks/watch.py

A DDP training on two ranks of this machine, over gloo, prints how long its steps take. A watched run has five kinds of
steps: steps before the recording, steps recorded under the profiler, the step in which traces are saved, steps during
which the traces are judged, and later steps. The median of each kind is compared with the median step of the preceding
run without `legato watch`.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PAIRS, STEPS, WIDTH, LAYERS = 5, 1500, 256, 6
AFTER = 300
FIRST, LAST = AFTER, AFTER + 6  # the steps under the profiler
KINDS = ("before", "recorded", "saved", "judged", "after")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable)


def kind(step):
    if step <= LAST:
        return "before" if step < FIRST else "recorded" if step < LAST else "saved"
    return "judged" if any(thread.name == "legato watch" for thread in threading.enumerate()) else "after"


def train():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, WIDTH)
    steps = {name: [] for name in KINDS}
    for step in range(STEPS):
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step > 2:
            steps[kind(step)].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps(steps), flush=True)
    dist.destroy_process_group()


def run(*watch):
    # The exit status does not count: gloo sometimes aborts a rank at its end, with and without watch.
    done = subprocess.run([*TORCHRUN, *watch, __file__], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return json.loads(done.stdout)


def main():
    ratios = {name: [] for name in KINDS}
    for pair in range(PAIRS):
        plain, watched = run(), run("-m", "legato", "watch", "--after", str(AFTER))
        for name in KINDS:
            base = statistics.median(plain["after"] if name in ("judged", "after") else plain["before"])
            if watched[name]:
                ratios[name].append(statistics.median(watched[name]) / base)
        print(
            f"pair {pair + 1}: " + ", ".join(f"{name} {values[-1]:.3f}x" for name, values in ratios.items() if values)
        )
    print("median of the pairs: " + ", ".join(f"{name} {statistics.median(v):.3f}x" for name, v in ratios.items() if v))


if __name__ == "__main__":
    train() if "RANK" in os.environ else main()
