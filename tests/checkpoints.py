"""Tiny random checkpoints, written by transformers, for every way in which the families differ.

Weights are drawn with a standard deviation of 0.2: at the usual 0.02 a wrong rope moves logits by
0.003, here by 9. The cases cover most pairs of family, rope, spelling, head, files, window and head
size, not their full product."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

MAX_POSITION, MAX_MODEL_LEN = 24, 36

FAMILIES = {
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
}


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 500.0, **settings}


def _longrope(head_dim: int, **settings: Any) -> dict[str, Any]:
    divisors = [1.0 + 0.3 * i for i in range(head_dim // 2)]
    long = [2.0 + 0.7 * i for i in range(head_dim // 2)]
    return _rope("longrope", short_factor=divisors, long_factor=long, **settings)


def _two_ropes(full: dict[str, Any]) -> dict[str, Any]:
    """Gemma's: one for layers that see everything, one for those with a window."""
    return {"full_attention": full, "sliding_attention": {**_rope("default"), "rope_theta": 50.0}}


LLAMA3 = _rope(
    "llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=16)
DEEPSEEK_YARN = {
    **YARN,
    "mscale": 0.8,
    "mscale_all_dim": 0.3,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "truncate": False,
}


@attrs.frozen(kw_only=True)
class Case:
    """One checkpoint: a family, a rope, and the rest of its config."""

    family: str
    rope: dict[str, Any] = attrs.field(factory=lambda: _rope("default"))
    spelling: int = 5  # transformers' version whose names the config uses for the rope
    is_sharded: bool = False
    is_fused: bool = False  # one tensor for all experts of a layer
    config: dict[str, Any] = attrs.field(factory=dict)
    lengths: tuple[int, ...] = (MAX_MODEL_LEN, 19, 1, 27)  # of the rows to compare
    max_model_len: int = MAX_MODEL_LEN


def _case(family: str, rope: dict[str, Any] | None = None, **fields: Any) -> Case:
    known = {field.name for field in attrs.fields(Case)}
    config = {name: fields.pop(name) for name in list(fields) if name not in known}
    return Case(family=family, rope=rope or _rope("default"), config=config, **fields)


_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
_SAME = (
    MAX_MODEL_LEN,
) * 3  # transformers changes these ropes with the length, so all rows reach the longest
_LAYER_TYPES = ["sliding_attention", "full_attention"]
_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
}
_PLAIN_MOE = {**_MOE, "norm_topk_prob": False}
_IDLE = {
    **_MOE,
    "num_experts": 40,
    "num_experts_per_tok": 1,
}  # most experts get no token in most steps

