"""Measured and predicted steps of whole training jobs, and how much each term of the prediction matters.

    python benchmarks/whole_jobs.py               # each row, its error, medians by family
    python benchmarks/whole_jobs.py --ablation    # the same medians with a term left out, each refitted
    python benchmarks/whole_jobs.py --speed       # seconds that a prediction of the largest job takes
    python benchmarks/whole_jobs.py --open F      # 605 more published steps (a line of JSON each): time and memory

The nine rows marked `fit` were chosen before anything was fitted, and fit five constants: the efficiency of matrix
products on four machines, and the fixed time of a mixture layer. The other 34 are predicted, and so are 27 that were
looked at only when all else was done (`kept_back`). Sources: SimuMax
(MooreThreads/SimuMax@4dcaae5, docs/b200), arXiv 2104.04473 (Table 1), 2205.05198 (Table 5), torchtitan
(pytorch/torchtitan@b5bcd76, benchmarks/), arXiv 2407.21783 (Table 4).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from msgspec.structs import replace

from legato.core.job import Job, LanguageModel, Latent, Machine, Mesh
from legato.simulator.flow import Disturbance, place
from legato.whole_jobs import stages
from legato.whole_jobs.fit import fit
from legato.whole_jobs.flow.shared import simulate_shared
from legato.whole_jobs.flow.step import network_of, simulate
from legato.whole_jobs.layouts import jobs
from legato.whole_jobs.memory import memory
from legato.whole_jobs.schedules import schedule
from legato.whole_jobs.step import Step, predict
from legato.whole_jobs.sure import APART, Kind
from legato.zoo.language import layer
from legato.zoo.language.parameters import model_flops
from legato.zoo.presets import FRAMEWORKS, MACHINES

CORE, TITAN, MEGATRON = FRAMEWORKS["megatron-core"], FRAMEWORKS["torchtitan"], FRAMEWORKS["megatron-2021"]
ATTENTION_S = layer._attention_s
FAMILIES = ("B200, dense", "B200, DeepSeek-V2", "2104.04473", "2205.05198", "torchtitan", "Llama 3 405B")


class Row(NamedTuple):
    """A step, its measured seconds (none if it ran out of memory), and whether it fits a constant."""

    family: str
    label: str
    job: Job
    measured_s: float
    fit: bool = False

    def error(self) -> float:
        return predict(self.job).seconds / self.measured_s - 1


def llama(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, sequence: int) -> LanguageModel:
    return LanguageModel(layers, hidden, heads, kv_heads, 128, intermediate, 128_256, sequence)


def gpt(layers: int, hidden: int, heads: int) -> LanguageModel:
    size = hidden // heads
    return LanguageModel(layers, hidden, heads, heads, size, 4 * hidden, 51_200, 2048, family="gpt", tied=True)


#: Of the B200 rows: model, tensor, pipeline, micro-batches.
FITTING = {("70b", 2, 1, 8), ("70b", 4, 1, 4), ("405b", 2, 1, 8), ("v2", 1, 1, 8)}
B200_MODELS = {
    "70b": llama(12, 8192, 64, 8, 28_672, 4096),
    # 16 key and value heads, not the released model's 8: that is what was run
    "405b": llama(4, 16_384, 128, 16, 53_248, 4096),
    "v2": LanguageModel(
        4, 5120, 128, 128, 128, 12_288, 102_400, 4096, "llama", False, 160, 6, 1536, 3072, 1, Latent(1536, 512, 64)
    ),
    "v3": LanguageModel(
        4, 7168, 128, 128, 128, 18_432, 129_280, 4096, "llama", False, 256, 8, 2048, 2048, 1, Latent(1536, 512, 64)
    ),
}


def b200_row(
    name: str, tensor: int, context: int, pipeline: int, data: int, expert: int, tokens: int, microbatches: int,
    milliseconds: float,
) -> Row:  # fmt: skip
    """A measurement of SimuMax: nothing overlapped, one sequence a micro-batch, the optimizer sharded.

    The fixed time of a mixture, which `fitted` finds, is that of these runs.
    """
    job = Job(
        f"{name} TP{tensor} PP{pipeline} DP{data} EP{expert}, {microbatches} micro-batches",
        replace(B200_MODELS[name], sequence=tokens),
        Mesh(tensor=tensor, context=context, pipeline=pipeline, data=data, expert=expert),
        replace(CORE, hidden=(), mixture_s=4.0e-3),
        MACHINES["b200"],
        microbatches,
        shard="optimizer",
        sequence_parallel=tensor > 1,
    )
    return Row(
        FAMILIES[name == "v2"], job.name, job, milliseconds / 1e3, (name, tensor, pipeline, microbatches) in FITTING
    )


def b200() -> Iterator[Row]:
    for name, tensor, pipeline, data, expert, microbatches, milliseconds in [
        ("70b", 1, 2, 4, 1, 4, 843.0),
        ("70b", 2, 1, 4, 1, 4, 725.5),
        ("70b", 4, 1, 2, 1, 4, 409.8),
        ("70b", 1, 2, 4, 1, 8, 1476.8),
        ("70b", 2, 1, 4, 1, 8, 1387.0),
        ("70b", 4, 1, 2, 1, 8, 765.6),
        ("405b", 1, 2, 4, 1, 4, 1074.6),
        ("405b", 2, 1, 4, 1, 4, 907.3),
        ("405b", 4, 1, 2, 1, 4, 476.0),
        ("405b", 1, 2, 4, 1, 8, 1935.4),
        ("405b", 2, 1, 4, 1, 8, 1716.8),
        ("405b", 4, 1, 2, 1, 8, 899.6),
        ("v2", 1, 1, 8, 8, 4, 366.6),
        ("v2", 1, 2, 4, 4, 4, 282.1),
        ("v2", 1, 1, 8, 8, 8, 676.2),
        ("v2", 1, 2, 4, 4, 8, 492.6),
    ]:
        yield b200_row(name, tensor, 1, pipeline, data, expert, 4096, microbatches, milliseconds)


def kept_back() -> Iterator[tuple[Row, float]]:
    """SimuMax's other measurements, which were predicted once, when all else was done: steps, and GiB of memory.

    Context parallelism ran with all-to-alls, and is predicted with gathers of keys and values.
    """
    for *numbers, milliseconds, gib in [
        ("70b", 8, 1, 1, 1, 1, 4096, 4, 280.9, 28.29),
        ("v3", 1, 1, 1, 8, 8, 4096, 4, 603.2, 104.3),
        ("v3", 1, 1, 2, 4, 4, 4096, 4, 452.2, 114.0),
        ("70b", 8, 1, 1, 1, 1, 4096, 8, 556.7, 28.29),
        ("v3", 1, 1, 1, 8, 8, 4096, 8, 1101.7, 104.3),
        ("v3", 1, 1, 2, 4, 4, 4096, 8, 771.6, 114.0),
        ("70b", 1, 1, 2, 4, 1, 4096, 32, 5436.5, 66.55),
        ("70b", 2, 1, 1, 4, 1, 4096, 32, 5376.5, 60.68),
        ("70b", 4, 1, 1, 2, 1, 4096, 32, 2964.6, 39.07),
        ("70b", 8, 1, 1, 1, 1, 4096, 32, 2073.7, 28.29),
        ("v2", 1, 1, 1, 8, 8, 4096, 32, 2721.3, 45.63),
        ("v2", 1, 1, 2, 4, 4, 4096, 32, 1727.7, 44.7),
        ("v3", 1, 1, 1, 8, 8, 4096, 32, 4141.2, 104.3),
        ("v3", 1, 1, 2, 4, 4, 4096, 32, 2718.6, 114.0),
        ("405b", 8, 1, 1, 1, 1, 4096, 4, 258.8, 38.57),
        ("405b", 8, 1, 1, 1, 1, 4096, 8, 488.1, 38.57),
        ("405b", 1, 1, 2, 4, 1, 4096, 32, 7046.4, 87.08),
        ("405b", 2, 1, 1, 4, 1, 4096, 32, 6604.1, 81.59),
        ("405b", 4, 1, 1, 2, 1, 4096, 32, 3455.4, 52.89),
        ("405b", 8, 1, 1, 1, 1, 4096, 32, 1901.8, 38.57),
        ("70b", 2, 4, 1, 1, 1, 32768, 4, 1758.0, 68.43),
        ("70b", 1, 8, 1, 1, 1, 32768, 4, 1768.1, 104.51),
        ("405b", 2, 4, 1, 1, 1, 32768, 4, 1984.7, 87.03),
        ("405b", 1, 8, 1, 1, 1, 32768, 4, 2003.6, 139.22),
        ("70b", 2, 4, 1, 1, 1, 131072, 4, 11315.7, 112.67),
        ("70b", 1, 8, 1, 1, 1, 131072, 4, 11301.9, 147.99),
        ("405b", 2, 4, 1, 1, 1, 131072, 4, 10577.6, 118.13),
    ]:
        row = b200_row(*numbers, milliseconds)  # type: ignore[arg-type]
        tokens = f", {row.job.model.sequence:,} tokens" if row.job.mesh.context > 1 else ""
        label = row.label.replace(" PP", f" CP{row.job.mesh.context} PP") + tokens if tokens else row.label
        yield row._replace(family="B200, kept back", label=label), gib


def megatron_2021() -> Iterator[Row]:
    """Everything recomputed; 16-bit gradients, reduced beside the backward pass only where there is no pipeline."""
    for billions, heads, hidden, layers, tensor, pipeline, workers, batch, microbatch, chunks, seconds in [
        (1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1, 3.53),
        (3.6, 32, 3072, 30, 2, 1, 64, 512, 16, 1, 3.70),
        (7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 1, 3.70),
        (18.4, 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 9.40),
        (39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 14.45),
        (76.1, 80, 10_240, 60, 8, 4, 1024, 1792, 2, 3, 16.06),
        (145.6, 96, 12_288, 80, 8, 8, 1536, 2304, 2, 2, 24.82),
        (310.1, 128, 16_384, 96, 8, 16, 1920, 2160, 1, 2, 37.61),
        (529.6, 128, 20_480, 105, 8, 35, 2520, 2520, 1, 3, 54.09),
        (1008.0, 160, 25_600, 128, 8, 64, 3072, 3072, 1, 1, 102.6),
    ]:
        mesh = Mesh(tensor=tensor, pipeline=pipeline, data=workers // tensor // pipeline)
        framework = replace(MEGATRON, hidden=("data",) if pipeline == 1 else ())
        label = f"{billions}b TP{tensor} PP{pipeline} DP{mesh.data}"
        job = Job(
            label,
            gpt(layers, hidden, heads),
            mesh,
            framework,
            MACHINES["a100"],
            batch // mesh.data // microbatch,
            microbatch,
            "interleaved" if chunks > 1 else "1f1b",
            chunks,
            recompute="full",
        )
        yield Row("2104.04473", label, job, seconds, billions in (7.5, 145.6))


def megatron_2022() -> Iterator[Row]:
    """Everything recomputed, or sequence parallelism and the core of attention alone."""
    framework = replace(MEGATRON, hidden=("tensor",))
    for name, model, pipeline, batch, microbatch, chunks, full_s, selective_s in [
        ("22b", gpt(48, 6144, 64), 1, 4, 4, 1, 1.42, 1.10),
        ("175b", gpt(96, 12_288, 96), 8, 64, 1, 3, 18.13, 13.75),
        ("530b", gpt(105, 20_480, 128), 35, 280, 1, 3, 49.05, 37.83),
        ("1t", gpt(128, 25_600, 160), 64, 512, 1, 1, 94.42, 71.49),
    ]:
        for recompute, seconds in (("full", full_s), ("core", selective_s)):
            label = f"{name} TP8 PP{pipeline}, recompute {recompute}"
            job = Job(
                label,
                model,
                Mesh(tensor=8, pipeline=pipeline),
                framework,
                MACHINES["a100"],
                batch // microbatch,
                microbatch,
                "interleaved" if chunks > 1 else "1f1b",
                chunks,
                recompute=recompute,
                sequence_parallel=recompute == "core",
            )
            yield Row("2205.05198", label, job, seconds, (name, recompute) == ("22b", "core"))


def torchtitan() -> Iterator[Row]:
    eight, seventy = llama(32, 4096, 32, 8, 14_336, 8192), llama(80, 8192, 64, 8, 28_672, 8192)
    for name, model, tensor, data, batch, recompute, compiled, rate in [
        ("8b", eight, 1, 8, 2, "selective", False, 5762),
        ("8b", eight, 1, 8, 2, "selective", True, 6667),
        ("8b", eight, 1, 128, 2, "selective", False, 5605),
        ("8b", eight, 1, 128, 2, "selective", True, 6514),
        ("70b", seventy, 8, 32, 16, "full", True, 597.3),
        ("8b", eight, 8, 8, 12, "selective", True, 4378),
    ]:
        label = f"{name} TP{tensor} FSDP{data}{', compiled' if compiled else ', eager'}"
        job = Job(
            label,
            model,
            Mesh(tensor=tensor, data=data),
            replace(TITAN, fused=compiled, fused_loss=compiled),
            MACHINES["h100-500w"],
            microbatch=batch,
            recompute=recompute,
            shard="parameters",
            sequence_parallel=tensor > 1,
        )
        yield Row("torchtitan", label, job, batch * model.sequence / (rate * tensor), rate == 6667)


def llama_405b(context: int, data: int, microbatches: int) -> Job:
    """Stages of eight chunks of a layer, of which the first has only the embeddings, and the last one the output."""
    model = llama(126, 16_384, 128, 8, 53_248, 8192 * context)
    mesh = Mesh(8, context, 16, data, order=("data", "pipeline", "context", "tensor"))
    layers = (0, *[1] * 126, 0)
    label = f"CP{context} DP{data}, {model.sequence:,} tokens"
    framework, machine = replace(CORE, hidden=("pipeline", "data")), MACHINES["h100"]
    return Job(
        label, model, mesh, framework, machine, microbatches, 1, "interleaved", 8, layers, "none", "gradients", True
    )


def llama_3() -> Iterator[Row]:
    """FLOPs are those of the model, with the causal half of attention."""
    for context, data, microbatches, tera in [(1, 64, 32, 430), (1, 128, 16, 400), (16, 8, 16, 380)]:
        job = llama_405b(context, data, microbatches)
        seconds = model_flops(job.model) * job.tokens / (job.mesh.workers * tera * 1e12)
        yield Row("Llama 3 405B", job.name, job, seconds, data == 64)


def schedules_ratio() -> float:
    """torchtitan's Llama 3 405B on 512 H100: tokens/s of two chunks a stage over those of one.

    With float8 and asynchronous tensor parallelism, so of the two rates (100 and 128) only the ratio is compared. A
    local batch of 32 is eight micro-batches, torchtitan's default, as many as stages.
    """
    framework, mesh = replace(TITAN, hidden=("tensor", "pipeline", "data")), Mesh(tensor=8, pipeline=8, data=8)
    model = llama(126, 16_384, 128, 8, 53_248, 8192)
    seconds = []
    for name, chunks in (("1f1b", 1), ("interleaved", 2)):
        job = Job(
            name,
            model,
            mesh,
            framework,
            MACHINES["h100-500w"],
            8,
            4,
            name,
            chunks,
            (),
            "full",
            "parameters",
            True,
        )
        seconds.append(predict(job).seconds)
    return seconds[0] / seconds[1]


def rows() -> list[Row]:
    return [*b200(), *megatron_2021(), *megatron_2022(), *torchtitan(), *llama_3()]


#: Facts of the frameworks of other published steps, each where its source says it.
FACTS: dict[str, dict[str, Any]] = {
    # Aleph-Alpha/scaling: gradients in bfloat16 (core/optimizer/parameter_group.py), reduced in float32
    # (core/optimizer/allreduce.py); logits gathered (column_parallel_linear.py: parallel_output is false) and given to
    # torch's cross entropy as float32 (transformer/model/losses/cross_entropy.py).
    "AA": {"gradient_nbytes": 2, "sent_nbytes": 4, "fused_loss": False},
    # ... masked_softmax.py: the kernel torch is not fused
    "AA-torch": {"fused_softmax": False},
    # mosaicml/llm-foundry, scripts/train/benchmarking: mixed_precision PURE; sweep.sh names an image with torch 2.0.1
    # (and in a comment a nightly build of 2.1, which would stop early)
    "MPT": {"gradient_nbytes": 2, "stops_early": False},
    # the preset, whose sources are in legato/zoo/presets.py
    "NeMo": {field: getattr(FRAMEWORKS["nemo"], field) for field in ("hidden", "gradient_nbytes")},
    # InternLM/InternEvo, configs/7B_sft.py: overlap_sync_grad is true, overlap_sync_param false
    "InternEvo": {"hidden": ("tensor", "pipeline", "data:gradients")},
}
#: The first FlashAttention, of which llm-foundry's Triton kernel is one (submit_benchmarks.py: attn_impl is triton),
#: reaches 25 to 40% of an A100's peak (arXiv 2307.08691, abstract).
FIRST_FLASH = 0.325
#: By data sheets; attention's efficiency of the same GPU, in its own precision.
ON = {
    "a100": (80, 0.45), "a100-roce4x100": (80, 0.45), "h100": (79, 0.5), "h100-fp8": (79, 0.25),
    "gb200-bf16": (185, 0.42),
}  # fmt: skip


def published(path: Path) -> list[Row]:
    """Steps in a file of lines: family, name, configuration, and seconds unless the step ran out of memory."""
    result = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        config, facts = row["config"], dict(row["config"]["framework"])
        framework = FRAMEWORKS.get(preset := facts.pop("preset"), CORE)
        facts["hidden"] = tuple(facts["hidden"])
        for name, own in FACTS.items():
            facts |= own if row["family"].startswith(name) else {}
        name = config["machine"]["name"]
        gib, attention = ON[name]
        attention = FIRST_FLASH if row["family"].startswith(("AA-fa1", "MPT")) else attention
        machine = Machine(
            **config["machine"],
            memory_nbytes=gib * 2**30,
            efficiency=0.5,
            attention_efficiency=attention,
            multiprocessors=MACHINES[name.partition("-")[0]].multiprocessors,
        )
        mesh = Mesh(*(config[name] for name in ("tensor", "context", "pipeline", "data", "expert")))
        names = ("microbatches", "microbatch", "schedule", "chunks", "recompute", "shard", "sequence_parallel")
        job = Job(
            row["name"],
            LanguageModel(**config["model"]),
            mesh,
            replace(framework, name=preset, **facts),
            machine,
            **{name: config[name] for name in names},
        )
        result.append(Row(row["family"], row["name"], job, row["measured_s"]))
    return result


def middling(found: list[Row]) -> list[Row]:
    """The steps that ran, with the efficiency of the one of their machine and framework with the middle utilization."""
    groups: dict[object, list[Row]] = {}
    for row in found:
        if row.measured_s:
            groups.setdefault((row.job.machine.name, row.job.framework), []).append(row)
    result = []
    for rows in groups.values():
        rows.sort(key=lambda row: model_flops(row.job.model) * row.job.tokens / row.job.mesh.workers / row.measured_s)
        middle = rows[(len(rows) - 1) // 2]
        machine, *_ = fit([(middle.job, middle.measured_s)])
        result += [on(row, efficiency=machine.efficiency)._replace(fit=row is middle) for row in rows]
    return result


def source(row: Row) -> str:
    return row.family.partition("-")[0] if row.family.startswith("AA") else row.family


def at_least(share: float, found: Iterable[float]) -> float:
    """The least value that this share of them is not above."""
    ordered = sorted(found)
    return ordered[math.ceil(share * len(ordered)) - 1]


def spread(rows: Iterable[tuple[str, float]]) -> float:
    """Of sources and the logarithms of measured over predicted seconds: the widest four of five of a source."""
    own: dict[str, list[float]] = {}
    for name, error in rows:
        own.setdefault(name, []).append(abs(error))
    return math.expm1(max(at_least(0.8, errors) for errors in own.values()))


def show_open(path: Path) -> None:
    """Published steps: errors by source, the order of pairs, memory, and the table of `legato/whole_jobs/sure.py`."""
    found = published(path)
    show_memory(found)
    steps = {id(row): (row, predict(row.job)) for row in middling(found)}
    for row, step in steps.values():
        if row.fit:
            print(f"fit: {row.family}, {row.label}: efficiency {step.job.machine.efficiency:.3f}")
    families = dict.fromkeys(row.family for row, _ in steps.values())
    for family in (*families, "all"):
        errors = [
            step.seconds / row.measured_s - 1
            for row, step in steps.values()
            if not row.fit and family in (row.family, "all")
        ]
        sizes = sorted(map(abs, errors))
        near = [sum(size <= limit for size in sizes) / len(sizes) for limit in (0.05, 0.1)]
        print(
            f"{family:<18} {len(sizes):>4} predicted: median {statistics.median(sizes):.1%}, {near[0]:.0%} within 5%, "
            f"{near[1]:.0%} within 10%, worst {max(errors, key=abs):+.1%}, signed {statistics.median(errors):+.1%}"
        )
    show_order(list(steps.values()))
    show_kinds(list(steps.values()))


def show_order(steps: list[tuple[Row, Step]]) -> None:
    """Pairs of layouts of one model on as many GPUs in the right order, by how far their predictions differ."""
    groups: dict[object, list[tuple[float, float]]] = {}
    for row, step in steps:
        job = row.job
        key = source(row), job.model, job.framework, job.machine.name, job.mesh.workers, job.tokens
        groups.setdefault(key, []).append((row.measured_s, step.seconds))
    pairs = [pair for own in groups.values() for pair in itertools.combinations(own, 2)]
    for what, low, high, which in (
        ("predictions", 0, APART, 1),
        ("predictions", APART, 9, 1),
        ("measured", APART, 9, 0),
    ):
        chosen = [
            pair
            for pair in pairs
            if low <= max(pair[0][which], pair[1][which]) / min(pair[0][which], pair[1][which]) - 1 < high
        ]
        right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in chosen) / len(chosen)
        print(f"order of {len(chosen)} pairs whose {what} differ by {low:.0%} to {high:.0%}: {right:.1%} right")
    errors = [abs(a[1] / b[1] * b[0] / a[0] - 1) for a, b in pairs]
    near = sum(error <= 0.08 for error in errors) / len(errors)
    print(f"their ratios: median error {statistics.median(errors):.1%}, {near:.0%} within 8%")


def show_kinds(steps: list[tuple[Row, Step]]) -> None:
    """The table of `sure.py`, and how often its intervals hold for a source that they were made without."""
    mine, constants = fitted(rows())
    mine += [mixed(on(row, efficiency=constants["b200"]), constants["mixture"]) for row, _ in kept_back()]
    steps = steps + [(row, predict(row.job)) for row in mine]
    kinds: dict[Kind, list[tuple[str, float]]] = {}
    presets: dict[Kind, list[tuple[str, float]]] = {}
    for row, step in steps:
        if not row.fit:
            kinds.setdefault(step.kind, []).append((source(row), math.log(row.measured_s / step.seconds)))
        if row.job.machine.name in MACHINES and not any(row is one for one in mine):
            preset = on(row, efficiency=MACHINES[row.job.machine.name].efficiency)
            seconds = predict(preset.job).seconds
            presets.setdefault(step.kind, []).append((source(row), math.log(row.measured_s / seconds)))
    held = inside = number = 0
    for kind, own in sorted(kinds.items()):
        wide, sources = spread(own), {name for name, _ in own}
        if len(sources) < 3:  # too few to know how much sources differ: at least as for all such steps
            wide = max(
                wide, spread(one for other, rows in kinds.items() if other.sharded == kind.sharded for one in rows)
            )
        preset = f", {max(wide, spread(presets[kind])):.2f}" if kind in presets else ""
        print(f"    Kind({', '.join(map(repr, kind))}): Like({len(own)}, {len(sources)}, {wide:.2f}{preset}),")
        inside += sum(abs(error) <= math.log1p(wide) for _, error in own)
        for name in sources if len(sources) > 1 else ():
            limit = math.log1p(spread(one for one in own if one[0] != name))
            held += sum(abs(error) <= limit for one, error in own if one == name)
            number += sum(one == name for one, _ in own)
    total = sum(map(len, kinds.values()))
    print(f"{inside / total:.0%} of {total} steps within; without their own source {held / number:.0%} of {number}")


def show_memory(found: list[Row]) -> None:
    """Print how many jobs ran and ran out of memory, by the prediction."""
    rooms = ("fits", "near the limit", "does not fit")
    print("memory: of the steps that ran / that ran out of it, those that are predicted to fit, near the limit, not to")
    counts: dict[str, Counter[tuple[str, bool]]] = {}
    for row in found:
        counts.setdefault(row.family, Counter())[room_of(row.job), row.measured_s is not None] += 1
    counts["all"] = sum(counts.values(), Counter())
    for family, own in counts.items():
        ran, out = ([own[room, one] for room in rooms] for one in (True, False))
        right = (ran[0] + sum(out[1:])) / own.total()
        print(f"{family:<18} {own.total():>4}: {right:.0%} right; ran {ran}, ran out {out}")


def room_of(job: Job) -> str:
    plan = schedule(job.schedule, job.mesh.pipeline, job.microbatches, job.chunks)
    fullest = max((memory(job, plan, worker) for worker in range(len(plan))), key=lambda one: one.total)
    return fullest.room_in(job.machine.memory_nbytes)


def on(row: Row, **machine: float) -> Row:
    return row._replace(job=replace(row.job, machine=replace(row.job.machine, **machine)))


def with_facts(row: Row, facts: dict[str, Any]) -> Row:
    return row._replace(job=replace(row.job, framework=replace(row.job.framework, **facts)))


def mixed(row: Row, seconds: float) -> Row:
    return with_facts(row, {"mixture_s": seconds})


def least(loss: Callable[[float], float], low: float, high: float) -> float:
    """The argument of the least loss, by golden sections."""
    ratio = (5**0.5 - 1) / 2
    while high - low > 1e-5 * high:
        one, other = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, other) if loss(one) < loss(other) else (one, high)
    return (low + high) / 2


def fitted(found: list[Row]) -> tuple[list[Row], dict[str, float]]:
    """The rows with the constants that make the squared errors of those that fit least, and these constants."""
    constants = {}
    for machine in dict.fromkeys(row.job.machine.name for row in found):
        chosen = [row for row in found if row.fit and row.job.machine.name == machine and row.job.model.experts == 1]
        best = least(lambda e, rows=chosen: sum(on(row, efficiency=e).error() ** 2 for row in rows), 0.1, 1.0)
        constants[machine] = best
        found = [on(row, efficiency=best) if row.job.machine.name == machine else row for row in found]
    chosen = [row for row in found if row.fit and row.job.model.experts > 1]
    constants["mixture"] = least(lambda s: sum(mixed(row, s).error() ** 2 for row in chosen), 0.0, 0.05)
    return [mixed(row, constants["mixture"]) if row.job.model.experts > 1 else row for row in found], constants


def full_squares(job: Job) -> tuple[float, float]:
    """Attention as if flash attention left nothing out."""
    forward_s, backward_s = ATTENTION_S(job)
    return (2 * forward_s, 2 * backward_s) if job.framework.flash else (forward_s, backward_s)


def family_lines(found: list[Row]) -> Iterator[tuple[str, int, float, float, float]]:
    """Of each family and of all: the number of predicted rows, the median and the worst error, and those within 5%."""
    errors = {id(row): abs(row.error()) for row in found if not row.fit}
    for family in (*FAMILIES, "all"):
        chosen = [errors[id(row)] for row in found if id(row) in errors and family in (row.family, "all")]
        yield family, len(chosen), statistics.median(chosen), max(chosen), sum(e <= 0.05 for e in chosen) / len(chosen)


def ratios(found: list[Row]) -> list[float]:
    """Errors of the ratio of any two rows of one model on one machine."""
    keyed: dict[tuple[object, ...], list[float]] = {}
    for row in found:
        keyed.setdefault((row.family, row.job.model, row.job.machine), []).append(1 + row.error())
    return [abs(a / b - 1) for errors in keyed.values() for k, a in enumerate(errors) for b in errors[:k]]


def one_fits(found: list[Row]) -> list[float]:
    """Errors of the other dense rows on a machine whose efficiency is fitted to one row alone, for each row."""
    dense = [row for row in found if row.job.model.experts == 1]
    errors = []
    for row in dense:
        machine, *_ = fit([(row.job, row.measured_s)])
        others = [other for other in dense if other is not row and other.job.machine.name == machine.name]
        errors += [abs(on(other, efficiency=machine.efficiency).error()) for other in others]
    return errors


#: Facts of the machine without a term.
MACHINES_WITHOUT: dict[str, dict[str, float]] = {
    "no waves": {"multiprocessors": 0},
    "no memory traffic": {"memory_bytes_per_s": 1e25},
    "ideal network": {
        "latency_s": 0.0, "network_latency_s": 0.0, "hop_s": 0.0, "link_bytes_per_s": 1e25, "card_bytes_per_s": 1e25
    },
    "nominal bandwidth": {"link_share": 1.0, "card_share": 1.0},
    "no latency of collectives": {"latency_s": 0.0, "network_latency_s": 0.0, "hop_s": 0.0},
}  # fmt: skip
#: Facts of the framework without a term.
FRAMEWORKS_WITHOUT: dict[str, dict[str, Any]] = {"no early stop": {"stops_early": False}}
#: Functions of terms, and what stands for them when they are left out.
CODE_WITHOUT: dict[str, tuple[object, str, object]] = {
    "no attention": (layer, "_attention_s", lambda *_: (0.0, 0.0)),
    "attention as full squares": (layer, "_attention_s", full_squares),
    "no grouped products": (layer, "_grouped_s", lambda *_: (0.0, 0.0, 0.0)),
    "no output layer": (layer, "output", lambda *_: layer.Passes()),
    "no data parallelism": (stages, "over_data", lambda *_: ()),
    "no optimizer": (stages, "optimizer_s", lambda *_: 0.0),
}


def show_rows(found: list[Row], constants: dict[str, float]) -> None:
    print("fitted: " + ", ".join(f"{name} {value:.4f}" for name, value in constants.items()))
    for row in found:
        predicted_s = predict(row.job).seconds
        error = predicted_s / row.measured_s - 1
        print(
            f"{row.family:<18} {row.label:<36} measured {row.measured_s:8.3f} s  predicted {predicted_s:8.3f} s "
            f"{error:+7.1%}{'  fit' if row.fit else ''}"
        )
    for family, number, median, worst, near in family_lines(found):
        print(f"{family:<18} {number:>3} predicted: median {median:.1%}, worst {worst:.1%}, {near:.0%} within 5%")
    errors = ratios(found)
    near = [sum(error <= limit for error in errors) / len(errors) for limit in (0.05, 0.08)]
    print(
        f"ratios of two rows of a model and machine: median {statistics.median(errors):.1%}, worst {max(errors):.1%}, "
        f"{near[0]:.0%} within 5%, {near[1]:.0%} within 8%"
    )
    errors = one_fits(found)
    near = [sum(error <= limit for error in errors) / len(errors) for limit in (0.05, 0.1)]
    print(
        f"others on a machine fitted to one row: median {statistics.median(errors):.1%}, worst {max(errors):.1%}, "
        f"{near[0]:.0%} within 5%, {near[1]:.0%} within 10%"
    )
    print(f"Llama 3 405B on 512 GPUs: interleaved over 1F1B {schedules_ratio():.3f}, measured 1.28")


def show_kept_back(constants: dict[str, float]) -> None:
    """The rows that played no part in the model, with the constants that others fitted."""
    errors, held = [], []
    for row, gib in kept_back():
        row = mixed(on(row, efficiency=constants["b200"]), constants["mixture"])
        predicted = predict(row.job)
        errors.append(predicted.seconds / row.measured_s - 1)
        held.append(predicted.memory.total / 2**30 / gib - 1)
        print(
            f"{row.family:<18} {row.label:<44} measured {row.measured_s:8.3f} s  predicted {predicted.seconds:8.3f} s "
            f"{errors[-1]:+7.1%}  memory {gib:6.2f} GiB {held[-1]:+6.1%}"
        )
    for what, found in (("steps", errors), ("memory", held)):
        sizes = [abs(error) for error in found]
        near = sum(size <= 0.05 for size in sizes) / len(sizes)
        spread = f"median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}, {near:.0%} within 5%"
        print(f"{what} kept back: {len(sizes)}, {spread}")


def show_ablation(found: list[Row]) -> None:
    print(f"{'median / worst':<26}" + "  ".join(f"{family:>17}" for family in (*FAMILIES, "all")))
    for name in ("all terms", *MACHINES_WITHOUT, *FRAMEWORKS_WITHOUT, *CODE_WITHOUT):
        changed = [
            with_facts(on(row, **MACHINES_WITHOUT.get(name, {})), FRAMEWORKS_WITHOUT.get(name, {})) for row in found
        ]
        with mock.patch.object(*CODE_WITHOUT[name]) if name in CODE_WITHOUT else contextlib.nullcontext():
            lines = list(family_lines(fitted(changed)[0]))
        print(f"{name:<26}" + "  ".join(f"{f'{median:.1%} / {worst:.1%}':>17}" for _, _, median, worst, _ in lines))


def show_speed() -> None:
    job = llama_405b(1, 128, 16)
    start = time.perf_counter()
    seconds = predict(job).seconds
    print(
        f"Llama 3 405B on {job.mesh.workers:,} GPUs: a step of {seconds:.2f} s in {time.perf_counter() - start:.2f} s"
    )
    slow = Disturbance(kind="link", number=7, factor=4)
    for words, disturbances in {"rails": (), "rails, of which a link is slow": (slow,)}.items():
        start = time.perf_counter()
        seconds = simulate(
            job, network_of(job.machine, job.mesh.workers, topology="rails", disturbances=disturbances)
        ).step.seconds
        took_s, most = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(f"the same link by link, on {words}: {seconds:.2f} s in {took_s:.1f} s and {most:.0f} MiB")
    job = llama_405b(1, 64, 16)
    network = network_of(job.machine, 2 * job.mesh.workers, topology="rails")
    places = place([job.mesh.workers] * 2, "packed", network)
    start = time.perf_counter()
    simulate_shared([job, job], places, network, job.machine)
    took_s, most = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"two such jobs of {job.mesh.workers:,} GPUs on one network of rails: {took_s:.1f} s and {most:.0f} MiB")
    machine = MACHINES["h100"]
    layouts = list(itertools.islice(jobs("llama", llama_405b(1, 128, 16).model, CORE, machine, 1024, 512), 100))
    networks = [replace(machine, card_bytes_per_s=bandwidth_bps / 8) for bandwidth_bps in (200e9, 400e9, 800e9)]
    start = time.perf_counter()
    for job, network in itertools.product(layouts, networks):
        predict(replace(job, machine=network))
    took_s = time.perf_counter() - start
    print(f"{len(layouts)} layouts of Llama 3 405B on 1,024 GPUs, on {len(networks)} networks each: {took_s:.1f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--open", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.open:
        show_open(options.open)
    elif options.ablation:
        show_ablation(rows())
    elif options.speed:
        show_speed()
    else:
        found, constants = fitted(rows())
        show_rows(found, constants)
        show_kept_back(constants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
