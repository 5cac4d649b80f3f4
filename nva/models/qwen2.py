"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values; Qwen2-MoE has experts and one
that all share.

Read next: qwen3.py, which has norms in its place.
"""

from __future__ import annotations

from typing import Any

from nva.models.hf_config import Config
from nva.models.llama import LLAMA_WEIGHTS
from nva.models.params import Weights
from nva.models.read_spec import MAX_LAYERS, read_experts, read_spec
from nva.models.registry import EMULATED, LOGITS, register
from nva.models.spec import ModelSpec


@register("Qwen2ForCausalLM", verified=[LOGITS, EMULATED])
def qwen2(config: Config) -> tuple[ModelSpec, Weights]:
    """Any window is off unless use_sliding_window says so."""
    return read_spec(config, qkv_bias=True, **qwen_windows(config)), LLAMA_WEIGHTS


def qwen_windows(config: Config) -> dict[str, Any]:
    """The first max_window_layers layers see everything, the others the window; without
    use_sliding_window all do."""
    window = qwen_window(config)
    if window is None:
        return {}
    n_unwindowed = config.size("max_window_layers", at_least=0, at_most=MAX_LAYERS)
    return {"window": window, "n_unwindowed": n_unwindowed}


def qwen_window(config: Config) -> int | None:
    """The window, None unless use_sliding_window is on: then the config's other settings of windows
    mean nothing."""
    config.pass_over("sliding_window", "max_window_layers")
    if not config.flag("use_sliding_window"):
        return None
    if config.get("sliding_window") is None:
        config.refuse("use_sliding_window", "false, since sliding_window isn't given")
    return config.size("sliding_window")


@register("Qwen2MoeForCausalLM", verified=[LOGITS, EMULATED])
def qwen2_moe(config: Config) -> tuple[ModelSpec, Weights]:
    """Which layers have a window must be listed: programs disagree on what max_window_layers means
    here."""
    window = qwen_window(config)
    if window is not None and not config.get("layer_types"):
        config.refuse("use_sliding_window", "false, since layer_types isn't given")
    spec = read_spec(
        config,
        qkv_bias=config.flag("qkv_bias", True),
        experts=read_experts(config, config.size("shared_expert_intermediate_size", at_least=0)),
        window=window,
    )
    return spec, LLAMA_WEIGHTS