CASES = {
    "llama": _case("llama"),
    "llama-linear": _case(
        "llama", _rope("linear", factor=2.5), spelling=4, tie_word_embeddings=True, is_sharded=True
    ),
    "llama-llama3": _case(
        "llama", LLAMA3, head_dim=10, attention_bias=True, tie_word_embeddings=True
    ),
    "llama-yarn": _case("llama", YARN, spelling=4, mlp_bias=True),
    "llama-dynamic": _case(
        "llama", _rope("dynamic", factor=3.0), head_dim=20, is_sharded=True, lengths=_SAME
    ),
    "llama-longrope": _case(  # the only one that stays within the original range
        "llama",
        _longrope(8, factor=3.0),
        spelling=4,
        num_key_value_heads=6,
        lengths=(MAX_POSITION, 9, 20),
        max_model_len=MAX_POSITION,
    ),
    "mistral": _case("mistral", sliding_window=5, spelling=4, is_sharded=True, head_dim=10),
    "mistral-llama3": _case("mistral", LLAMA3, sliding_window=None, num_key_value_heads=1),
    "qwen2": _case("qwen2", tie_word_embeddings=True, spelling=4),
    "qwen2-yarn": _case("qwen2", DEEPSEEK_YARN, is_sharded=True, **_QWEN_WINDOW),
    "qwen2-llama3": _case(
        "qwen2", LLAMA3, spelling=4, is_sharded=True, use_sliding_window=False, sliding_window=7
    ),
    "qwen2-dynamic": _case(
        "qwen2", _rope("dynamic", factor=2.0), spelling=4, lengths=_SAME, **_QWEN_WINDOW
    ),
    "qwen2-longrope": _case(
        "qwen2",
        _longrope(8, original_max_position_embeddings=16),
        tie_word_embeddings=True,
        lengths=(36, 17, 23),
    ),
    "qwen3": _case("qwen3", head_dim=20, is_sharded=True, tie_word_embeddings=True, spelling=4),
    "qwen3-window": _case("qwen3", head_dim=8, **{**_QWEN_WINDOW, "sliding_window": 1}),
    "qwen3-layers": _case(
        "qwen3", YARN, head_dim=10, **{**_QWEN_WINDOW, "layer_types": _LAYER_TYPES}
    ),
    "qwen3-linear": _case(
        "qwen3", _rope("linear", factor=4.0), head_dim=10, is_sharded=True, attention_bias=True
    ),
    "qwen3-yarn": _case(
        "qwen3",
        {**YARN, "attention_factor": 1.5},
        head_dim=20,
        tie_word_embeddings=True,
        spelling=4,
    ),
    "qwen3-dynamic": _case(
        "qwen3", _rope("dynamic", factor=2.0), head_dim=8, tie_word_embeddings=True, lengths=_SAME
    ),
    "qwen3-longrope": _case(
        "qwen3",
        _longrope(10, original_max_position_embeddings=16, attention_factor=1.2),
        head_dim=10,
        lengths=(17, 36, 20),
        **_QWEN_WINDOW,
    ),
    "gemma3": _case(
        "gemma3",
        _two_ropes(_rope("default")),
        spelling=4,
        head_dim=10,
        sliding_window=5,
        query_pre_attn_scalar=30,
    ),
    "gemma3-linear": _case(
        "gemma3",
        _two_ropes(_rope("linear", factor=4.0)),
        spelling=4,
        num_hidden_layers=7,
        head_dim=8,
        sliding_window=7,
        query_pre_attn_scalar=8,
        is_sharded=True,
    ),
    "gemma3-layers": _case(
        "gemma3",
        _two_ropes(YARN),
        head_dim=20,
        sliding_window=1,
        query_pre_attn_scalar=5,
        attention_bias=True,
        tie_word_embeddings=False,
        layer_types=_LAYER_TYPES,
    ),
    "qwen3_moe": _case("qwen3_moe", head_dim=8, spelling=4, is_sharded=True, **_MOE),
    "qwen3_moe-fused": _case("qwen3_moe", YARN, head_dim=10, is_fused=True, **_PLAIN_MOE),
    "qwen3_moe-idle": _case("qwen3_moe", head_dim=8, is_fused=True, is_sharded=True, **_IDLE),
    "qwen3_moe-layers": _case(
        "qwen3_moe",
        head_dim=8,
        num_hidden_layers=4,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=7,
        attention_bias=True,
        **_MOE,
    ),
    "qwen2_moe": _case("qwen2_moe", shared_expert_intermediate_size=28, spelling=4, **_PLAIN_MOE),
    "qwen2_moe-fused": _case(
        "qwen2_moe",
        shared_expert_intermediate_size=12,
        is_fused=True,
        qkv_bias=False,
        mlp_only_layers=[0],
        layer_types=_LAYER_TYPES,
        **{**_QWEN_WINDOW, **_MOE},
    ),
}


def build(case: Case, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Write the case's checkpoint into the folder and return the model, eager attention,
    float32."""
    config_class, model_class = FAMILIES[case.family]
    config = config_class(**{**SIZES, "rope_parameters": dict(case.rope), **case.config})
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    randomize(model, seed)
    size = "50KB" if case.is_sharded else "50GB"
    model.save_pretrained(folder, max_shard_size=size, save_original_format=not case.is_fused)
    if case.spelling == 4:
        edit_json(folder / "config.json", respell)
    return model


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Draw every parameter: norms around 1, all others around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), 0.2, generator=generator)


def edit_json(path: Path, edit: Any) -> None:
    """Rewrite a JSON file with what `edit` makes of its content."""
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


def respell(config: dict[str, Any]) -> dict[str, Any]:
    """A config as transformers 4 wrote it: rope_theta, and rope_scaling with a `type`; num_experts;
    Gemma's layers by a pattern."""
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"], rope = (
            rope["sliding_attention"]["rope_theta"],
            rope["full_attention"],
        )
        config["sliding_window_pattern"] = 6
        del config["layer_types"]
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    scaling = None if kind == "default" else {"type": kind, **rope}
    renamed = {"dtype": "torch_dtype", "num_local_experts": "num_experts"}
    config = {renamed.get(name, name): value for name, value in config.items()}
    return {**config, "rope_theta": theta, "rope_scaling": scaling}
