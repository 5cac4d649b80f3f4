"""Every setting of a config.json is read, known as harmless, or refused: real configs,
transformers', and odd ones."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

from nva.models import FAMILIES, ModelSpec
from nva.models.hf_config import Config
from nva.models.registry import read_model
from tests import checkpoints

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3 = LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
QWEN_2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "max_window_layers": 28,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_mrope": False,
    "use_sliding_window": False,
}
QWEN_3 = QWEN_2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "rope_scaling": None,
    "sliding_window": None,
}
EXPERTS = {
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
MISTRAL = LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
GEMMA_3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
MINICPM = LLAMA | {
    "_name_or_path": "openbmb/MiniCPM-2B-sft-bf16",
    "architectures": ["MiniCPMForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_minicpm.MiniCPMConfig",
        "AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM",
    },
    "model_type": "minicpm",
    "dim_model_base": 256,
    "rope_scaling": None,
    "scale_depth": 1.4,
    "scale_emb": 12,
}
LONGROPE = {"rope_type": "longrope", "long_factor": [1.0] * 64, "short_factor": [1.0] * 64}
VISION = {
    "deepstack_visual_indexes": [5, 11, 17],
    "depth": 24,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1024,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "model_type": "qwen3_vl",
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
AXES = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
QWEN_3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        name: value
        for name, value in (
            QWEN_3 | {"model_type": "qwen3_vl_text", "rope_scaling": AXES, "dtype": "bfloat16"}
        ).items()
        if name
        not in (
            "architectures",
            "torch_dtype",
            "max_window_layers",
            "use_sliding_window",
            "use_mrope",
        )
    },
    "tie_word_embeddings": True,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 151656,
    "vision_config": VISION,
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}

ACCEPTED = {
    "Llama 1": LLAMA | {"max_sequence_length": 2048, "pad_token_id": 0, "_name_or_path": "llama-7b"},
    "Llama 2": LLAMA | {"num_key_value_heads": 32, "pretraining_tp": 1, "rope_scaling": None},
    "Llama 2 Chat": LLAMA | {"max_length": 4096, "temperature": 0.6, "top_p": 0.9, "do_sample": True},
    "Llama 3.2": LLAMA_3,
    "Llama 3.1, by Unsloth": LLAMA_3 | {"unsloth_fixed": True, "pad_token_id": 128004},
    "SmolLM2": LLAMA | {
        "is_llama_config": True,
        "num_key_value_heads": 32,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "DeepSeek Coder": LLAMA_3 | {"rope_scaling": {"factor": 4.0, "type": "linear"}},
    "Mistral 0.1": MISTRAL,
    "Mistral 0.3": MISTRAL | {"attention_dropout": 0.0, "sliding_window": None, "head_dim": 128},
    "Qwen 2.5": QWEN_2,
    "Qwen 2.5, long": QWEN_2 | {
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    },
    "Qwen 1.5 MoE": QWEN_2 | EXPERTS | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 5632,
    },
    "Qwen 3": QWEN_3,
    "Qwen 3 MoE": QWEN_3 | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": []},
    "Qwen 3 VL": QWEN_3_VL,
    "Qwen 3 VL MoE": QWEN_3_VL | {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": QWEN_3_VL["text_config"] | EXPERTS | {"mlp_only_layers": []},
    },
    "Gemma 3": GEMMA_3,
    "Gemma 3 270M": GEMMA_3 | {
        "_sliding_window_pattern": 6,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2,
        "use_bidirectional_attention": False,
    },
    "MiniCPM": MINICPM,
    "MiniCPM4": MINICPM | {
        "mup_denominator": 32,
        "rope_scaling": LONGROPE | {"original_max_position_embeddings": 4096},
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Settings as the configs on the hub have them."""

CLASSES = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen2MoeForCausalLM": "Qwen2MoeConfig",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
}


def spec(config: dict[str, Any], **settings: Any) -> ModelSpec:
    return read_model({**config, **settings})[0]


def refuses(name: str, config: dict[str, Any], **settings: Any) -> None:
    with pytest.raises(
        ValueError, match=f"sets {name}, which nva doesn't implement for .*; .* remove it there"
    ):
        read_model({**config, **settings})


