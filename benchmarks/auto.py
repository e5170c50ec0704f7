"""Is `plan="auto"` ever slower than DistributedDataParallel? Real models train with both in turns.

    python benchmarks/auto.py                              # two processes over loopback
    python benchmarks/auto.py --bandwidth 1Gbit            # two hosts with shaped links (as root)
    python benchmarks/auto.py --models mlp,many --all      # and every contestant of the tournament

For each model, one process group trains several copies of the model: one with DDP, one with
`plan="auto"` after its tournament, and with `--all` one with each plan of the tournament. The
copies take turns in blocks of steps. A ratio divides the time of auto's block by the time of the
DDP block in the same round; the benchmark prints the median of all ratios, with the quartiles.
`kept` is the part of the best contestant's gain over DDP that auto keeps. A second copy with DDP,
made and trained as late as auto's copy, shows how much the place of a model in memory matters: a
ratio says nothing if it is no farther from 1 than the ratio of this second copy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import legato
from legato.core import files
from legato.core.plan import Plan
from legato.core.quantities import parse_bandwidth
from legato.lab.demo.models import Training, gpt2, resnet50
from legato.lab.testbed.launch import run_workers
from legato.lab.testbed.rank import gloo_rank
from legato.pytorch.network.agreement import broadcast_bytes
from legato.pytorch.runtime.attached.attach import attach, attachment, attachment_of

BLOCK_S = 0.4
#: Limits of the steps of a block.
FEWEST_STEPS, MOST_STEPS = 4, 100


def bert() -> Training:
    """A small BERT (4 layers of width 256), 4 x 64 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    shape = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    model = BertForMaskedLM(shape)
    tokens = torch.randint(0, shape.vocab_size, (4, 64))
    return Training(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4), lambda m: m(input_ids=tokens, labels=tokens).loss, 4
    )


def lstm() -> Training:
    """A language model with two LSTM layers of width 512."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(5000, 512), nn.LSTM(512, 512, 2, batch_first=True)
            self.head = nn.Linear(512, 5000)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(self.embed(tokens))[0])

    model = Language()
    tokens = torch.randint(0, 5000, (4, 32))

    def loss(through: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(through(tokens).flatten(0, 1), tokens.flatten())

    return Training(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), loss, 4)


def mlp() -> Training:
    """Three layers: a step takes about a millisecond."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    x = torch.randn(32, 64)
    return Training(model, torch.optim.SGD(model.parameters(), lr=1e-3), lambda m: m(x).square().mean(), 32)


