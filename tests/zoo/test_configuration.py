"""Configurations of Hugging Face and Megatron, against the named models of the same shapes."""

import json

import pytest

from legato.core.errors import FileError, InputError
from legato.zoo.language.configuration import model_of
from legato.zoo.language.models import MODELS

#: As published with the models, without what has nothing to do with their shapes.
LLAMA = {
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14_336, "max_position_embeddings": 131_072,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    "vocab_size": 128_256,
}  # fmt: skip
MIXTRAL = {
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14_336, "max_position_embeddings": 32_768,
    "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "tie_word_embeddings": False, "vocab_size": 32_000,
}  # fmt: skip
DEEPSEEK = {
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18_432,
    "kv_lora_rank": 512, "max_position_embeddings": 163_840, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "tie_word_embeddings": False,
    "v_head_dim": 128, "vocab_size": 129_280,
}  # fmt: skip
MEGATRON = {
    "num_layers": 96, "hidden_size": 12_288, "num_attention_heads": 96, "seq_length": 2048, "vocab_size": 50_257,
    "swiglu": False, "untie_embeddings_and_output_weights": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name", "changes"),
    [
        (LLAMA, "llama-3-8b", {}),
        (MIXTRAL, "mixtral-8x7b", {"sequence": 32_768}),
        (DEEPSEEK, "deepseek-v3", {"sequence": 4096}),
        (MEGATRON, "gpt3", {}),
    ],
)
def test_a_configuration_is_the_named_model(tmp_path, config, name, changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert model_of(path, changes) == MODELS[name]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[1]", FileError, "expected a model's configuration in JSON"),
        ("{", FileError, "expected a model's configuration in JSON"),
        ('{"format": "legato.job/1"}', FileError, "legato.job/1 .expected a model's configuration"),
        ('{"hidden_size": 64}', InputError, "layers is missing .expected num_hidden_layers or"),
        (json.dumps(LLAMA | {"hidden_size": "4096"}), InputError, "hidden_size: '4096' .expected a whole number"),
        (json.dumps(LLAMA | {"num_attention_heads": 0}), InputError, "a multiple of the 0 heads"),
        (json.dumps(LLAMA | {"num_attention_heads": 33}), InputError, "a multiple of the 33 heads"),
        (json.dumps(LLAMA | {"num_hidden_layers": 2**62}), InputError, "layers: 4,611,686,018,427,387,904"),
        (json.dumps(DEEPSEEK | {"q_lora_rank": "x"}), InputError, "latent: 'x' .expected a whole number"),
    ],
)
def test_what_is_no_configuration_is_refused_in_one_line(tmp_path, text, error, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(error, match=message) as caught:
        model_of(path, {})
    assert "\n" not in str(caught.value)
