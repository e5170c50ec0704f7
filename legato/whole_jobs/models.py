"""The models of jobs: the zoo's language models, and models that are only known as whole jobs.

- `deepseek-v2`: arXiv 2405.04434, section 3.1.2; 235,741,434,880 parameters (published: 236B), of which a token uses
  21.4 billion (21B)
- `deepseek-v3`: arXiv 2412.19437, section 4.2; 671,026,404,352 parameters (671B), of which a token uses 37.6 billion
  (37B), without the layer of multi-token prediction, which is not modelled

Both have the vocabularies and dense layers of their releases, and the sequences of their pre-training.
"""

from __future__ import annotations

from legato.core.job import LanguageModel, Latent
from legato.zoo import Shape

__all__ = ["MODELS", "of_shape"]

_LATENT = Latent(query=1536, key_value=512, rope=64)
#: Models that the zoo does not have.
MODELS = {
    "deepseek-v2": LanguageModel(
        layers=60,
        hidden=5120,
        heads=128,
        kv_heads=128,
        head_size=128,
        intermediate=12_288,
        vocabulary=102_400,
        sequence=4096,
        experts=160,
        active_experts=6,
        expert_intermediate=1536,
        shared_intermediate=2 * 1536,
        dense_layers=1,
        latent=_LATENT,
    ),
    "deepseek-v3": LanguageModel(
        layers=61,
        hidden=7168,
        heads=128,
        kv_heads=128,
        head_size=128,
        intermediate=18_432,
        vocabulary=129_280,
        sequence=4096,
        experts=256,
        active_experts=8,
        expert_intermediate=2048,
        shared_intermediate=2048,
        dense_layers=3,
        latent=_LATENT,
    ),
}


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
