"""Published sizes and steps of language models, compared with the zoo's in two Markdown tables.

python benchmarks/language_models.py

docs/language_models.md has the rows of both tables, and a test compares them. Efficiencies are
those of the machines of whole jobs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from legato.core.job import LanguageModel
from legato.core.workload import Workload
from legato.zoo import SHAPES, language_model, model, shaped, workload
from legato.zoo.language.models import model_named

#: Published parameters: as printed, where, and exactly, if the model was released.
SIZES = {
    "gpt3": ("175.0 billion", "arXiv 2005.14165, Table 2.1", None),
    "llama-3-8b": ("8B", "arXiv 2407.21783, Table 3; as released", 8_030_261_248),
    "llama-3-70b": ("70B", "the same", 70_553_706_496),
    "llama-3-405b": ("405B", "the same", 405_853_388_800),
    "mixtral-8x7b": ("47B", "arXiv 2401.04088, abstract; as released", 46_702_792_704),
}
#: Parameters of Mixtral that a token uses: "13B", all but six of the eight experts of each layer.
MIXTRAL_ACTIVE = 12_879_925_248

MEGATRON, KORTHIKANTI, LLAMA = "arXiv 2104.04473, Table 1", "arXiv 2205.05198, Table 5", "arXiv 2407.21783, Table 4"
APRIL, DECEMBER, JUNE = "torchtitan, April 2024", "torchtitan, December 2024", "torchtitan, June 2025"


@dataclass(frozen=True, slots=True)
class Step:
    """A published step of `batch` sequences on a replica of `devices` devices, and its seconds."""

    name: str
    shape: LanguageModel
    device: str
    devices: int
    batch: int
    recompute: bool
    printed: str
    published_s: float
    source: str

    def ours(self) -> Workload:
        """The same step from the zoo."""
        return workload(
            language_model(self.shape),
            device=self.device,
            batch_size=self.batch,
            recompute=self.recompute,
            replica_devices=self.devices,
        )


def gpt(layers: int, hidden: int, heads: int) -> LanguageModel:
    """A model of the two papers on Megatron-LM: 2048 tokens, a vocabulary of 51,200."""
    return shaped(layers=layers, hidden=hidden, heads=heads, vocabulary=51_200, sequence=2048, family="gpt")


def megatron_flops(shape: LanguageModel, batch: int) -> float:
    """FLOPs of a step that recomputes all activations (arXiv 2104.04473, section 5.1)."""
    layers, hidden, length = shape.layers, shape.hidden, shape.sequence
    more = length / (6 * hidden) + shape.vocabulary / (16 * layers * hidden)
    return 96 * batch * length * layers * hidden**2 * (1 + more)


def palm_flops(shape: LanguageModel, batch: int, parameters: float) -> float:
    """FLOPs of a step for model FLOPs utilization (arXiv 2204.02311, appendix B)."""
    return batch * shape.sequence * (6 * parameters + 12 * shape.layers * shape.hidden * shape.sequence)


def in_seconds() -> Iterator[Step]:
    """Steps whose seconds are printed; the second of a pair recomputes only attention, which ours does not count."""
    for name, shape, devices, batch, full_s, selective_s in [
        ("GPT, 22 billion", gpt(48, 6144, 64), 8, 4, 1.42, 1.10),
        ("GPT-3, 175 billion", gpt(96, 12_288, 96), 64, 64, 18.13, 13.75),
        ("GPT, 530 billion", gpt(105, 20_480, 128), 280, 280, 49.05, 37.83),
        ("GPT, 1 trillion", gpt(128, 25_600, 160), 512, 512, 94.42, 71.49),
    ]:
        for recompute, seconds in ((True, full_s), (False, selective_s)):
            yield Step(name, shape, "a100", devices, batch, recompute, f"{seconds} s", seconds, KORTHIKANTI)


def in_tokens_per_second() -> Iterator[Step]:
    """Steps whose tokens per second and device are printed."""
    for name, device, devices, batch, recompute, rate, source in [
        ("llama-3-8b", "a100", 1, 1, False, 2973, APRIL),
        ("llama-3-70b", "a100", 1, 1, True, 331, APRIL),
        ("llama-3-8b", "h100-500w", 1, 2, False, 5762, DECEMBER),
        ("llama-3-8b", "h100-500w", 1, 2, False, 6667, f"{DECEMBER}, compiled"),
        ("llama-3-70b", "h100-500w", 8, 16, True, 597.3, f"{JUNE}, compiled"),
    ]:
        shape = SHAPES[name]
        seconds = batch * shape.sequence / (rate * devices)
        yield Step(name, shape, device, devices, batch, recompute, f"{rate:,} tokens/s", seconds, source)


def in_flops() -> Iterator[Step]:
    """Steps whose FLOP/s per device are printed."""
    small, huge, mixtral = gpt(24, 2304, 24), SHAPES["llama-3-405b"], model_named("mixtral-8x7b", sequence=4096)
    parameters = model("llama-3-405b").parameters
    for name, shape, device, devices, batch, recompute, flops, tera, source in [
        ("GPT, 1.7 billion", small, "a100", 1, 16, True, megatron_flops(small, 16), 137, MEGATRON),
        ("llama-3-405b", huge, "h100", 128, 32, False, palm_flops(huge, 32, parameters), 430, LLAMA),
        ("llama-3-405b", huge, "h100", 128, 16, False, palm_flops(huge, 16, parameters), 400, LLAMA),
        ("mixtral-8x7b", mixtral, "h100", 32, 128, False, palm_flops(mixtral, 128, MIXTRAL_ACTIVE), 468,
         "Megatron Core MoE 0.9"),
    ]:  # fmt: skip
        seconds = flops / (devices * tera * 1e12)
        yield Step(name, shape, device, devices, batch, recompute, f"{tera} TFLOP/s", seconds, source)


STEPS = (*in_seconds(), *in_tokens_per_second(), *in_flops())


def rows() -> Iterator[str]:
    """The rows of both tables, and the median ratio."""
    for name, (printed, source, _) in SIZES.items():
        yield f"| `{name}` | {printed} | {model(name).parameters:,} | {source} |"
    ratios = []
    for step in STEPS:
        ours_s = step.ours().compute_s
        ratios.append(ours_s / step.published_s)
        where = f"{step.devices} x {step.device}" if step.devices > 1 else step.device
        name = f"`{step.name}`" if step.name in SHAPES else step.name
        yield (
            f"| {name} | {where} | {step.batch} | {'all' if step.recompute else ''} | {step.printed} | "
            f"{step.published_s:.2f} | {ours_s:.2f} | {ratios[-1]:.2f} | {step.source} |"
        )
    least, middle, most = min(ratios), statistics.median(ratios), max(ratios)
    yield (
        f"The ratios of our times to the published times range from {least:.2f} to {most:.2f}, and their median is "
        f"{middle:.2f}."
    )


if __name__ == "__main__":
    print("\n".join(rows()))
