"""Rotary position embedding (RoPE): how fast each pair of numbers of a head turns with position.

There is one record for each kind of rope that checkpoints name; `KINDS` lists them. Their fields
are called what config.json calls the settings.

The law: a rope is fixed once, from the config and max_model_len, so a token's keys never depend on
how long its sequence has become. Read next: read_rope.py, which makes these records of a config;
kernels/reference.py, rotary, which turns queries and keys by these angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from attrs.validators import optional
from torch import Tensor

from nva.state.checks import flag, number, whole

_positive = number(1e-6, 1e6)  # far beyond any rope's; what is computed stays finite
_not_negative = number(0, 1e6)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_whole(value: Any) -> Any:
    """8192.0, as some configs have it, is 8192."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _divisors(_: object, field: attrs.Attribute[Any], value: Any) -> None:
    """dim / 2 finite numbers above 0."""
    if not isinstance(value, tuple):
        raise ValueError(f"{field.name} is {value!r:.80}; give a list of numbers")
    for each in value:
        _positive(None, field, each)


@attrs.frozen(kw_only=True)
class RopeSpec:
    """The plain rope (Su et al. 2021, RoFormer): pair i turns by theta^(-2i / dim) a position."""

    theta: float = attrs.field(validator=number(1))
    dim: int = attrs.field(validator=whole(2))  # numbers of each head that turn, an even count
    max_position: int = attrs.field(validator=whole(1))  # positions that the config declares

    def __attrs_post_init__(self) -> None:
        if self.dim % 2:
            raise ValueError(
                f"the rope turns {self.dim} numbers of each head; it takes an even number, at "
                "least 2"
            )

    @property
    def reach(self) -> int:
        """The longest max_model_len that this rope is made for."""
        return self.max_position

    def frequencies(self, max_model_len: int) -> tuple[Tensor, float]:
        """Radians per position [dim / 2] float32, and the factor of cos and sin.

        Computed in float32 in the same order as transformers does: at position 100,000 another
        rounding would show."""
        return 1.0 / _powers(self.theta, self.dim), 1.0


@attrs.frozen(kw_only=True)
class Linear(RopeSpec):
    """Chen et al. 2023, Position Interpolation: positions are divided by the factor.

    Configs declare the stretched length, so `reach` is the plain rope's."""

    factor: float = attrs.field(validator=_positive)

    def frequencies(self, max_model_len: int) -> tuple[Tensor, float]:
        """The plain rope's, over the factor."""
        plain, scale = RopeSpec.frequencies(self, max_model_len)
        return plain / self.factor, scale


@attrs.frozen(kw_only=True)
class Dynamic(RopeSpec):
    """NTK-aware scaling: a larger theta, chosen so that the slowest pair fits max_model_len into
    the trained range."""

    dim: int = attrs.field(validator=whole(4))  # theta's exponent is dim / (dim - 2)
    factor: float = attrs.field(validator=_positive)

    @property
    def reach(self) -> int:
        """The declared positions, stretched by the factor."""
        return max(self.max_position, int(self.max_position * self.factor))

    def frequencies(self, max_model_len: int) -> tuple[Tensor, float]:
        """The plain rope's, with a larger theta beyond max_position."""
        length = max(max_model_len, self.max_position)
        stretch = self.factor * length / self.max_position - (self.factor - 1)
        theta = self.theta * stretch ** (self.dim / (self.dim - 2))
        return 1.0 / _powers(theta, self.dim), 1.0


@attrs.frozen(kw_only=True)
class Llama3(RopeSpec):
    """Llama 3.1: slow pairs are divided by the factor, fast ones kept; between them is a ramp over
    the number of turns that a pair makes in the original range."""

    original_max_position_embeddings: int = attrs.field(validator=whole(1), converter=_as_whole)
    factor: float = attrs.field(validator=_positive)
    low_freq_factor: float = attrs.field(validator=_not_negative)
    high_freq_factor: float = attrs.field(validator=_positive)

    def __attrs_post_init__(self) -> None:
        RopeSpec.__attrs_post_init__(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor}; it must be above low_freq_factor, "
                f"{self.low_freq_factor}"
            )

    def frequencies(self, max_model_len: int) -> tuple[Tensor, float]:
        """The ramp between the plain frequencies and those over the factor."""
        plain, scale = RopeSpec.frequencies(self, max_model_len)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / width).clamp(0, 1)
        return (1 - kept) * plain / self.factor + kept * plain, scale


