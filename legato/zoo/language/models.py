"""Language models by name or by shape: decoders in the families of GPT-3 and Llama 3.

The named models have the published shapes:

- `gpt3`: 175.0 billion parameters in Brown et al. 2020, Table 2.1; exactly
  174,604,259,328 with its vocabulary of 50,257 and 2048 positions
- `llama-3-8b`, `llama-3-70b`, `llama-3-405b`: Dubey et al. 2024 (arXiv 2407.21783), Table 3;
  8,030,261,248, 70,553,706,496 and 405,853,388,800, as released
- `mixtral-8x7b`: Jiang et al. 2024 (arXiv 2401.04088), Table 1; 46,702,792,704, of
  which a token uses 12,879,925,248
- `deepseek-v2`: arXiv 2405.04434, section 3.1.2; 235,741,434,880 parameters (published: 236B), of which a token uses
  21.4 billion (21B)
- `deepseek-v3`: arXiv 2412.19437, section 4.2; 671,026,404,352 parameters (671B), of which a token uses 37.6 billion
  (37B), without the layer of multi-token prediction, which is not modelled

Only whole jobs support the last two models. The vocabularies and dense layers of DeepSeek models are from their
releases, and their sequences are as long as in pre-training.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec.structs import replace

from legato.core.errors import InputError, unknown_name
from legato.core.job import LanguageModel, Latent

__all__ = ["MODELS", "model_named", "shaped"]


def shaped(
    *,
    hidden: int,
    heads: int,
    family: Literal["gpt", "llama"] = "llama",
    intermediate: int | None = None,
    experts: int = 1,
    **more: Any,
) -> LanguageModel:
    """Return a language model of this shape; `more` has further fields of `LanguageModel`.

    By default, a sequence has 8192 tokens, and keys and values have as many heads as queries. In the family `gpt`, the
    MLP is four times as wide as the model. In `llama`, it is three and a half times as wide, as in Llama 3 8B and 70B.
    Experts are as wide as an MLP. Only in the family `gpt`, the table of embeddings is also the output layer. Raises
    `InputError` as `LanguageModel` does, and if the number of heads does not divide the width.
    """
    if heads < 1 or hidden % heads:
        raise InputError(f"hidden: {hidden} (expected a multiple of the {heads} heads)")
    inner = (4 * hidden if family == "gpt" else 7 * hidden // 2) if intermediate is None else intermediate
    usual: dict[str, Any] = {"kv_heads": heads, "sequence": 8192, "tied": family == "gpt"}
    return LanguageModel(
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        family=family,
        intermediate=inner,
        experts=experts,
        expert_intermediate=inner if experts > 1 else 0,
        **usual | more,
    )


_LLAMA = {"kv_heads": 8, "vocabulary": 128_256}
#: The arguments of `shaped` for the models that it can make.
_NUMBERS: dict[str, dict[str, Any]] = {
    "gpt3": {"layers": 96, "hidden": 12_288, "heads": 96, "vocabulary": 50_257, "sequence": 2048, "family": "gpt"},
    "llama-3-8b": _LLAMA | {"layers": 32, "hidden": 4096, "heads": 32, "intermediate": 14_336},
    "llama-3-70b": _LLAMA | {"layers": 80, "hidden": 8192, "heads": 64, "intermediate": 28_672},
    "llama-3-405b": _LLAMA | {"layers": 126, "hidden": 16_384, "heads": 128, "intermediate": 53_248},
    "mixtral-8x7b": {
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "vocabulary": 32_000,
        "sequence": 32_768,
        "intermediate": 14_336,
        "experts": 8,
        "active_experts": 2,
    },
}
_LATENT = Latent(query=1536, key_value=512, rope=64)
#: Every language model by its name.
MODELS: dict[str, LanguageModel] = {
    **{name: shaped(**numbers) for name, numbers in _NUMBERS.items()},
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


def model_named(name: str, **changes: Any) -> LanguageModel:
    """Return the named model with `changes` to its numbers; numbers that follow from the changed numbers change, too.

    Raises `InputError`, which lists the nearest names, on an unknown name, and for the same reasons as `shaped`.
    """
    if name not in MODELS:
        raise unknown_name("language model", name, MODELS)
    return shaped(**_NUMBERS[name] | changes) if name in _NUMBERS else replace(MODELS[name], **changes)