@pytest.mark.parametrize("name", ACCEPTED)
def test_real_configs_are_read(name: str) -> None:
    assert (
        spec(ACCEPTED[name]).n_layers
        == ACCEPTED[name].get("text_config", ACCEPTED[name])["num_hidden_layers"]
    )


def test_every_family_has_a_real_config() -> None:
    assert {config["architectures"][0] for config in ACCEPTED.values()} == set(FAMILIES)


def test_llama_2_does_not_name_its_rope() -> None:
    assert spec(LLAMA).ropes[0].theta == 10000.0
    assert (
        spec(LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 7.0}).ropes[0].theta
        == 7.0
    )


@pytest.mark.parametrize("architecture", CLASSES)
def test_what_transformers_writes_is_read(architecture: str) -> None:
    """Its config class with defaults, and an old config that it has rewritten, whole or as the
    difference from them."""
    config_class = getattr(transformers, CLASSES[architecture])
    old = next(config for config in ACCEPTED.values() if config["architectures"] == [architecture])
    plain, rewritten = config_class(architectures=[architecture]), config_class(**old)
    assert spec(plain.to_dict()).n_layers == plain.num_hidden_layers
    assert spec(rewritten.to_dict()) == spec(rewritten.to_diff_dict()) == spec(old)


@pytest.mark.parametrize("config_class", [Qwen3VLConfig, Qwen3VLMoeConfig])
def test_what_transformers_writes_of_qwen3_vl_is_read(config_class: Any) -> None:
    old = ACCEPTED["Qwen 3 VL" if config_class is Qwen3VLConfig else "Qwen 3 VL MoE"]
    rewritten = config_class(**old)
    assert spec(rewritten.to_dict()) == spec(rewritten.to_diff_dict()) == spec(old)


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("embedding_multiplier", 12.0),
        ("attention_multiplier", 0.2),
        ("logits_scaling", 8.0),
        ("clip_qkv", 8.0),
        ("use_qk_norm", True),
        ("no_rope_layers", [1, 1, 1, 0]),
        ("attention_chunk_size", 8192),
        ("alibi", True),
        ("attn_temperature_tuning", 4),
        ("rotary_pct", 0.0),
        ("a setting of next year", "on"),
    ],
)
def test_what_is_on_and_not_read_is_refused(name: str, setting: str, value: Any) -> None:
    refuses(setting, ACCEPTED[name], **{setting: value})
    assert all(
        spec(ACCEPTED[name], **{setting: off}) == spec(ACCEPTED[name]) for off in (None, False)
    )


def test_settings_inside_the_parts_of_a_config_are_watched_too() -> None:
    refuses("clip_qkv", QWEN_3_VL, text_config=QWEN_3_VL["text_config"] | {"clip_qkv": 8.0})
    refuses("window_size", QWEN_3_VL, vision_config=VISION | {"window_size": 112})


def test_what_only_other_families_read_is_refused() -> None:
    refuses("attention_bias", MISTRAL, attention_bias=True)
    refuses("num_experts", LLAMA, num_experts=8)
    refuses("scale_emb", LLAMA, scale_emb=12)
    refuses("query_pre_attn_scalar", QWEN_3, query_pre_attn_scalar=256)
    refuses(
        "shared_expert_intermediate_size", ACCEPTED["Qwen 3 MoE"], shared_expert_intermediate_size=8
    )


def test_quantized_real_configs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"quantized \(quantization_config: fp8\)"):
        spec(QWEN_3, quantization_config={"activation_scheme": "dynamic", "quant_method": "fp8"})


def test_a_config_can_not_be_copied_unread() -> None:
    config = Config({"a": 1})
    with pytest.raises(TypeError):
        dict(**config)  # pyright: ignore[reportCallIssue]
    assert (config | {"b": 2})["a"] == 1
    assert config.known == {"a", "b"}


def test_checkpoints_of_the_tests_are_those_of_the_families() -> None:
    assert {model.__name__ for _, model in checkpoints.FAMILIES.values()} == set(CLASSES)
