"""Tiny models of every family that nva knows, as the configs of their checkpoints, with random
weights."""

from __future__ import annotations

import torch

from nva.kernels import Kernels
from nva.models import ModelSpec, Params
from nva.models.params import Param, build_params
from nva.models.registry import read_model

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
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 37,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_local_base_freq": 1e3,
    "hidden_activation": "gelu_pytorch_tanh",
}
MINICPM = {
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 32,
    "rope_scaling": {
        "rope_type": "longrope",
        "long_factor": [1.0 + 0.25 * i for i in range(8)],
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "original_max_position_embeddings": 512,
    },
}

VISION = {
    "depth": 2,
    "hidden_size": 144,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [1, 0],
}


def seeing(vision, **text):
    """A config of Qwen3-VL, whose text model and vision tower have configs of their own."""
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text_config = {**BASE, "head_dim": 32, "rope_scaling": rope, "num_hidden_layers": 3, **text}
    return {"text_config": text_config, "vision_config": {**VISION, **vision}, "image_token_id": 90}


SEEING = "qwen3 vl, a tower with heads of 72"

CONFIGS = {
    "llama": ("LlamaForCausalLM", {"rope_scaling": LLAMA3}),
    "llama, all biases, one KV head, tied": (
        "LlamaForCausalLM",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "llama, half of each head turns": (
        "LlamaForCausalLM",
        {"head_dim": 32, "partial_rotary_factor": 0.5},
    ),
    "mistral, a window of 100": ("MistralForCausalLM", {"sliding_window": 100}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2, a window in the second layer, yarn": (
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 37,
            "max_window_layers": 1,
            "rope_scaling": YARN,
        },
    ),
    "qwen3, heads wider than the model, tied": (
        "Qwen3ForCausalLM",
        {"head_dim": 48, "tie_word_embeddings": True},
    ),
    "qwen3, as many KV heads": ("Qwen3ForCausalLM", {"head_dim": 16, "num_key_value_heads": 4}),
    "qwen3 moe, the first layer dense": (
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "head_dim": 32, "mlp_only_layers": [0]},
    ),
    "qwen3 moe, all experts active": (
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "head_dim": 32, "num_experts_per_tok": 6},
    ),
    "qwen2 moe": (
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "shared_expert_intermediate_size": 80, "norm_topk_prob": False},
    ),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
    SEEING: ("Qwen3VLForConditionalGeneration", seeing({})),
    "qwen3 vl moe, a tower with heads of 64": (
        "Qwen3VLMoeForConditionalGeneration",
        seeing(
            {"hidden_size": 128, "deepstack_visual_indexes": [1]}, **EXPERTS, num_hidden_layers=2
        ),
    ),
    "minicpm4": ("MiniCPMForCausalLM", MINICPM),
}


def tiny_spec(name: str) -> ModelSpec:
    """The spec that a family reads from one of CONFIGS."""
    architecture, differences = CONFIGS[name]
    base = {} if "text_config" in differences else BASE
    return read_model({"architectures": [architecture], **base, **differences})[0]


def tiny_params(spec: ModelSpec, kernels: Kernels, dtype: torch.dtype = torch.float32) -> Params:
    """The same weights for every backend, norms and biases among them; large enough for faults to
    show."""
    generator = torch.Generator().manual_seed(1)

    def make(name: str, layer: int | None, param: Param) -> torch.Tensor:
        empty = torch.empty(param.shape, dtype=dtype)
        if param.kind in ("norm", "layer_norm"):
            return empty.uniform_(0.5, 1.5, generator=generator)
        return empty.normal_(0, 0.2, generator=generator)

    return build_params(spec, make, kernels)
