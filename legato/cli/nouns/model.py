"""The options of `workload` and `layouts` about a language model and the GPU that it runs on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from msgspec.structs import replace

from legato.cli.options import quantity, setting
from legato.core.errors import InputError
from legato.core.job import LanguageModel, Machine
from legato.core.quantities import parse_flops

__all__ = ["LLM", "Computes", "ModelOutput", "Recompute", "Shape", "shape_of"]

#: The name of a model whose shape the options give.
LLM = "llm"


Recompute = Annotated[
    bool,
    typer.Option(
        "--recompute",
        help="Recompute all activations in the backward pass.",
        rich_help_panel="Large models: training",
    ),
]
ModelOutput = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="W.json", help="Write the workload to this file.")
]


@dataclass(frozen=True)
class Computes:
    """The options about the device that computes."""

    device: str | None = setting(
        None,
        "GPU to compute on, such as k80, p100, v100, a100, h100 or b200; for language models also a machine file.",
        "--machine",
        "--device",
        metavar="NAME|FILE",
        show_default="v100; h100 for language models",
    )
    device_flops: str | None = setting(
        None, "Peak FLOP/s of the device, such as 10T.", show_default="from its data sheet"
    )
    efficiency: float | None = setting(
        None, "Share of peak FLOP/s that matrix products reach.", show_default="0.5; for language models the machine's"
    )

    @property
    def flops_per_s(self) -> float | None:
        return None if self.device_flops is None else quantity("device-flops", self.device_flops, parse_flops)

    def machine(self) -> Machine:
        """Return the machine for a whole job. Raises `InputError` if the device is not known as a machine."""
        from legato.zoo.presets import machine_named

        changed = {"flops_per_s": self.flops_per_s, "efficiency": self.efficiency}
        given = {field: value for field, value in changed.items() if value is not None}
        return replace(machine_named(self.device or "h100"), **given)


@dataclass(frozen=True)
class Shape:
    """The options about the shape of a language model."""

    PANEL: ClassVar = "Language models: shape"

    layers: int | None = setting(None, "Number of layers.")
    hidden: int | None = setting(None, "Hidden size of the model.")
    heads: int | None = setting(None, "Number of attention heads.")
    kv_heads: int | None = setting(None, "Number of key and value heads.", show_default="as many as attention heads")
    intermediate: int | None = setting(None, "Intermediate size of the MLP.", show_default="3.5 x hidden")
    experts: int | None = setting(None, "Number of experts (MLPs) in a mixture.", show_default="1")
    active_experts: int | None = setting(None, "Number of experts that each token uses.", show_default="1")
    vocabulary: int | None = setting(None, "Number of tokens in the vocabulary.", "--vocab")
    tied: bool | None = setting(
        None,
        "Whether the output layer shares the weights of the embeddings.",
        "--tied/--untied",
        show_default="untied; tied in gpt3",
    )
    sequence: int | None = setting(None, "Number of tokens in a sequence.", show_default="8192, or the paper's")

    def given(self) -> dict[str, Any]:
        """Return the options that were given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def shape_of(name: str, given: dict[str, Any]) -> LanguageModel:
    """Return the shape of the named language model, with the changes in `given`."""
    from legato import zoo
    from legato.zoo.language.configuration import model_of
    from legato.zoo.language.models import MODELS, model_named

    if name == LLM:
        needed = ("layers", "hidden", "heads", "vocabulary")
        missing = [_option(field) for field in needed if field not in given]
        if missing:
            raise InputError(f"{', '.join(missing)}: missing (llm is the shape that the options give)")
        return zoo.shaped(**given)
    if name.endswith(".json"):
        return model_of(Path(name), given)
    if name not in MODELS:
        known = f"expected one of {', '.join((LLM, *MODELS))}"
        if given:
            raise InputError(f"{_option(next(iter(given)))}: {name} has no such option ({known})")
        raise InputError(f"{name}: no language model ({known})")
    return model_named(name, **given)


def _option(field: str) -> str:
    return "--vocab" if field == "vocabulary" else f"--{field.replace('_', '-')}"
