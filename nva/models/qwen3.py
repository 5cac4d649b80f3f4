"""Qwen3: Llama with norms on every head's queries and keys, and a head_dim of its own; Qwen3-MoE
has experts too.

Read next: decoder.py, `_attention`, for where the norms go.
"""

from __future__ import annotations

from nva.models.hf_config import Config
from nva.models.llama import LLAMA_WEIGHTS
from nva.models.params import Weights
from nva.models.qwen2 import qwen_window, qwen_windows
from nva.models.read_spec import read_experts, read_spec
from nva.models.registry import EMULATED, LOGITS, register
from nva.models.spec import ModelSpec


@register("Qwen3ForCausalLM", verified=[LOGITS, EMULATED])
def qwen3(config: Config) -> tuple[ModelSpec, Weights]:
    """head_dim must be given: it is seldom hidden_size / num_attention_heads."""
    bias = config.flag("attention_bias")
    spec = read_spec(
        config,
        qk_norm=True,
        head_dim=config.size("head_dim"),
        qkv_bias=bias,
        o_bias=bias,
        **qwen_windows(config),
    )
    return spec, LLAMA_WEIGHTS


@register("Qwen3MoeForCausalLM", verified=[LOGITS, EMULATED])
def qwen3_moe(config: Config) -> tuple[ModelSpec, Weights]:
    """Any window is off unless use_sliding_window says so, and then in every layer."""
    bias = config.flag("attention_bias")
    spec = read_spec(
        config,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        experts=read_experts(config),
        window=qwen_window(config),
    )
    return spec, LLAMA_WEIGHTS
