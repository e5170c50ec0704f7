"""Predicted and measured times where computation and messages share a machine: real models, real arithmetic.

    python benchmarks/contention.py                               # four models, loopback and links of 1, 2 and 5 Gbit
    python benchmarks/contention.py --models bert --links 1Gbit --schedulers ddp,legato

Two workers with one core each train a model, over loopback or between hosts with links of a
given rate. The workers capture the model, calibrate the network alone and during the model's
computation, and plan with every scheduler whose plans can be run. Then DDP itself and all plans
take turns in blocks of `--steps` steps. Before each block, the model computes alone; the ranks
then wait for each other after every step, as they do in training. Rows compare the median of a
plan's blocks with its prediction, at the pace that computation alone had: the pace of a machine
that others use changes from one minute to the next, and the benchmark does not try to predict
it. `before` is the error of the prediction without contention.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from legato.core.cluster import Contention
from legato.core.quantities import parse_bandwidth
from legato.core.text import percent
from legato.core.units import format_seconds
from legato.lab.testbed.launch import run_workers

WORKERS = 2
ALONE, DDP = "alone", "DDP"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet-50,gpt2-small,bert,convnext")
    parser.add_argument("--links", default="loopback,1Gbit,2Gbit,5Gbit")
    parser.add_argument("--schedulers", default="all")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, default=Path("contention.json"))
    chosen = parser.parse_args()
    runs = json.loads(chosen.output.read_text()) if chosen.output.exists() else []
    for link in chosen.links.split(","):
        for model in chosen.models.split(","):
            runs.append(measure(model, link, chosen.schedulers, chosen.steps, chosen.rounds))
            chosen.output.write_text(json.dumps(runs))
            show(runs[-1])
    for kind in ("error", "before"):
        errors = [abs(row[kind]) for run in runs for row in run["rows"] if kind in row]
        print(f"{len(errors)} predictions, {kind}: {statistics.median(errors):.1%} (median), {max(errors):.1%} (worst)")


def measure(model: str, link: str, schedulers: str, steps: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        module = [str(Path(__file__).stem), model, schedulers, str(steps), str(rounds), str(result)]
        os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the workers find this file
        bandwidth_bps = None if link == "loopback" else parse_bandwidth(link)
        run_workers(module, WORKERS, Path(folder) / "log", lambda *_: None, bandwidth_bps)
        return {"model": model, "link": link, **json.loads(result.read_text())}


def show(run: dict[str, Any]) -> None:
    contention = msgspec.convert(run["cluster"]["contention"], Contention)
    print(f"{run['model']}, {run['link']}; {contention}")
    alone = format_seconds(run["alone_s"])
    print(f"  computation alone {alone}, {percent(run['pace'] - 1, signed=True)} against that of calibration")
    for row in sorted(run["rows"], key=lambda row: row["measured_s"]):
        line = f"  {row['scheduler']:14} {format_seconds(row['measured_s']):>9}"
        if "error" in row:
            line += (
                f", {row['messages']:3} messages, predicted {format_seconds(row['predicted_s']):>9} "
                f"({percent(row['error'], signed=True)}; before {percent(row['before'], signed=True)})"
            )
        print(line)
    sys.stdout.flush()


def worker(model: str, schedulers: str, steps: int, rounds: int, output: Path) -> None:
    """One rank; rank 0 writes the rows."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from legato.core import files
    from legato.core.plan import Plan
    from legato.lab.demo.models import MODELS
    from legato.lab.testbed.rank import gloo_rank
    from legato.pytorch.network.agreement import broadcast_bytes
    from legato.pytorch.network.calibrate import calibrate, sizes_up_to
    from legato.pytorch.recording.capture import at_pace, capture
    from legato.pytorch.runtime.attached.attach import attach, attachment, attachment_of
    from legato.schedule.compare import compare
    from legato.simulator.collective import iteration_time

    builds = MODELS | more_models()

    def built() -> Any:
        torch.manual_seed(20)
        return builds[model]()

    def train(training: Any, wrapped: Any, count: int) -> float:
        """The seconds of an iteration, from the start of one backward pass to the start of the next."""
        dist.barrier()
        began = []
        for _ in range(count + 1):
            training.optimizer.zero_grad()
            loss = training.loss(wrapped)
            began.append(time.perf_counter())
            loss.backward()
            training.optimizer.step()
        if (attached := attachment_of(wrapped)) is not None:
            attached.flush()
        return (began[-1] - began[0]) / count

    def compute_alone(training: Any, count: int) -> float:
        """The seconds of an iteration without messages, on the slower rank."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            training.optimizer.zero_grad()
            training.loss(training.model).backward()
            training.optimizer.step()
            dist.barrier()
        return (time.perf_counter() - began) / count

    with gloo_rank():
        training = built()
        step = functools.partial(training.loss, training.model)
        workload = capture(training.model, training.optimizer, step, name=model)

        def compute() -> None:
            training.optimizer.zero_grad()
            training.loss(training.model).backward()

        cluster = (calibration := calibrate(sizes=sizes_up_to(workload.nbytes), compute=compute)).cluster
        workload = at_pace(workload, calibration.compute_s)
        content = b""
        if dist.get_rank() == 0:
            names = () if schedulers == "all" else schedulers.split(",")
            candidates = [c for c in compare(workload, cluster, names) if c.runnable]
            content = msgspec.json.encode([c.plan for c in candidates])
        content = broadcast_bytes(content, dist.group.WORLD)
        plans = {plan.scheduler: plan for plan in msgspec.json.decode(content, type=list[Plan])}
        theirs, own = built(), built()
        ddp = nn.parallel.DistributedDataParallel(theirs.model)
        ours, _ = attach(own.model, own.optimizer, next(iter(plans.values())))
        measured: dict[str, list[float]] = {name: [] for name in (DDP, *plans)}
        alone: list[float] = []
        for _ in range(rounds):
            for name, times in measured.items():
                alone.append(compute_alone(training, steps))
                if name in plans:
                    attachment(ours).adopt(plans[name])
                who, wrapped = (theirs, ddp) if name == DDP else (own, ours)
                times.append(train(who, wrapped, steps))
        if dist.get_rank() == 0:
            alone_s = statistics.median(alone)
            pace = alone_s / workload.compute_s
            passes_s = sum(op.duration_s for op in workload.ops if op.phase != "optimizer")
            workload = at_pace(workload, passes_s * pace)
            uncontended = msgspec.structs.replace(cluster, contention=None)
            rows = []
            for name, times in measured.items():
                row = {"scheduler": name, "measured_s": (seconds := statistics.median(times))}
                plan = plans.get("ddp" if name == DDP else name)
                if plan is not None:
                    with_s, without_s = (iteration_time(workload, plan, c) for c in (cluster, uncontended))
                    row |= {"predicted_s": with_s, "messages": len(plan.messages)}
                    row |= {"error": with_s / seconds - 1, "before": without_s / seconds - 1}
                rows.append(row)
            found = {"rows": rows, "alone_s": alone_s, "pace": pace}
            found |= {"times": {ALONE: alone, **measured}}
            found |= msgspec.to_builtins({"cluster": cluster, "workload": workload, "plans": plans})
            files.write_text(output, json.dumps(found))


def more_models() -> dict[str, Any]:
    import torch
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        ConvNextConfig,
        ConvNextForImageClassification,
    )

    from legato.lab.demo.models import Training

    def bert() -> Training:
        """Four layers of width 256, four sequences of 64 tokens per step."""
        model = BertForSequenceClassification(
            BertConfig(
                num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=1024, vocab_size=8000
            )
        )
        x, y = torch.randint(0, 8000, (4, 64)), torch.randint(0, 2, (4,))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return Training(model, optimizer, lambda m: m(input_ids=x, labels=y).loss, 4)

    def convnext() -> Training:
        """Ten blocks, two images of 96 x 96 pixels per step."""
        shape = ConvNextConfig(depths=[2, 2, 4, 2])
        shape.num_labels = 100
        model = ConvNextForImageClassification(shape)
        x, y = torch.randn(2, 3, 96, 96), torch.randint(0, 100, (2,))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        return Training(model, optimizer, lambda m: m(pixel_values=x, labels=y).loss, 2)

    return {"bert": bert, "convnext": convnext}


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
