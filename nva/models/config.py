"""What the families have in common when they read a Hugging Face config.json.

The law: what the config asks for and nva doesn't do is an error, never ignored. A config is a plain dict: no code of
the checkpoint or of transformers runs. Read next: llama.py, the shortest family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nva.models.rope import read_rope
from nva.models.spec import Activation, ExpertSpec, ModelSpec

Config = Mapping[str, Any]

FULL, SLIDING = "full_attention", "sliding_attention"


def required(config: Config, name: str) -> Any:
    """A setting without a default. Raises ValueError if the config doesn't have it."""
    if name not in config:
        raise ValueError(f"config.json has no {name!r}, which {_architecture(config)} needs")
    return config[name]


def size(config: Config, name: str) -> int:
    """A setting that must be a whole number, at least 1. Raises ValueError if it isn't."""
    found = required(config, name)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(f"config.json has {name} = {found!r}; it must be a whole number of at least 1")
    return found


_REFUSED = (  # settings that change what attention or the logits are, and that no family here knows
    "attn_logit_softcapping",
    "dual_chunk_attention_config",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "rope_interleaved",
    "use_bidirectional_attention",
)
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_spec(config: Config, *, window: int | None = None, n_unwindowed: int = 0, **differences: Any) -> ModelSpec:
    """The spec of a Llama-like config; a family gives the fields in which it differs.

    Layers see `window` positions, but for the first n_unwindowed, unless the config's `layer_types` say otherwise.
    Raises ValueError for settings that are missing, unknown or at odds.
    """
    _check_settings(config)
    n_layers, n_heads = size(config, "num_hidden_layers"), size(config, "num_attention_heads")
    max_position, hidden_size = size(config, "max_position_embeddings"), size(config, "hidden_size")
    head_dim = config.get("head_dim") or hidden_size // n_heads
    kinds = _layer_kinds(config, [FULL if window is None or i < n_unwindowed else SLIDING for i in range(n_layers)])
    if SLIDING in kinds and window is None:
        raise ValueError(f"{_architecture(config)} has {SLIDING} layers, but config.json sets no sliding window")
    layer_ropes = [read_rope(config, head_dim, kind) for kind in kinds]
    ropes = tuple(dict.fromkeys(layer_ropes))
    fields = {
        "vocab_size": required(config, "vocab_size"),
        "hidden_size": hidden_size,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": config.get("num_key_value_heads") or n_heads,
        "head_dim": head_dim,
        "intermediate_size": required(config, "intermediate_size"),
        "max_position": max_position,
        "norm_eps": required(config, "rms_norm_eps"),
        "ropes": ropes,
        "rope_ids": tuple(ropes.index(rope) for rope in layer_ropes),
        "windows": tuple(window if kind == SLIDING else None for kind in kinds),
        "activation": _activation(config),
        "tied_head": config.get("tie_word_embeddings", False),
    }
    return ModelSpec(**{**fields, **differences})


def read_experts(config: Config, shared_size: int = 0) -> tuple[ExpertSpec | None, ...]:
    """The experts of each layer: of every decoder_sparse_step-th one that mlp_only_layers doesn't name.

    Raises ValueError for settings that are missing or no sizes.
    """
    # transformers 5 writes Qwen3-MoE's number of experts under another name.
    count = "num_local_experts" if "num_experts" not in config and "num_local_experts" in config else "num_experts"
    experts = ExpertSpec(
        n_experts=size(config, count),
        n_active=size(config, "num_experts_per_tok"),
        intermediate_size=size(config, "moe_intermediate_size"),
        shared_size=shared_size,
        normalize=required(config, "norm_topk_prob"),
    )
    step, dense = size({"decoder_sparse_step": 1, **config}, "decoder_sparse_step"), config.get("mlp_only_layers") or []
    layers = range(size(config, "num_hidden_layers"))
    return tuple(None if layer in dense or (layer + 1) % step else experts for layer in layers)


def _layer_kinds(config: Config, usual: list[str]) -> list[str]:
    kinds = config.get("layer_types") or usual
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise ValueError(f"attention kinds {', '.join(sorted(unknown))} are not known; known are {FULL}, {SLIDING}")
    if len(kinds) != len(usual):
        raise ValueError(f"config.json has {len(kinds)} layer_types for {len(usual)} layers")
    return kinds


def _check_settings(config: Config) -> None:
    for name in _REFUSED:
        if config.get(name):
            raise ValueError(f"config.json sets {name}, which nva doesn't implement")


def _activation(config: Config) -> Activation:
    found = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if found not in _ACTIVATIONS:
        raise ValueError(f"the activation {found!r} is not known; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[found]


def _architecture(config: Config) -> str:
    return ", ".join(config.get("architectures") or ["this model"])
