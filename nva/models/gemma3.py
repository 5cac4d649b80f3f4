"""Gemma 3, text only: more norms, which multiply by 1 + weight, windows in most layers and a rope
of their own there.

Read next: decoder.py, `_added`, for what the norms after attention and MLP do.
"""

from __future__ import annotations

from typing import Any

from nva.models.hf_config import Config
from nva.models.llama import LLAMA_WEIGHTS
from nva.models.params import Weights
from nva.models.read_rope import merged_ropes
from nva.models.read_spec import FULL, MAX_LAYERS, SLIDING, read_spec
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
    bias = config.flag("attention_bias")
    spec = read_spec(
        config | {**_ropes(config), "layer_types": _layer_types(config)},
        window=config.size("sliding_window"),
        head_dim=config.size("head_dim"),
        attn_scale=config.number("query_pre_attn_scalar") ** -0.5,
        embed_scale=config.size("hidden_size") ** 0.5,
        qk_norm=True,
        out_norms=True,
        unit_offset=True,
        qkv_bias=bias,
        o_bias=bias,
        tied_head=config.flag("tie_word_embeddings", True),
    )
    return spec, GEMMA3_WEIGHTS


def _layer_types(config: Config) -> list[str]:
    """Which layers have a window: as listed, or all but every sixth."""
    pattern = config.size("sliding_window_pattern", config.size("_sliding_window_pattern", 6))
    layers = range(1, config.size("num_hidden_layers", at_most=MAX_LAYERS) + 1)
    usual = [SLIDING if layer % pattern else FULL for layer in layers]
    return list(config.names("layer_types", usual)) or usual


def _ropes(config: Config) -> dict[str, Any]:
    """The ropes by kind of layer, as transformers 5 spells them. transformers 4 has a theta for
    each kind, and scales only the rope of the layers that see everything."""
    new = config.group("rope_parameters")
    if new and not {FULL, SLIDING} <= new.keys():
        config.refuse("rope_parameters", f"an object with {FULL} and {SLIDING}")
    old = {
        FULL: {"rope_theta": config.number("rope_theta", None), **config.group("rope_scaling")},
        SLIDING: {"rope_theta": config.number("rope_local_base_freq", None)},
    }
    ropes: dict[str, Any] = {}
    for kind in (FULL, SLIDING):
        inner = new.get(kind, {})
        if not isinstance(inner, dict):
            config.refuse("rope_parameters", f"an object with settings, as is {kind} in it")
        ropes[kind] = merged_ropes(config, inner, old[kind])
    if "rope_theta" not in ropes[SLIDING]:
        config.number("rope_local_base_freq")  # raises
    names = ("rope_parameters", "rope_scaling") if new else ("rope_scaling", "rope_parameters")
    return {"rope_theta": None, names[0]: ropes, names[1]: None}
