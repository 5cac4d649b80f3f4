"""What the families have in common when they read a Hugging Face config.json.

The law: what the config asks for and nva doesn't do is an error, never ignored. A setting that is
on was read by the family, or is known to change nothing that is computed. It is read as data: no
code of the checkpoint or of transformers runs. Read next: llama.py, the shortest family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from nva.models.rope import read_rope
from nva.models.spec import Activation, ExpertSpec, ModelSpec


@attrs.frozen(eq=False)
class Config:
    """A config.json, read like a dict, that notes which of its settings were read.

    It can't be copied like one, since a copy would read everything: `config | {...}` has other
    values instead."""

    settings: Mapping[str, Any]
    known: set[str] = attrs.field(factory=set, kw_only=True)  # names that were read
    parts: list[Config] = attrs.field(factory=list, kw_only=True)  # configs inside this one

    def __getitem__(self, name: str) -> Any:
        self.known.add(name)
        return self.settings[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or the default where the config hasn't it."""
        self.known.add(name)
        return self.settings.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self.settings

    def __or__(self, settings: Mapping[str, Any]) -> Config:
        """The config with these settings, which count as read: whoever gives them has decided."""
        self.known.update(settings)
        return attrs.evolve(self, settings={**self.settings, **settings})

    def part(self, name: str) -> Config:
        """A config inside this one. Raises ValueError if there is none."""
        inner = Config(required(self, name))
        self.parts.append(inner)
        return inner

    def pass_over(self, *names: str) -> None:
        """Settings that mean nothing to this family."""
        self.known.update(names)


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
        raise ValueError(
            f"config.json has {name} = {found!r}; it must be a whole number of at least 1"
        )
    return found


_HARMLESS = re.compile(
    "|".join(
        (
            # names and versions
            "architectures|auto_map|model_type|torch_dtype|dtype|transformers_version|_(model_)?name_or_path|_commit_hash",
            "(bos|eos|pad|unk|sep|mask|decoder_start)_token_id|tokenizer_class|id2label|label2id|problem_type|license",
            r"task_specific_params|unsloth_(fixed|version)|is_llama_config|transformers\.js_config",
            # training
            "initializer_(range|cutoff_factor)|.*dropout(_prob)?|.*_pdrop|router_aux_loss_coef|gradient_checkpointing",
            # how transformers runs the model
            "output_.*|return_dict.*|use_cache|cache_implementation|(_|use_)?flash_attn.*|use_flash_attention|is_decoder",
            "_?attn_implementation.*|_?experts_implementation|pretraining_tp|chunk_size_feed_forward",
            "max_sequence_length|seq_length|model_max_length",
            # generation, which generation_config.json decides
            "(max|min)_(new_tokens|length)|do_sample|temperature|top_[kp]|typical_p|num_beams|num_beam_groups",
            "num_return_sequences|(repetition|length|diversity)_penalty|(encoder_)?no_repeat_ngram_size|early_stopping",
        )
    )
)
"""Names of settings that change no number of a decoder's forward."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_spec(
    config: Config, *, window: int | None = None, n_unwindowed: int = 0, **differences: Any
) -> ModelSpec:
    """The spec of a Llama-like config; a family gives the fields in which it differs.

    Layers see `window` positions, but for the first n_unwindowed, unless the config's `layer_types`
    say otherwise. Raises ValueError for settings that are missing, unknown or at odds."""
    n_layers, n_heads = size(config, "num_hidden_layers"), size(config, "num_attention_heads")
    max_position, hidden_size = size(config, "max_position_embeddings"), size(config, "hidden_size")
    head_dim = config.get("head_dim") or hidden_size // n_heads
    kinds = _layer_kinds(
        config, [FULL if window is None or i < n_unwindowed else SLIDING for i in range(n_layers)]
    )
    if SLIDING in kinds and window is None:
        raise ValueError(
            f"{_architecture(config)} has {SLIDING} layers, but config.json sets no sliding window"
        )
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
    """The experts of each layer: of every decoder_sparse_step-th one that mlp_only_layers doesn't
    name.

    Raises ValueError for settings that are missing or no sizes.
    """
    # transformers 5 writes Qwen3-MoE's number of experts under another name.
    count = (
        "num_local_experts"
        if "num_experts" not in config and "num_local_experts" in config
        else "num_experts"
    )
    experts = ExpertSpec(
        n_experts=size(config, count),
        n_active=size(config, "num_experts_per_tok"),
        intermediate_size=size(config, "moe_intermediate_size"),
        shared_size=shared_size,
        normalize=required(config, "norm_topk_prob"),
    )
    step = size(config, "decoder_sparse_step") if "decoder_sparse_step" in config else 1
    dense = config.get("mlp_only_layers") or []
    layers = range(size(config, "num_hidden_layers"))
    return tuple(None if layer in dense or (layer + 1) % step else experts for layer in layers)


def _layer_kinds(config: Config, usual: list[str]) -> list[str]:
    kinds = config.get("layer_types") or usual
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise ValueError(
            f"attention kinds {', '.join(sorted(unknown))} are not known; known are {FULL}, "
            f"{SLIDING}"
        )
    if len(kinds) != len(usual):
        raise ValueError(f"config.json has {len(kinds)} layer_types for {len(usual)} layers")
    return kinds


def check_all_read(config: Config) -> None:
    """Raise ValueError for a setting that is on, was not read, and is not known to be harmless."""
    for name, value in config.settings.items():
        is_on = value is not None and value is not False and value not in ("", [], {})
        if is_on and name not in config.known and not _HARMLESS.fullmatch(name):
            raise ValueError(
                f"config.json sets {name}, which nva doesn't implement for "
                f"{_architecture(config)}; "
                "if it changes nothing that the model computes, remove it there"
            )
    for part in config.parts:
        check_all_read(part)


def _activation(config: Config) -> Activation:
    usual = config.get("hidden_act", "silu")
    found = config.get("hidden_activation") or usual
    if found not in _ACTIVATIONS:
        raise ValueError(
            f"the activation {found!r} is not known; known are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[found]


def _architecture(config: Config) -> str:
    return ", ".join(config.get("architectures") or ["this model"])
