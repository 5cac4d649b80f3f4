"""Settings of a config.json that no family has read: which of them can change nothing.

The law: what a config asks for and nva doesn't do is an error that names the setting. A setting
that nobody read is let pass for one of three reasons: its value turns it off; it says what nva
computes anyway (Config.agree); or its name says that it is about something else than the forward:
training, generation, file formats, which implementation computes. Read next: read_spec.py, which
agrees to much on behalf of every family.
"""

from __future__ import annotations

from typing import Any

from nva.models.hf_config import Config, architecture
from nva.state.checks import is_number


def check_all_read(config: Config) -> None:
    """Raise ValueError for a setting that nobody read and that may change what is computed."""
    for name, value in config.settings.items():
        if name in config.known or value is None:
            continue
        if name in config.agreed:
            is_harmless = value in config.agreed[name]
        else:
            is_harmless = is_off(name, value) or is_elsewhere(name)
        if not is_harmless:
            raise ValueError(
                f"config.json sets {config.path}{name} to {value!r:.60}, which nva doesn't "
                f"implement for {architecture(config)}; if it changes nothing that the model "
                "computes, remove it there"
            )
    for part in config.parts:
        check_all_read(part)


def is_off(name: str, value: Any) -> bool:
    """Whether a setting with this value does nothing.

    0 is off for a size, a count or a limit, but not for what is multiplied with: a scale is off at
    1. A scale of attention replaces 1 / sqrt(head_dim), so no number turns it off."""
    if value is False or value in ("", [], {}):
        return True
    if isinstance(value, bool) or not is_number(value):
        return False
    words = _words(name)
    if words & _SCALES:
        return value == 1 and not words & _ATTENTION
    return value == 0


def is_elsewhere(name: str) -> bool:
    """Whether a name says that the setting changes no number of a decoder's forward."""
    return name in _NAMES or bool(_words(name) & _WORDS) or name.endswith(_ENDINGS)


def _words(name: str) -> set[str]:
    return set(name.lower().replace("-", "_").split("_"))


_SCALES = frozenset({
    "scale", "scales", "scaling", "multiplier", "factor", "factors", "fraction", "ratio",
    "percent", "percentage", "pct", "base", "theta", "alpha",
})  # fmt: skip
"""Words in the names of what something is multiplied with."""

_ATTENTION = frozenset({
    "attention", "attn", "softmax", "query", "key", "qk", "score", "scores",
})  # fmt: skip

_WORDS = frozenset({
    # training
    "dropout", "pdrop", "loss", "initializer", "jitter", "neftune",
    # which implementation computes, of those that give the same numbers
    "flash", "sdpa", "xformers", "triton", "fuse", "fused", "implementation", "impl", "unsloth",
})  # fmt: skip
"""A name with one of these words is about training, or about how and not what is computed."""

_ENDINGS = ("_token_id", "_token_ids", "_token_index", "_name_or_path")

_NAMES = frozenset({
    # names, versions and file formats
    "architectures", "auto_map", "model_type", "torch_dtype", "dtype", "use_bfloat16",
    "transformers_version", "_name_or_path", "name_or_path",
    "_commit_hash", "license", "library_name", "is_llama_config", "transformers.js_config",
    "tokenizer_class", "prefix", "finetuning_task",
    # labels of classifiers
    "id2label", "label2id", "num_labels", "problem_type", "task_specific_params",
    # training
    "gradient_checkpointing", "label_smoothing",
    # how transformers runs a model
    "output_attentions", "output_hidden_states", "output_router_logits", "output_scores",
    "output_past", "return_dict", "return_dict_in_generate", "use_return_dict", "use_cache",
    "is_decoder", "pretraining_tp", "chunk_size_feed_forward", "torchscript", "tf_legacy_loss",
    "use_kernels", "max_sequence_length", "max_seq_length", "max_seq_len", "seq_length",
    "model_max_length",
    # generation, which generation_config.json decides
    "max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample", "temperature",
    "top_k", "top_p", "min_p", "typical_p", "num_beams", "num_beam_groups",
    "num_return_sequences", "repetition_penalty", "length_penalty", "diversity_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "early_stopping",
})  # fmt: skip
