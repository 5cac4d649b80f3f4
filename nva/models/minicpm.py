"""MiniCPM and MiniCPM4: Llama with a scale on embeddings, on what each layer adds, and on logits.

Their checkpoints bring code of their own, which is never run: the config is read as data. (Hu et
al. 2024, MiniCPM.) Read next: llama.py for the names of the weights."""

from __future__ import annotations

import math

from nva.models.hf_config import Config, read_spec, required, size
from nva.models.llama import LLAMA_WEIGHTS
from nva.models.params import Weights
from nva.models.registry import EMULATED, register
from nva.models.spec import ModelSpec

_DEFAULTS = {"rope_theta": 10000.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
"""What the checkpoints' own config class fills in, so that their config.json may leave it out."""


@register(
    "MiniCPMForCausalLM",
    verified=["logits equal to the published architecture in plain torch", EMULATED],
)
def minicpm(config: Config) -> tuple[ModelSpec, Weights]:
    """Attention is dense; the sparse one of long texts (InfLLM v2) and MiniCPM-MoE are refused."""
    for name in ("sparse_config", "num_experts"):
        if config.get(name):
            raise ValueError(
                f"config.json sets {name}, which nva doesn't implement for MiniCPM; {_ADVICE[name]}"
            )
    config.pass_over("mup_denominator")  # of heads that draft for it
    config |= {name: value for name, value in _DEFAULTS.items() if name not in config}
    scales = {
        "embed_scale": float(required(config, "scale_emb")),
        "residual_scale": required(config, "scale_depth")
        / math.sqrt(size(config, "num_hidden_layers")),
        "logit_scale": size(config, "dim_model_base") / size(config, "hidden_size"),
    }
    bias = config.get("attention_bias", False)
    return read_spec(config, qkv_bias=bias, o_bias=bias, **scales), LLAMA_WEIGHTS


_ADVICE = {
    "sparse_config": "remove it from config.json for dense attention",
    "num_experts": "take a dense MiniCPM",
}
