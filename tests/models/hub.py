"""config.json of models on the hub, with every key that they really carry; and the same, shrunk.

Sizes are the real ones: reading a config costs nothing. `shrunk` gives tiny sizes with all keys kept,
so that a model can be built."""

from __future__ import annotations

from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_3 = LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_31 = LLAMA_3 | {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": LLAMA3_ROPE,
    "transformers_version": "4.42.3",
}
SMOLLM2 = LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "vocab_size": 49152,
}
MISTRAL = LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
MISTRAL_2 = MISTRAL | {"attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None}
NEMO = MISTRAL_2 | {
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "vocab_size": 131072,
}


def qwen(
    hidden: int, inner: int, layers: int, heads: int, kv: int, **others: Any
) -> dict[str, Any]:
    """A dense Qwen2.5."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "max_position_embeddings": 32768,
        "max_window_layers": layers,
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 152064,
        **others,
    }


def qwen3(hidden: int, inner: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    """A dense Qwen3."""
    return qwen(hidden, inner, layers, heads, 8) | {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "transformers_version": "4.51.0",
        "vocab_size": 151936,
        **others,
    }


EXPERTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
MOE = EXPERTS | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
QWEN3_30B = qwen3(2048, 6144, 48, 32, **MOE, moe_intermediate_size=768)
QWEN3_235B = qwen3(4096, 12288, 94, 64, **MOE, moe_intermediate_size=1536)
LONG = {"max_position_embeddings": 262144, "rope_theta": 10000000}
CODER = LONG | {
    "qkv_bias": False,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}
CODER_30B = {
    name: value
    for name, value in (QWEN3_30B | CODER).items()
    if name not in ("attention_bias", "bos_token_id")
} | {"intermediate_size": 5472, "max_window_layers": 28, "transformers_version": "4.52.3"}
CODER_480B = CODER_30B | {
    "hidden_size": 6144,
    "intermediate_size": 8192,
    "max_window_layers": 62,
    "moe_intermediate_size": 2560,
    "num_attention_heads": 96,
    "num_experts": 160,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "transformers_version": "4.51.0",
}
QWEN2_MOE = qwen(3584, 18944, 28, 28, 4) | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 2560,
    "norm_topk_prob": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 20480,
    "sliding_window": 65536,
}

AXES = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}


def qwen3_vl(
    text: dict[str, Any], n_towers: int, is_tied: bool = False, **text_only: Any
) -> dict[str, Any]:
    """A Qwen3-VL around a text model of Qwen3: its dtype and its end of sequence stand in
    text_config alone."""
    dropped = {"architectures", "max_window_layers", "model_type", "output_router_logits"}
    dropped |= {"router_aux_loss_coef", "sliding_window", "tie_word_embeddings", "torch_dtype"}
    dropped |= {"transformers_version", "use_sliding_window"}
    kind = "qwen3_vl_moe" if "num_experts" in text else "qwen3_vl"
    is_small = n_towers == 24
    return {
        "architectures": [
            "Qwen3VLMoeForConditionalGeneration"
            if "num_experts" in text
            else "Qwen3VLForConditionalGeneration"
        ],
        "image_token_id": 151655,
        "model_type": kind,
        "text_config": {
            **{name: value for name, value in text.items() if name not in dropped},
            "dtype": "bfloat16",
            "max_position_embeddings": 262144,
            "model_type": f"{kind}_text",
            "rope_scaling": AXES,
            "rope_theta": 5000000,
            **text_only,
        },
        "tie_word_embeddings": is_tied,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 151656,
        "vision_config": {
            "deepstack_visual_indexes": [5, 11, 17] if is_small else [8, 16, 24],
            "depth": n_towers,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1024 if is_small else 1152,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 4096 if is_small else 4304,
            "model_type": kind,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
GEMMA_3_270M = {
    name: value
    for name, value in GEMMA_3_1B.items()
    if name not in ("cache_implementation", "sliding_window_pattern")
} | {
    "_sliding_window_pattern": 6,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "num_hidden_layers": 18,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "transformers_version": "4.55.0.dev0",
    "use_bidirectional_attention": False,
}
MINICPM = LLAMA | {
    "_name_or_path": "openbmb/MiniCPM-2B-sft-bf16",
    "architectures": ["MiniCPMForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_minicpm.MiniCPMConfig",
        "AutoModel": "modeling_minicpm.MiniCPMModel",
        "AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM",
        "AutoModelForSeq2SeqLM": "modeling_minicpm.MiniCPMForCausalLM",
        "AutoModelForSequenceClassification": "modeling_minicpm.MiniCPMForSequenceClassification",
    },
    "dim_model_base": 256,
    "hidden_size": 2304,
    "intermediate_size": 5760,
    "model_type": "minicpm",
    "num_attention_heads": 36,
    "num_hidden_layers": 40,
    "num_key_value_heads": 36,
    "rope_scaling": None,
    "scale_depth": 1.4,
    "scale_emb": 12,
    "torch_dtype": "bfloat16",
    "vocab_size": 122753,
}
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [1.0 + i / 8 for i in range(64)],
    "short_factor": [1.0] * 64,
    "original_max_position_embeddings": 32768,
}
MINICPM4 = {name: value for name, value in MINICPM.items() if name != "_name_or_path"} | {
    "eos_token_id": [2, 73440],
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "max_position_embeddings": 32768,
    "mup_denominator": 32,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 2,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": LONGROPE,
    "vocab_size": 73448,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Llama 1": LLAMA | {"max_sequence_length": 2048, "pad_token_id": 0, "_name_or_path": "llama-7b"},
    "Llama 2": LLAMA | {"num_key_value_heads": 32, "pretraining_tp": 1, "rope_scaling": None},
    "Llama 2 Chat": LLAMA | {"max_length": 4096, "temperature": 0.6, "top_p": 0.9, "do_sample": True},
    "CodeLlama 7B": LLAMA | {"max_position_embeddings": 16384, "rope_theta": 1000000, "vocab_size": 32016},
    "TinyLlama 1.1B": LLAMA | {"attention_bias": False, "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 2048, "num_hidden_layers": 22, "num_key_value_heads": 4, "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 10000.0},
    "Llama 3 8B": LLAMA_3,
    "Llama 3.1 8B": LLAMA_31,
    "Llama 3.2 1B": LLAMA_31 | {"head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "rope_scaling": LLAMA3_ROPE | {"factor": 32.0}, "tie_word_embeddings": True},
    "Llama 3.3 70B": LLAMA_31 | {"head_dim": 128, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
    "Llama 3.1, by Unsloth": LLAMA_31 | {"unsloth_fixed": True, "unsloth_version": "2024.9", "pad_token_id": 128004},
    "SmolLM2": SMOLLM2,
    "DeepSeek Coder": LLAMA_3 | {"rope_scaling": {"factor": 4.0, "type": "linear"}},
    "Yi 1.5": LLAMA_3 | {"num_key_value_heads": 4, "pad_token_id": 0, "rope_theta": 5000000.0, "vocab_size": 64000},
    "Falcon 3": LLAMA_31 | {"head_dim": 256, "hidden_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 4, "rope_scaling": None, "rope_theta": 1000042},
    "Mistral 7B 0.1": MISTRAL,
    "Mistral 7B 0.2": MISTRAL_2,
    "Mistral 7B 0.3": MISTRAL_2 | {"vocab_size": 32768},
    "Mistral Nemo": NEMO,
    "Mistral Small 2501": NEMO | {"intermediate_size": 32768, "rope_theta": 100000000.0},
    "Ministral 8B": NEMO | {"hidden_size": 4096, "max_position_embeddings": 32768, "num_hidden_layers": 36, "rope_theta": 100000000.0, "sliding_window": 32768},
    "Zephyr": MISTRAL | {"_name_or_path": "mistralai/Mistral-7B-v0.1", "pad_token_id": 2},
    "Qwen 2.5 0.5B": qwen(896, 4864, 24, 14, 2, tie_word_embeddings=True, use_mrope=False, vocab_size=151936),
    "Qwen 2.5 1.5B": qwen(1536, 8960, 28, 12, 2, tie_word_embeddings=True, use_mrope=False, vocab_size=151936),
    "Qwen 2.5 3B": qwen(2048, 11008, 36, 16, 2, tie_word_embeddings=True, vocab_size=151936),
    "Qwen 2.5 7B": qwen(3584, 18944, 28, 28, 4),
    "Qwen 2.5 14B": qwen(5120, 13824, 48, 40, 8),
    "Qwen 2.5 32B": qwen(5120, 27648, 64, 40, 8),
    "Qwen 2.5 72B": qwen(8192, 29568, 80, 64, 8),
    "Qwen 2.5 Math": qwen(1536, 8960, 28, 12, 2, max_position_embeddings=4096, rope_theta=10000, sliding_window=4096, use_mrope=False),
    "Qwen 2.5, long": qwen(3584, 18944, 28, 28, 4, rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}),
    "DeepSeek R1 Distill": qwen(1536, 8960, 28, 12, 2, max_window_layers=21, sliding_window=4096, rope_theta=10000, use_mrope=False),
    "Qwen 1.5 MoE": QWEN2_MOE | {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632},
    "Qwen 2 57B": QWEN2_MOE,
    "Qwen 3 0.6B": qwen3(1024, 3072, 28, 16, tie_word_embeddings=True),
    "Qwen 3 1.7B": qwen3(2048, 6144, 28, 16, tie_word_embeddings=True),
    "Qwen 3 4B": qwen3(2560, 9728, 36, 32, tie_word_embeddings=True),
    "Qwen 3 4B 2507": qwen3(2560, 9728, 36, 32, tie_word_embeddings=True, max_position_embeddings=262144, rope_theta=5000000),
    "Qwen 3 8B": qwen3(4096, 12288, 36, 32),
    "Qwen 3 14B": qwen3(5120, 17408, 40, 40),
    "Qwen 3 32B": qwen3(5120, 25600, 64, 64),
    "Qwen 3 30B": QWEN3_30B,
    "Qwen 3 235B": QWEN3_235B,
    "Qwen 3 30B Instruct 2507": QWEN3_30B | LONG,
    "Qwen 3 30B Thinking 2507": QWEN3_30B | LONG | {"use_qk_norm": True},
    "Qwen 3 235B 2507": QWEN3_235B | LONG | {"rope_theta": 5000000},
    "Qwen 3 Coder 30B": CODER_30B,
    "Qwen 3 Coder 480B": CODER_480B,
    "Qwen 3 VL 2B": qwen3_vl(qwen3(2048, 6144, 28, 16), 24, is_tied=True, tie_word_embeddings=True),
    "Qwen 3 VL 4B": qwen3_vl(qwen3(2560, 9728, 36, 32), 24, is_tied=True, tie_word_embeddings=True),
    "Qwen 3 VL 8B": qwen3_vl(qwen3(4096, 12288, 36, 32), 27),
    "Qwen 3 VL 32B": qwen3_vl(qwen3(5120, 25600, 64, 64), 27),
    "Qwen 3 VL 8B Thinking": qwen3_vl(qwen3(4096, 12288, 36, 32), 27, pad_token_id=151643),
    "Qwen 3 VL 30B": qwen3_vl(QWEN3_30B, 27),
    "Qwen 3 VL 235B": qwen3_vl(QWEN3_235B, 27),
    "Gemma 3 1B": GEMMA_3_1B,
    "Gemma 3 270M": GEMMA_3_270M,
    "Gemma 3 27B, its text model": GEMMA_3_270M | {"head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "layer_types": GEMMA_3_270M["layer_types"], "max_position_embeddings": 131072, "num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    "MiniCPM 2B": MINICPM,
    "MiniCPM4 8B": MINICPM4,
    "MiniCPM4 0.5B": MINICPM4 | {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24, "rope_scaling": LONGROPE | {"long_factor": [1.0] * 32, "short_factor": [1.0] * 32}, "tie_word_embeddings": True},
}  # fmt: skip

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "sliding_window": 5,
    "max_window_layers": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "query_pre_attn_scalar": 30,
    "mrope_section": [4, 3, 2],
}
TINY_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The config with tiny sizes: every key stays, and a null or 0 stays what it is."""
    small: dict[str, Any] = {}
    for name, value in config.items():
        if name == "vision_config":
            small[name] = {key: TINY_TOWER.get(key, each) for key, each in value.items()}
        elif name == "layer_types":
            small[name] = ["sliding_attention", "full_attention", "sliding_attention"]
        elif name in ("long_factor", "short_factor"):
            small[name] = value[:4]
        elif name in TINY and value:
            small[name] = TINY[name]
        else:
            small[name] = shrunk(value) if isinstance(value, dict) else value
    return small
