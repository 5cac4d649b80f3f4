"""Tiny models of every family that nva knows, as the configs of their checkpoints, with random weights."""

from __future__ import annotations

import torch

from nva.kernels import Kernels
from nva.models import FAMILIES, ModelSpec, Params, random_params

BASE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

CONFIGS = {
    "llama": ("LlamaForCausalLM", {"rope_scaling": LLAMA3}),
    "llama, all biases, one KV head, tied": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama, half of each head turns": ("LlamaForCausalLM", {"head_dim": 32, "partial_rotary_factor": 0.5}),
    "mistral, a window of 100": ("MistralForCausalLM", {"sliding_window": 100}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2, a window in the second layer, yarn": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1, "rope_scaling": YARN},
    ),
    "qwen3, heads wider than the model, tied": ("Qwen3ForCausalLM", {"head_dim": 48, "tie_word_embeddings": True}),
    "qwen3, as many KV heads": ("Qwen3ForCausalLM", {"head_dim": 16, "num_key_value_heads": 4}),
}


def tiny_spec(name: str) -> ModelSpec:
    """The spec that a family reads from one of CONFIGS."""
    architecture, differences = CONFIGS[name]
    return FAMILIES[architecture]({"architectures": [architecture], **BASE, **differences})[0]


def tiny_params(spec: ModelSpec, kernels: Kernels, dtype: torch.dtype = torch.float32) -> Params:
    """The same weights for every backend, norms and biases among them; large enough for faults to show."""
    params = random_params(spec, dtype, torch.Generator().manual_seed(1), kernels.pack_linear, std=0.2)
    generator = torch.Generator().manual_seed(2)
    for tensors in ({"norm": params["norm"]}, *params["layers"]):
        for name in sorted(tensors):
            if name.endswith("norm"):
                tensors[name].uniform_(0.5, 1.5, generator=generator)
    return params
