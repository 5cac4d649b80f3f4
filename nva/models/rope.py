"""Rotary position embedding: how fast each pair of numbers turns with position, for every kind of
checkpoint.

The law: a rope is fixed once, from the config and max_model_len, so a token's keys never depend on
how long its sequence has become; a setting that is not understood is an error. Read next:
kernels/reference.py, rotary, which turns queries and keys by these angles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from nva.state.checks import number, whole


@attrs.frozen(kw_only=True)
class RopeSpec:
    """The rope of a layer. The first five fields are every kind's; _SETTINGS says which kinds read
    the others."""

    kind: str
    theta: float = attrs.field(validator=number(0, above=True))
    dim: int  # numbers of each head that turn, even
    max_position: int = attrs.field(validator=whole(1))  # positions the config declares
    original_max_position: int = attrs.field(
        validator=whole(1)
    )  # positions before the rope was stretched
    factor: float = attrs.field(default=1.0, validator=number(0, above=True))
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = attrs.field(default=(), converter=tuple)
    long_factor: tuple[float, ...] = attrs.field(default=(), converter=tuple)

    def __attrs_post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ValueError(
                f"the rope turns {self.dim} numbers of each head; it takes an even number, at "
                "least 2"
            )
        found = len(self.short_factor), len(self.long_factor)
        if self.kind == "longrope" and found != (self.dim // 2, self.dim // 2):
            raise ValueError(
                f"short_factor and long_factor have {found} numbers; a rope of {self.dim} takes "
                f"{self.dim // 2}"
            )

    @property
    def reach(self) -> int:
        """The longest max_model_len this rope is made for."""
        stretched = {
            "dynamic": self.max_position * self.factor,
            "yarn": self.original_max_position * self.factor,
        }
        return max(self.max_position, int(stretched.get(self.kind, 0)))


_SETTINGS: Mapping[str, tuple[set[str], set[str]]] = {  # kind: (required, optional)
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": (
        {"factor"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": ({"short_factor", "long_factor"}, {"factor", "attention_factor"}),
}
_OF_ALL = {"original_max_position_embeddings"}
_READ_HERE = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}


def read_rope(config: Mapping[str, Any], head_dim: int, layer_kind: str) -> RopeSpec:
    """The rope of the layers of one kind, from a config.json in either spelling: `rope_theta` and
    `rope_scaling` (transformers 4), or `rope_parameters`, perhaps nested by layer kind
    (transformers 5).

    Raises ValueError for an unknown kind or setting, and for a missing one.
    """
    rope = _settings(config, layer_kind)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    _check_settings(kind, set(rope))
    length = config["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings", length)
    settings = {name: value for name, value in rope.items() if name not in _READ_HERE | _OF_ALL}
    return RopeSpec(
        kind=kind,
        theta=float(rope["rope_theta"]),
        dim=int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        max_position=length,
        original_max_position=original,
        **{"factor": length / original, **settings},
    )


def _settings(config: Mapping[str, Any], layer_kind: str) -> dict[str, Any]:
    """All rope settings of a config, wherever they stand; None counts as absent."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    outside = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor", *_OF_ALL)}
    return {
        name: value
        for name, value in {**outside, **rope.get(layer_kind, rope)}.items()
        if value is not None
    }


def _check_settings(kind: str, found: set[str]) -> None:
    if kind not in _SETTINGS:
        raise ValueError(f"rope type {kind!r} is not known; known are {', '.join(_SETTINGS)}")
    required, optional = _SETTINGS[kind]
    if missing := (required | {"rope_theta"}) - found:
        raise ValueError(
            f"rope type {kind!r} needs {', '.join(sorted(missing))}, which config.json doesn't give"
        )
    if unknown := found - required - optional - _OF_ALL - _READ_HERE:
        raise ValueError(
            f"rope type {kind!r} has no setting {', '.join(sorted(unknown))}; remove what has no "
            "effect"
        )


def rope_table(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [max_model_len, dim / 2] float32: the angles at every position."""
    frequencies, scale = rope_frequencies(rope, max_model_len)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * scale, angles.sin() * scale


def rope_frequencies(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """Radians per position [dim / 2] float32, and what cos and sin are multiplied by.

    Computed in float32 step by step as transformers does, since at position 100,000 the rounding
    shows."""
    return _KINDS[rope.kind](rope, max_model_len)


def _powers(theta: float, dim: int) -> Tensor:
    """theta^(2i / dim), [dim / 2]: what plain rope divides by (Su et al. 2021, RoFormer)."""
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _default(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(rope.theta, rope.dim), 1.0


def _linear(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """Chen et al. 2023, Position Interpolation: positions are divided by the factor."""
    return _default(rope, max_model_len)[0] / rope.factor, 1.0


def _dynamic(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """NTK-aware scaling: a larger theta, by which the slowest pair fits max_model_len into the
    trained range."""
    stretch = rope.factor * max(max_model_len, rope.max_position) / rope.max_position - (
        rope.factor - 1
    )
    theta = rope.theta * stretch ** (rope.dim / (rope.dim - 2))
    return 1.0 / _powers(theta, rope.dim), 1.0


def _llama3(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """Llama 3.1: slow pairs are divided by the factor, fast ones kept, a ramp over their
    wavelengths between."""
    frequencies, _ = _default(rope, max_model_len)
    turns = rope.original_max_position * frequencies / (2 * math.pi)  # in the original range
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(
        0, 1
    )
    return (1 - kept) * frequencies / rope.factor + kept * frequencies, 1.0


def _yarn(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """Peng et al. 2023, YaRN: a ramp over the pairs' indices, and sharper attention to make up for
    the length."""

    def index_of(n_turns: float) -> float:
        """The (fractional) pair that makes so many turns in the original range."""
        ratio = rope.original_max_position / (n_turns * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001
    divided = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies, _ = _default(rope, max_model_len)
    return divided * frequencies / rope.factor + (1 - divided) * frequencies, _yarn_scale(rope)


def _yarn_scale(rope: RopeSpec) -> float:
    def sharpness(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:  # DeepSeek
        return sharpness(rope.mscale) / sharpness(rope.mscale_all_dim)
    return sharpness(1.0)


def _longrope(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """Ding et al. 2024, LongRoPE: a divisor for each pair, from one list if sequences may pass the
    original range."""
    divisors = rope.long_factor if max_model_len > rope.original_max_position else rope.short_factor
    scale = rope.attention_factor
    if scale is None:
        growth = (
            math.log(rope.factor) / math.log(rope.original_max_position) if rope.factor > 1 else 0.0
        )
        scale = math.sqrt(1 + growth)
    return 1.0 / (torch.tensor(divisors) * _powers(rope.theta, rope.dim)), scale


_KINDS: Mapping[str, Callable[[RopeSpec, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
