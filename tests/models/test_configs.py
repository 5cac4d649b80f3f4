"""Every setting of a config.json is read, known to change nothing, or refused: configs of the hub,
transformers', and odd ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3VLConfig, Qwen3VLMoeConfig

from nva.models import FAMILIES, ModelSpec, load_checkpoint
from nva.models.hf_config import Config
from nva.models.registry import read_model
from nva.models.unread import is_elsewhere, is_off
from tests import checkpoints
from tests.checkpoints import randomize
from tests.models.hub import CONFIGS, shrunk
from tests.models.parity import LIMITS, TOLERANCE, Subject, deviation, logits_of

LLAMA, MISTRAL, QWEN_3 = CONFIGS["Llama 1"], CONFIGS["Mistral 7B 0.1"], CONFIGS["Qwen 3 8B"]
QWEN_3_VL, QWEN_3_MOE = CONFIGS["Qwen 3 VL 8B"], CONFIGS["Qwen 3 30B"]
VISION = QWEN_3_VL["vision_config"]
ONE_OF_EACH = {config["architectures"][0]: name for name, config in CONFIGS.items()}
"""Architecture -> one of the configs that have it."""

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
        ValueError,
        match=rf"sets \S*{name} to .*, which nva doesn't implement for .*; .* remove it there",
    ):
        read_model({**config, **settings})


@pytest.mark.parametrize("name", CONFIGS)
def test_real_configs_are_read(name: str) -> None:
    text = CONFIGS[name].get("text_config", CONFIGS[name])
    assert spec(CONFIGS[name]).n_layers == text["num_hidden_layers"]
    assert spec(shrunk(CONFIGS[name])).hidden_size == 48


COMPUTED = [
    "Llama 2 Chat",
    "Llama 3.2 1B",
    "Llama 3.1, by Unsloth",
    "SmolLM2",
    "DeepSeek Coder",
    "Mistral 7B 0.1",
    "Ministral 8B",
    "Qwen 2.5 0.5B",
    "Qwen 2.5, long",
    "Qwen 2 57B",
    "Qwen 3 0.6B",
    "Qwen 3 235B",
    "Qwen 3 Coder 480B",
    "Gemma 3 1B",
    "Gemma 3 27B, its text model",
]


@pytest.mark.parametrize("name", COMPUTED)
def test_logits_of_real_configs_are_transformers(name: str, tmp_path: Path) -> None:
    """Sizes are tiny, every other key is the hub's: read by transformers as by us."""
    config = shrunk(CONFIGS[name])
    theirs = getattr(transformers, CLASSES[config["architectures"][0]])(**config)
    theirs._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(theirs, dtype=torch.float32).eval()
    randomize(model, seed=0)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint, params = load_checkpoint(tmp_path, "float32")
    rows = [np.random.default_rng(i).integers(0, 97, n) for i, n in enumerate((36, 19, 1))]
    ours = Subject(
        spec=checkpoint.spec,
        params=params,
        limits=LIMITS,
        rows=rows,
        expected=[logits_of(model, row) for row in rows],
    )
    assert deviation(ours, 7) < TOLERANCE


def test_every_family_has_a_real_config() -> None:
    assert {config["architectures"][0] for config in CONFIGS.values()} == set(FAMILIES)


def test_experts_of_a_qwen3_vl_are_always_normalized() -> None:
    config = CONFIGS["Qwen 3 VL 30B"]
    text = config["text_config"] | {"norm_topk_prob": False}
    refuses("norm_topk_prob", config, text_config=text)


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
    old = next(config for config in CONFIGS.values() if config["architectures"] == [architecture])
    plain, rewritten = config_class(architectures=[architecture]), config_class(**old)
    assert spec(plain.to_dict()).n_layers == plain.num_hidden_layers
    assert spec(rewritten.to_dict()) == spec(rewritten.to_diff_dict()) == spec(old)


@pytest.mark.parametrize("config_class", [Qwen3VLConfig, Qwen3VLMoeConfig])
def test_what_transformers_writes_of_qwen3_vl_is_read(config_class: Any) -> None:
    old = CONFIGS["Qwen 3 VL 4B" if config_class is Qwen3VLConfig else "Qwen 3 VL 30B"]
    rewritten = config_class(**old)
    assert spec(rewritten.to_dict()) == spec(rewritten.to_diff_dict()) == spec(old)


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("embedding_multiplier", 12.0),
        ("attention_multiplier", 0.2),
        ("logits_scaling", 8.0),
        ("clip_qkv", 8.0),
        ("no_rope_layers", [1, 1, 1, 0]),
        ("attention_chunk_size", 8192),
        ("alibi", True),
        ("attn_temperature_tuning", 4),
        ("rotary_pct", 0.0),
        ("a setting of next year", "on"),
    ],
)
def test_what_is_on_and_not_read_is_refused(name: str, setting: str, value: Any) -> None:
    refuses(setting, CONFIGS[name], **{setting: value})
    assert all(
        spec(CONFIGS[name], **{setting: off}) == spec(CONFIGS[name]) for off in (None, False)
    )


