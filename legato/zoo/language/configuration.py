"""Read the shape of a language model from JSON: from Hugging Face's `config.json`, or from Megatron's arguments.

Both formats have the same numbers under different names; a table lists all names. If a configuration leaves numbers
out, the defaults of the libraries apply: there are as many heads of keys as of queries, a head has the size hidden /
heads, and an MLP has the width 4 x hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from legato.core import files
from legato.core.errors import FileError, InputError
from legato.core.job import LanguageModel, Latent

__all__ = ["model_of"]

#: The names of each number in configurations: first Hugging Face's, then Megatron's.
_WORDS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_query_groups"),
    "head_size": ("head_dim", "kv_channels"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "sequence": ("seq_length", "max_position_embeddings", "n_positions", "max_seq_len"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts", "num_moe_experts"),
    "active_experts": ("num_experts_per_tok", "moe_router_topk"),
    "expert_intermediate": ("moe_intermediate_size", "moe_ffn_hidden_size"),
    "dense_layers": ("first_k_dense_replace",),
    "shared_intermediate": ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
    "shared_experts": ("n_shared_experts",),
}
#: The longest sequence to take from a configuration. Configurations have the longest sequence that a model supports,
#: which is often longer than in training.
_SEQUENCE = 8192


def model_of(path: Path, changes: dict[str, Any]) -> LanguageModel:
    """Return the shape of the model in a file, with the numbers in `changes` instead of the file's.

    Raises `FileError` if the file has no configuration, and `InputError` if numbers are missing or `LanguageModel`
    refuses them.
    """
    try:
        config = msgspec.json.decode(files.load(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise FileError(f"{path}: {error} (expected a model's configuration in JSON)") from None
    if "format" in config:
        raise FileError(f"{path}: {config['format']} (expected a model's configuration, of Hugging Face or Megatron)")
    given = {name: found for name, words in _WORDS.items() if (found := _number(path, config, words)) is not None}
    shape: dict[str, Any] = {**given, **changes}
    if missing := [name for name in ("layers", "hidden", "heads", "vocabulary") if name not in shape]:
        raise InputError(f"{path}: {missing[0]} is missing (expected {' or '.join(_WORDS[missing[0]])})")
    family = "llama" if _is_gated(config) else "gpt"
    if shape["heads"] < 1 or shape["hidden"] % shape["heads"]:
        raise InputError(f"{path}: hidden: {shape['hidden']} (expected a multiple of the {shape['heads']} heads)")
    usual: dict[str, Any] = {
        "kv_heads": shape["heads"],
        "head_size": shape["hidden"] // shape["heads"],
        "intermediate": 4 * shape["hidden"],
        "sequence": _SEQUENCE,
        "tied": config.get("tie_word_embeddings", config.get("untie_embeddings_and_output_weights") is False),
    }
    shape = usual | shape
    if "sequence" not in changes:
        shape["sequence"] = min(shape["sequence"], _SEQUENCE)
    shared = shape.pop("shared_experts", 0)
    if shape.get("experts", 1) > 1:
        shape.setdefault("expert_intermediate", shape["intermediate"])
        shape.setdefault("shared_intermediate", shared * shape["expert_intermediate"])
    if rank := config.get("kv_lora_rank"):
        names = ("q_lora_rank", "qk_rope_head_dim" if "qk_rope_head_dim" in config else "qk_pos_emb_head_dim")
        latent = [shape["hidden"] if config.get(names[0]) is None else config[names[0]], rank, config.get(names[1], 64)]
        shape |= {"head_size": config.get("v_head_dim", 128), "kv_heads": shape["heads"]}
        shape["latent"] = Latent(*(_whole(path, "latent", value) for value in latent))
    return LanguageModel(family=family, **shape)


def _number(path: Path, config: dict[str, Any], words: tuple[str, ...]) -> int | None:
    found = next((word for word in words if config.get(word) is not None), None)
    return None if found is None else _whole(path, found, config[found])


def _whole(path: Path, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{path}: {name}: {str(value)[:40]!r} (expected a whole number)")
    return value


def _is_gated(config: dict[str, Any]) -> bool:
    """Return whether MLPs have three matrices: if Megatron's options say so, or the activation is SiLU or SwiGLU."""
    if "swiglu" in config or "gated_linear_unit" in config:
        return bool(config.get("swiglu") or config.get("gated_linear_unit"))
    return str(config.get("hidden_act", config.get("activation_function", ""))).startswith(("silu", "swi"))
