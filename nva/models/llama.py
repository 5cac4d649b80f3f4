"""Llama 1 to 3 and the many checkpoints that call themselves Llama (SmolLM2 is one), and Mistral.

Read next: qwen2.py, which differs by a bias; decoder.py, which runs them all.
"""

from __future__ import annotations

from nva.models.hf_config import Config
from nva.models.params import Weights
from nva.models.read_spec import read_spec
from nva.models.registry import EMULATED, LOGITS, register
from nva.models.spec import ModelSpec

_ATTENTION, _MLP = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."

LLAMA_WEIGHTS = Weights(
    names={
        "embed": ("model.embed_tokens.weight",),
        "input_norm": ("model.layers.{layer}.input_layernorm.weight",),
        "qkv": tuple(f"{_ATTENTION}{part}_proj.weight" for part in "qkv"),
        "qkv_bias": tuple(f"{_ATTENTION}{part}_proj.bias" for part in "qkv"),
        "q_norm": (f"{_ATTENTION}q_norm.weight",),
        "k_norm": (f"{_ATTENTION}k_norm.weight",),
        "o": (f"{_ATTENTION}o_proj.weight",),
        "o_bias": (f"{_ATTENTION}o_proj.bias",),
        "post_norm": ("model.layers.{layer}.post_attention_layernorm.weight",),
        "gate_up": (f"{_MLP}gate_proj.weight", f"{_MLP}up_proj.weight"),
        "gate_up_bias": (f"{_MLP}gate_proj.bias", f"{_MLP}up_proj.bias"),
        "down": (f"{_MLP}down_proj.weight",),
        "down_bias": (f"{_MLP}down_proj.bias",),
        "router": (f"{_MLP}gate.weight",),
        "experts_gate_up": (
            f"{_MLP}experts.{{expert}}.gate_proj.weight",
            f"{_MLP}experts.{{expert}}.up_proj.weight",
        ),
        "experts_down": (f"{_MLP}experts.{{expert}}.down_proj.weight",),
        "shared_gate_up": (
            f"{_MLP}shared_expert.gate_proj.weight",
            f"{_MLP}shared_expert.up_proj.weight",
        ),
        "shared_down": (f"{_MLP}shared_expert.down_proj.weight",),
        "shared_gate": (f"{_MLP}shared_expert_gate.weight",),
        "norm": ("model.norm.weight",),
        "head": ("lm_head.weight",),
    },
    fused={
        "experts_gate_up": f"{_MLP}experts.gate_up_proj",
        "experts_down": f"{_MLP}experts.down_proj",
    },
    rope_buffers=(f"{_ATTENTION}rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
)
"""The names most families use. A spec decides which of them its model has."""


@register("LlamaForCausalLM", verified=[LOGITS, "real text of SmolLM2 135M", EMULATED])
def llama(config: Config) -> tuple[ModelSpec, Weights]:
    """Biases are optional, on all four attention projections or on the MLP's three."""
    if config.get("sliding_window"):
        config.refuse("sliding_window", "null, since LlamaForCausalLM has none; is it a Mistral?")
    if config.get("rope_theta") is None:
        config |= {"rope_theta": 10000.0}  # Llama 1 and 2, whose config.json doesn't name it
    bias = config.flag("attention_bias")
    spec = read_spec(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias"))
    return spec, LLAMA_WEIGHTS


@register("MistralForCausalLM", verified=[LOGITS, EMULATED])
def mistral(config: Config) -> tuple[ModelSpec, Weights]:
    """Llama with a sliding window in every layer, or in none where the config sets it to null."""
    return read_spec(config, window=config.size_or_null("sliding_window")), LLAMA_WEIGHTS