OFF = {
    "shared_expert_intermediate_size": 0,
    "n_shared_experts": 0,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0,
    "use_parallel_residual": False,
    "sparse_attention": {},
    "residual_multiplier": 1.0,
    "logits_scaling": 1,
    "rotary_pct": 1.0,
    "attention_multiplier": None,
}
AGREED = {
    "use_rope": True,
    "is_causal": True,
    "use_rms_norm": True,
    "position_embedding_type": "rope",
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
}
ELSEWHERE = {
    "use_sdpa": True,
    "use_flash_attn": True,
    "_attn_implementation": "flash_attention_2",
    "_attn_implementation_autoset": True,
    "_flash_attn_2_enabled": True,
    "use_fused_rope": True,
    "attention_dropout": 0.1,
    "moe_aux_loss_coef": 0.01,
    "initializer_std": 0.02,
    "image_token_index": 9,
    "router_jitter_noise": 0.1,
    "unsloth_version": "2025.9.1",
}


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_what_changes_nothing_is_let_pass(name: str) -> None:
    inner = CONFIGS[name].get("text_config", CONFIGS[name])
    agreed = {key: inner.get(value, value) for key, value in AGREED.items() if value is not True}
    agreed |= {key: True for key, value in AGREED.items() if value is True}
    for key, value in {**OFF, **agreed, **ELSEWHERE}.items():
        if key in inner or (key == "shared_expert_intermediate_size" and "Moe" in name):
            continue
        if "text_config" in CONFIGS[name]:
            changed = CONFIGS[name] | {"text_config": inner | {key: value}}
        else:
            changed = inner | {key: value}
        assert spec(changed) == spec(CONFIGS[name]), key


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("use_rope", False),
        ("is_causal", False),
        ("use_rms_norm", False),
        ("position_embedding_type", "alibi"),
        ("no_bias", False),
        ("no_rope_layers", [0] * 36),
        ("num_layers", 35),
        ("use_qk_norm", False),
        ("qkv_bias", True),
        ("kv_channels", 64),
    ],
)
def test_what_contradicts_the_family_is_refused(setting: str, value: Any) -> None:
    refuses(setting, QWEN_3, **{setting: value})


@pytest.mark.parametrize("name", ["Qwen 3 8B", "Qwen 3 Coder 30B", "Gemma 3 1B"])
def test_query_and_key_norms_are_what_the_family_has(name: str) -> None:
    assert spec(CONFIGS[name], use_qk_norm=True) == spec(CONFIGS[name])
    refuses("qk_norm", CONFIGS["Llama 3 8B"], qk_norm=True)


def test_a_scale_is_off_at_one_and_a_size_at_zero() -> None:
    assert is_off("logit_scale", 1.0)
    assert not is_off("logit_scale", 0.0)
    assert not is_off("attention_scale", 1.0)  # instead of 1 / sqrt(head_dim)
    assert not is_off("scale_attention_weights", True)
    assert is_off("n_memory_tokens", 0)
    assert not is_off("n_memory_tokens", 1)
    assert not is_elsewhere("output_multiplier")
    assert not is_elsewhere("conv_kernel_size")


def test_settings_inside_the_parts_of_a_config_are_watched_too() -> None:
    refuses("clip_qkv", QWEN_3_VL, text_config=QWEN_3_VL["text_config"] | {"clip_qkv": 8.0})
    refuses("window_size", QWEN_3_VL, vision_config=VISION | {"window_size": 112})


def test_what_only_other_families_read_is_refused() -> None:
    refuses("attention_bias", MISTRAL, attention_bias=True)
    refuses("num_experts", LLAMA, num_experts=8)
    refuses("scale_emb", LLAMA, scale_emb=12)
    refuses("query_pre_attn_scalar", QWEN_3, query_pre_attn_scalar=256)
    refuses("shared_expert_intermediate_size", QWEN_3_MOE, shared_expert_intermediate_size=8)


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
