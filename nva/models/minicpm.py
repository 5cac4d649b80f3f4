"""MiniCPM and MiniCPM4: Llama with a scale on embeddings, on what each layer adds, and on logits.

Their checkpoints bring code of their own, which is never run: the config is read as data. (Hu et
al. 2024, MiniCPM.) Read next: llama.py for the names of the weights."""

from __future__ import annotations

import math

from nva.models.hf_config import Config
from nva.models.llama import LLAMA_WEIGHTS
from nva.models.params import Weights
from nva.models.read_spec import MAX_LAYERS, read_spec
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
    config |= {name: value for name, value in _DEFAULTS.items() if config.get(name) is None}
    n_layers = config.size("num_hidden_layers", at_most=MAX_LAYERS)
    bias = config.flag("attention_bias")
    spec = read_spec(
        config,
        qkv_bias=bias,
        o_bias=bias,
        embed_scale=config.number("scale_emb"),
        residual_scale=config.number("scale_depth") / math.sqrt(n_layers),
        logit_scale=config.size("dim_model_base") / config.size("hidden_size"),
    )
    return spec, LLAMA_WEIGHTS


_ADVICE = {
    "sparse_config": "remove it from config.json for dense attention",
    "num_experts": "take a dense MiniCPM",
}
