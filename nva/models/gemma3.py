"""Gemma 3, text only: more norms, which multiply by 1 + weight, windows in most layers and a rope
of their own there.

Read next: decoder.py, `_added`, for what the norms after attention and MLP do.
"""

from __future__ import annotations

from typing import Any

from nva.models.hf_config import FULL, SLIDING, Config, read_spec, required, size
from nva.models.llama import LLAMA_WEIGHTS
from nva.models.params import Weights
from nva.models.registry import EMULATED, LOGITS, register
from nva.models.spec import ModelSpec

_LAYER = "model.layers.{layer}."

GEMMA3_WEIGHTS = Weights(
    names={
        **LLAMA_WEIGHTS.names,
        "attention_out_norm": (f"{_LAYER}post_attention_layernorm.weight",),
        "post_norm": (f"{_LAYER}pre_feedforward_layernorm.weight",),
        "mlp_out_norm": (f"{_LAYER}post_feedforward_layernorm.weight",),
    }
)


@register("Gemma3ForCausalLM", verified=[LOGITS, "real text of Gemma 3 270M", EMULATED])
def gemma3(config: Config) -> tuple[ModelSpec, Weights]:
    """Scores are scaled by query_pre_attn_scalar instead of head_dim, embeddings by the root of
    hidden_size."""
    scalar, hidden = size(config, "query_pre_attn_scalar"), size(config, "hidden_size")
    bias = config.get("attention_bias", False)
    spec = read_spec(
        config | {**_ropes(config), "layer_types": _layer_types(config)},
        window=required(config, "sliding_window"),
        head_dim=required(config, "head_dim"),
        attn_scale=scalar**-0.5,
        embed_scale=hidden**0.5,
        qk_norm=True,
        out_norms=True,
        unit_offset=True,
        qkv_bias=bias,
        o_bias=bias,
        tied_head=config.get("tie_word_embeddings", True),
    )
    return spec, GEMMA3_WEIGHTS


def _layer_types(config: Config) -> list[str]:
    """Which layers have a window: as listed, or all but every sixth."""
    patterns = [config.get(name) for name in ("sliding_window_pattern", "_sliding_window_pattern")]
    pattern = patterns[0] or patterns[1] or 6
    layers = range(1, size(config, "num_hidden_layers") + 1)
    return config.get("layer_types") or [SLIDING if layer % pattern else FULL for layer in layers]


def _ropes(config: Config) -> dict[str, Any]:
    """The ropes by kind of layer, as transformers 5 spells them; transformers 4 has a second
    theta."""
    if config.get("rope_parameters"):
        return {}
    full = {"rope_theta": required(config, "rope_theta"), **(config.get("rope_scaling") or {})}
    sliding = {"rope_theta": required(config, "rope_local_base_freq")}
    return {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {FULL: full, SLIDING: sliding},
    }