def many() -> Training:
    """5,000 parameters of four elements: nothing to compute or send."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(5000))

        def forward(self) -> torch.Tensor:
            return torch.stack([(p * p).sum() for p in self.parts]).sum()

    model = Many()
    return Training(model, torch.optim.SGD(model.parameters(), lr=1e-3), lambda m: m(), 1)


MODELS: dict[str, Callable[[], Training]] = {
    "resnet-50": resnet50,
    "gpt2-small": gpt2,
    "bert-small": bert,
    "lstm": lstm,
    "mlp": mlp,
    "many": many,
}


class Trainee:
    """One copy of the model, and its way to train."""

    def __init__(self, build: Callable[[], Training], wrap: Callable[[Training], nn.Module]) -> None:
        torch.manual_seed(0)
        self._training = build()
        self.wrapped: Any = wrap(self._training)
        self.blocks_s: list[float] = []

    def step(self) -> None:
        self._training.optimizer.zero_grad()
        self._training.loss(self.wrapped).backward()
        self._training.optimizer.step()

    def block(self, steps: int) -> float:
        """Seconds per step of some steps, of which each waits for the messages of the one before, as in a long run.

        An untimed step comes first, and the messages of the last one arrive after the end.
        """
        dist.barrier()
        self.step()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = time.perf_counter() - start
        if (attached := attachment_of(self.wrapped)) is not None:
            attached.flush()
        return seconds / steps


def measure(name: str, seconds: float, every: bool) -> dict[str, Any]:
    build = MODELS[name]
    ddp = Trainee(build, lambda t: nn.parallel.DistributedDataParallel(t.model))
    auto = Trainee(build, lambda t: legato.distribute(t.model, t.optimizer)[0])
    tried: list[Plan] = []
    observed = 0
    while attachment(auto.wrapped).observed:
        auto.step()
        observed += 1
        if attachment(auto.wrapped).plan.scheduler not in ("default-buckets", *(plan.scheduler for plan in tried)):
            tried.append(attachment(auto.wrapped).plan)
    again = Trainee(build, lambda t: nn.parallel.DistributedDataParallel(t.model))
    for _ in range(observed):
        again.step()
    trainees = {"ddp, stock": ddp, "auto": auto, "ddp, again": again}
    for plan in tried if every else []:
        trainees[plan.scheduler] = Trainee(build, lambda t, plan=plan: attach(t.model, t.optimizer, plan)[0])
    steps, rounds = agreed(ddp.block(3), len(trainees), seconds)
    for i in range(-1, rounds):
        for trainee in trainees.values() if i % 2 else reversed(trainees.values()):
            step_s = trainee.block(steps)
            if i >= 0:
                trainee.blocks_s.append(step_s)
    return {
        "model": name,
        "observed": observed,
        "plan": attachment(auto.wrapped).plan.scheduler,
        "messages": len(attachment(auto.wrapped).plan.messages),
        "tournament": {plan: m.seconds for plan, m in attachment(auto.wrapped).tournament.items()},
        "blocks": {kind: trainee.blocks_s for kind, trainee in trainees.items()},
    }


def agreed(step_s: float, trainees: int, seconds: float) -> tuple[int, int]:
    """Steps of a block, and rounds of blocks, as rank 0 says."""
    steps = min(MOST_STEPS, max(FEWEST_STEPS, math.ceil(BLOCK_S / step_s)))
    rounds = max(6, int(seconds / (step_s * (steps + 1) * trainees)))
    steps, rounds = json.loads(broadcast_bytes(json.dumps([steps, rounds]).encode(), dist.group.WORLD))
    return steps, rounds


def work(names: str, seconds: float, every: bool, output: Path) -> None:
    """One rank of the benchmark."""
    with gloo_rank() as advance:
        found = []
        for i, name in enumerate(names.split(",")):
            found.append(measure(name, seconds, every))
            advance(name, i + 1, len(names.split(",")))
        if dist.get_rank() == 0:
            files.write_text(output, json.dumps(found))


def show(row: dict[str, Any]) -> None:
    blocks = row["blocks"]
    median_s = {kind: statistics.median(times) for kind, times in blocks.items()}
    first = blocks["ddp, stock"]
    ratios = {kind: sorted(b / a for a, b in zip(first, times, strict=True)) for kind, times in blocks.items()}
    ratio = {kind: statistics.median(found) for kind, found in ratios.items()}
    low, _, high = statistics.quantiles(ratios["auto"], n=4)
    print(
        f"{row['model']:11} DDP {median_s['ddp, stock'] * 1e3:8.2f} ms, auto {median_s['auto'] * 1e3:8.2f} ms: "
        f"{ratio['auto']:.3f} ({low:.3f} to {high:.3f}), plan {row['plan']} of {row['messages']} messages "
        f"after {row['observed']} steps; DDP again {ratio['ddp, again']:.3f}"
    )
    print("            in the tournament: " + ", ".join(f"{p} {s * 1e3:.2f} ms" for p, s in row["tournament"].items()))
    contestants = {kind: value for kind, value in ratio.items() if kind in row["tournament"]}
    if contestants:
        best = min(contestants.values())
        kept = f", kept {(1 - ratio['auto']) / (1 - best):.0%} of the best's win" if best < 0.99 else ""
        print("            ratios: " + ", ".join(f"{k} {v:.3f}" for k, v in contestants.items()) + kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--bandwidth", help="of the links between shaped hosts; without it, loopback")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="for the blocks of a model")
    parser.add_argument("--all", action="store_true", help="train under every contestant too")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)  # where a rank writes what it found
    chosen = parser.parse_args()
    if chosen.rank:
        work(chosen.models, chosen.seconds, chosen.all, chosen.rank)
        return
    rate = parse_bandwidth(chosen.bandwidth) if chosen.bandwidth else None
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "found.json"), Path(folder, "log")
        arguments = [Path(__file__).stem, "--models", chosen.models, "--seconds", str(chosen.seconds)]
        arguments += ["--rank", str(output), *(["--all"] if chosen.all else [])]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        run_workers(arguments, chosen.workers, log, lambda *_: None, rate)
        for row in json.loads(output.read_text()):
            show(row)


if __name__ == "__main__":
    main()
