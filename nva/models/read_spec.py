"""From a config.json to a ModelSpec: what the families have in common.

The law: what a config asks for is in the spec, or the config is refused. Read next: llama.py, the
shortest family; hf_config.py, which reads and checks single settings; unread.py, which refuses what
nobody read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from nva.models.hf_config import REQUIRED, Config, architecture
from nva.models.rope import KINDS, RopeSpec
from nva.models.spec import Activation, ExpertSpec, ModelSpec
from nva.models.unread import is_off
from nva.state.checks import is_number

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


def read_rope(config: Config, head_dim: int, layer_kind: str) -> RopeSpec:
    """The rope of the layers of one kind, in either spelling: `rope_theta` and `rope_scaling`
    (transformers 4), or `rope_parameters`, perhaps nested by layer kind (transformers 5).

    Raises ValueError for an unknown kind or setting, and for a missing one."""
    place, settings = _rope_settings(config, layer_kind)
    where = config.path + place
    kind = settings.pop("rope_type", "default")
    settings.pop("type", None)  # some configs name the kind twice
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(
            f"config.json: in {where}, rope type {kind!r:.80} is not known; known are "
            f"{', '.join(KINDS)}"
        )
    common = {
        "theta": _read_theta(where, kind, settings.pop("rope_theta", None)),
        "dim": _read_rope_dim(head_dim, settings.pop("partial_rotary_factor", 1.0)),
        "max_position": config.size("max_position_embeddings"),
    }
    return _make_rope(where, kind, common, settings)


def _make_rope(
    where: str, kind: str, common: Mapping[str, Any], settings: Mapping[str, Any]
) -> RopeSpec:
    """The record of a kind of rope: the fields that all have, and its own, which config.json calls
    by the same names."""
    own = [field for field in attrs.fields(KINDS[kind]) if field.name not in common]
    names = {field.name for field in own}
    needed = {field.name for field in own if field.default is attrs.NOTHING}

    # transformers writes the original length for every kind; without it, that is the declared one.
    settings = {"original_max_position_embeddings": common["max_position"], **settings}
    if missing := needed - settings.keys():
        raise ValueError(
            f"rope type {kind!r} needs {', '.join(sorted(missing))}, which {where} in config.json "
            "doesn't give"
        )
    beside = settings.keys() - names - {"original_max_position_embeddings"}
    if unknown := {name for name in beside if not is_off(name, settings[name])}:
        raise ValueError(
            f"rope type {kind!r} has no setting {', '.join(sorted(unknown))}, which {where} in "
            "config.json gives; remove what has no effect"
        )
    try:
        return KINDS[kind](**common, **{name: settings[name] for name in names & settings.keys()})
    except ValueError as error:
        raise ValueError(f"config.json: in {where}, {error}") from error


def _read_theta(where: str, kind: str, value: Any) -> float:
    if value is None:
        raise ValueError(
            f"rope type {kind!r} needs rope_theta, which config.json doesn't give, neither in "
            f"{where} nor beside it"
        )
    if not is_number(value) or not 1 <= value < math.inf:
        raise ValueError(
            f"config.json has rope_theta = {value!r:.80}; it must be a finite number of at least 1"
        )
    return float(value)


def _read_rope_dim(head_dim: int, share: Any) -> int:
    """How many numbers of each head turn."""
    if not is_number(share) or not 0 < share <= 1:
        raise ValueError(
            f"config.json has partial_rotary_factor = {share!r:.80}; it must be a number above 0, "
            "at most 1"
        )
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise ValueError(
            f"config.json has heads of {head_dim} numbers (head_dim, or hidden_size / "
            f"num_attention_heads) and partial_rotary_factor = {share}: the rope turns {dim} "
            "numbers of each head; it takes an even number, at least 2"
        )
    return dim


def _rope_settings(config: Config, layer_kind: str) -> tuple[str, dict[str, Any]]:
    """The rope settings of the layers of a kind, and the name of the object they stand in. null
    counts as absent; what stands inside the object goes before what stands beside it."""
    new, old = (_rope_of(config, name, layer_kind) for name in ("rope_parameters", "rope_scaling"))
    names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    beside = present({name: config.get(name) for name in names})
    place = " and ".join(name for name in ("rope_parameters", "rope_scaling") if config.get(name))
    return place or "rope_parameters", beside | merged_ropes(config, new, old)


def _rope_of(config: Config, name: str, layer_kind: str) -> Mapping[str, Any]:
    """The settings that one object has for the layers of a kind."""
    group = config.group(name)
    inner = group.get(layer_kind, group)
    if not isinstance(inner, Mapping):
        config.refuse(name, f"an object with settings, as is {layer_kind} in it")
    return inner


def merged_ropes(config: Config, new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of both spellings of one rope. Raises ValueError where they contradict each
    other."""
    new, old = present(new), present(old)
    for each in (new, old):
        if "type" in each:
            each.setdefault("rope_type", each.pop("type"))
    for name in new.keys() & old.keys():
        if new[name] != old[name]:
            raise ValueError(
                f"config.json has both {config.path}rope_parameters and {config.path}rope_scaling, "
                f"which disagree on {name}: {new[name]!r:.80} and {old[name]!r:.80}; remove one"
            )
    return new | old


def present(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not null."""
    return {name: value for name, value in settings.items() if value is not None}


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