@attrs.frozen(kw_only=True)
class Yarn(RopeSpec):
    """Peng et al. 2023, YaRN: a ramp over the pairs' indices, and sharper attention to make up for
    the length."""

    theta: float = attrs.field(validator=number(1, above=True))  # its logarithm is divided by
    original_max_position_embeddings: int = attrs.field(validator=whole(1), converter=_as_whole)
    factor: float = attrs.field(validator=_positive)
    attention_factor: float | None = attrs.field(default=None, validator=optional(_positive))
    beta_fast: float = attrs.field(default=32.0, validator=_positive)
    beta_slow: float = attrs.field(default=1.0, validator=_positive)
    mscale: float | None = attrs.field(default=None, validator=optional(_not_negative))
    mscale_all_dim: float | None = attrs.field(default=None, validator=optional(_not_negative))
    truncate: bool = attrs.field(default=True, validator=flag)

    @property
    def reach(self) -> int:
        """The original positions, stretched by the factor, if those are more than declared."""
        return max(self.max_position, int(self.original_max_position_embeddings * self.factor))

    def frequencies(self, max_model_len: int) -> tuple[Tensor, float]:
        """The ramp: pairs that make more than beta_fast turns keep their speed, those below
        beta_slow are divided by the factor."""
        low = self._pair_of(self.beta_fast)
        high = self._pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        width = high - low or 0.001
        pairs = torch.arange(self.dim // 2, dtype=torch.float32)
        divided = ((pairs - low) / width).clamp(0, 1)
        plain, _ = RopeSpec.frequencies(self, max_model_len)
        return divided * plain / self.factor + (1 - divided) * plain, self._scale()

    def _pair_of(self, n_turns: float) -> float:
        """The (fractional) index of the pair that makes so many turns in the original range."""
        ratio = self.original_max_position_embeddings / (n_turns * 2 * math.pi)
        return self.dim * math.log(ratio) / (2 * math.log(self.theta))

    def _scale(self) -> float:
        """The factor of cos and sin; mscale is DeepSeek's way to give it."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpness(self.mscale) / self._sharpness(self.mscale_all_dim)
        return self._sharpness(1.0)

    def _sharpness(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@attrs.frozen(kw_only=True)
class LongRope(RopeSpec):
    """Ding et al. 2024, LongRoPE: a divisor for each pair, from the long list if sequences may pass
    the original range, else from the short one."""

    # its logarithm is divided by
    original_max_position_embeddings: int = attrs.field(validator=whole(2), converter=_as_whole)
    short_factor: tuple[float, ...] = attrs.field(validator=_divisors, converter=_as_tuple)
    long_factor: tuple[float, ...] = attrs.field(validator=_divisors, converter=_as_tuple)
    factor: float | None = attrs.field(default=None, validator=optional(_positive))
    attention_factor: float | None = attrs.field(default=None, validator=optional(_positive))

    def __attrs_post_init__(self) -> None:
        RopeSpec.__attrs_post_init__(self)
        found = len(self.short_factor), len(self.long_factor)
        if found != (self.dim // 2, self.dim // 2):
            raise ValueError(
                f"short_factor and long_factor have {found} numbers; for head_dim times "
                f"partial_rotary_factor = {self.dim}, each takes {self.dim // 2}"
            )

    def frequencies(self, max_model_len: int) -> tuple[Tensor, float]:
        """The plain rope's, each over its divisor."""
        is_long = max_model_len > self.original_max_position_embeddings
        divisors = torch.tensor(self.long_factor if is_long else self.short_factor)
        return 1.0 / (divisors * _powers(self.theta, self.dim)), self._scale()

    def _scale(self) -> float:
        """The factor of cos and sin. Without a `factor`, the declared positions over the original
        ones stand for it."""
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        factor = self.factor or self.max_position / original
        growth = math.log(factor) / math.log(original) if factor > 1 else 0.0
        return math.sqrt(1 + growth)


KINDS: Mapping[str, type[RopeSpec]] = {
    "default": RopeSpec,
    "linear": Linear,
    "dynamic": Dynamic,
    "llama3": Llama3,
    "yarn": Yarn,
    "longrope": LongRope,
}
"""The names that config.json has for them."""


def rope_table(rope: RopeSpec, max_model_len: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [max_model_len, dim / 2] float32: the angles at every position."""
    frequencies, scale = rope.frequencies(max_model_len)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * scale, angles.sin() * scale


def _powers(theta: float, dim: int) -> Tensor:
    """theta^(2i / dim), [dim / 2] float32."""
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
