"""The zoo's language models as the models of jobs."""

from __future__ import annotations

from legato.core.job import LanguageModel
from legato.zoo import Shape

__all__ = ["of_shape"]


def of_shape(shape: Shape) -> LanguageModel:
    """The model of a shape of the zoo."""
    size = shape.hidden // shape.heads
    return LanguageModel(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_width // size,
        head_size=size,
        intermediate=shape.inner,
        vocabulary=shape.vocabulary,
        sequence=shape.sequence,
        family=shape.family,
        tied=shape.family == "gpt" if shape.tied is None else shape.tied,
        experts=shape.experts,
        active_experts=shape.active_experts,
        expert_intermediate=shape.inner if shape.experts > 1 else 0,
    )
