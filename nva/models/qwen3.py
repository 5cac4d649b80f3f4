"""Qwen3, dense: Llama with norms on every head's queries and keys, and a head_dim of its own.

Read next: decoder.py, `_attention`, for where the norms go.
"""

from __future__ import annotations

from nva.models.config import Config, read_spec, required
from nva.models.llama import LLAMA_WEIGHTS
from nva.models.params import Weights
from nva.models.qwen2 import qwen_windows
from nva.models.registry import register
from nva.models.spec import ModelSpec


@register("Qwen3ForCausalLM")
def qwen3(config: Config) -> tuple[ModelSpec, Weights]:
    """head_dim must be given: it is seldom hidden_size / num_attention_heads."""
    head_dim, bias = required(config, "head_dim"), config.get("attention_bias", False)
    spec = read_spec(config, qk_norm=True, head_dim=head_dim, qkv_bias=bias, o_bias=bias, **qwen_windows(config))
    return spec, LLAMA_WEIGHTS
