"""From a config.json to a ModelSpec: what the families have in common.

The law: what a config asks for is in the spec, or the config is refused. Read next: llama.py, the
shortest family; hf_config.py, which reads and checks single settings; unread.py, which refuses what
nobody read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nva.models.hf_config import REQUIRED, Config, architecture
from nva.models.read_rope import read_rope
from nva.models.spec import Activation, ExpertSpec, ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"
MAX_LAYERS = 10_000  # so that a slip in a config doesn't fill the memory with lists of layers

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_spec(
    config: Config,
    *,
    window: int | None = None,
    n_unwindowed: int = 0,
    head_dim: int | None = None,
    **differences: Any,
) -> ModelSpec:
    """The spec of a Llama-like config; a family gives the fields in which it differs.

    Layers see `window` positions, but for the first n_unwindowed, unless the config's `layer_types`
    say otherwise. Raises ValueError for settings that are missing, unknown or at odds."""
    n_layers = config.size("num_hidden_layers", at_most=MAX_LAYERS)
    kinds = _layer_kinds(config, window, n_unwindowed)
    n_heads, n_kv_heads = _read_heads(config)
    head_dim = head_dim or _read_head_dim(config, n_heads)

    # Layers of one kind share a rope.
    layer_ropes = [read_rope(config, head_dim, kind) for kind in kinds]
    ropes = tuple(dict.fromkeys(layer_ropes))

    fields = {
        "vocab_size": config.size("vocab_size"),
        "hidden_size": config.size("hidden_size"),
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": config.size("intermediate_size"),
        "max_position": config.size("max_position_embeddings"),
        "norm_eps": config.number("rms_norm_eps"),
        "ropes": ropes,
        "rope_ids": tuple(ropes.index(rope) for rope in layer_ropes),
        "windows": tuple(window if kind == SLIDING else None for kind in kinds),
        "activation": _read_activation(config, any(differences.get("experts", ()))),
        "tied_head": config.flag("tie_word_embeddings"),
    }
    spec = ModelSpec(**{**fields, **differences})
    config.agree(**_computed_anyway(spec))
    return spec


def read_experts(
    config: Config, shared_size: int = 0, always_normalized: bool = False
) -> tuple[ExpertSpec | None, ...]:
    """The experts of each layer: of every decoder_sparse_step-th one that mlp_only_layers doesn't
    name. Raises ValueError for settings that are missing or no sizes."""
    # transformers 5 writes Qwen3-MoE's number of experts under another name.
    is_renamed = config.get("num_experts") is None and config.get("num_local_experts") is not None
    n_experts = config.size("num_local_experts" if is_renamed else "num_experts")
    config.agree(num_local_experts=(n_experts,))
    if always_normalized:
        config.agree(norm_topk_prob=(True,))
    experts = ExpertSpec(
        n_experts=n_experts,
        n_active=config.size("num_experts_per_tok", at_most=n_experts),
        intermediate_size=config.size("moe_intermediate_size"),
        shared_size=shared_size,
        normalize=always_normalized or config.flag("norm_topk_prob", REQUIRED),
    )
    step = config.size("decoder_sparse_step", 1)
    dense = config.sizes("mlp_only_layers", [])
    layers = range(config.size("num_hidden_layers", at_most=MAX_LAYERS))
    return tuple(None if layer in dense or (layer + 1) % step else experts for layer in layers)


def _read_heads(config: Config) -> tuple[int, int]:
    """Query heads and key-value heads."""
    n_heads = config.size("num_attention_heads")
    n_kv_heads = config.size("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise ValueError(
            f"config.json has num_attention_heads = {n_heads} and num_key_value_heads = "
            f"{n_kv_heads}: {n_heads} query heads can't share {n_kv_heads} key-value heads evenly"
        )
    return n_heads, n_kv_heads


def _read_head_dim(config: Config, n_heads: int) -> int:
    """Numbers of a head; without a setting, the heads share hidden_size."""
    hidden_size = config.size("hidden_size")
    if config.get("head_dim") is None and hidden_size < n_heads:
        raise ValueError(
            f"config.json has hidden_size = {hidden_size}, too few for num_attention_heads = "
            f"{n_heads}, and no head_dim"
        )
    return config.size("head_dim", hidden_size // n_heads)


def _layer_kinds(config: Config, window: int | None, n_unwindowed: int) -> tuple[str, ...]:
    """FULL or SLIDING for each layer."""
    n_layers = config.size("num_hidden_layers", at_most=MAX_LAYERS)
    usual = [FULL if window is None or i < n_unwindowed else SLIDING for i in range(n_layers)]
    kinds = config.names("layer_types", usual) or tuple(usual)
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise ValueError(
            f"config.json: in {config.path}layer_types, attention kinds "
            f"{', '.join(sorted(unknown))} are not known; known are {FULL}, {SLIDING}"
        )
    if len(kinds) != n_layers:
        raise ValueError(
            f"config.json has {len(kinds)} layer_types for num_hidden_layers = {n_layers} layers"
        )
    if SLIDING in kinds and window is None:
        raise ValueError(
            f"{architecture(config)} has {SLIDING} in layer_types, but config.json sets no sliding "
            "window"
        )
    return kinds


def _read_activation(config: Config, has_experts: bool) -> Activation:
    name = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    found = ACTIVATIONS[config.choice(name, "silu", tuple(ACTIVATIONS))]
    config.pass_over("hidden_act")
    if has_experts and found != "silu":
        config.refuse(name, "silu or swish, since experts have silu gates")
    return found


def _computed_anyway(spec: ModelSpec) -> dict[str, tuple[Any, ...]]:
    """Settings that families seldom read -> the values that say what the spec says already.

    Some matter most when they are false, so they can't count as off."""
    always = ("use_rope", "use_rotary_emb", "rotary", "is_causal", "causal", "use_rms_norm")
    always += ("use_rmsnorm", "rmsnorm", "use_glu", "gated_mlp", "use_gated_mlp", "pre_norm")
    norms = ("use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm")
    biases = ("qkv_bias", "use_qkv_bias", "add_qkv_bias")
    has_bias = spec.qkv_bias or spec.o_bias or spec.mlp_bias
    dims = {rope.dim for rope in spec.ropes}
    return {
        **dict.fromkeys(always, (True,)),
        **dict.fromkeys(norms, (spec.qk_norm,)),
        **dict.fromkeys(biases, (spec.qkv_bias,)),
        **dict.fromkeys(("rotary_dim", "rope_dim"), tuple(dims) if len(dims) == 1 else ()),
        **dict.fromkeys(("num_layers", "n_layers", "n_layer"), (spec.n_layers,)),
        **dict.fromkeys(("d_model", "n_embd"), (spec.hidden_size,)),
        "attention_bias": (False, spec.qkv_bias and spec.o_bias),
        "mlp_bias": (False, spec.mlp_bias),
        "no_bias": (not has_bias,),
        "kv_channels": (spec.head_dim,),
        "no_rope_layers": (False, [], [1] * spec.n_layers),
        "position_embedding_type": ("rope", "rotary"),
        "norm_type": ("rms_norm", "rmsnorm", "RMSNorm"),
    }
