"""The randomness of sampling: numbers that belong to a draw and a token, and to nothing else.

The law: noise is a pure function of (seed, sample, position, purpose) and the token's id, bit for
bit, however many tokens are asked for at once. Read next: sample.py, which adds it to
log-probabilities."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nva.state.columns import Column
from nva.state.plan import Draw

NEXT_TOKEN = 0
"""The purpose of an ordinary draw. Another use of randomness at the same position takes another
number."""

MOST_NOISE = 17.0
"""More than any noise, by more than rounding: the largest is -log(-log(1 - 2**-24)), 16.64."""


def row_keys(draw: Draw, members: Column, purpose: int = NEXT_TOKEN) -> Column:
    """[n, 2] int32: 64 bits for each (seed, sample, position, purpose), mixed by SplitMix64 (Steele
    et al. 2014)."""
    keys = _split_mix(draw.params["seed"][members])
    for words in (draw.samples[members], draw.positions[members], np.full(len(members), purpose)):
        keys = _split_mix(keys ^ words.astype(np.uint64))
    return keys.view(np.int32).reshape(-1, 2)


def _split_mix(z: Column) -> Column:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def gumbel(keys: Tensor, n_tokens: int) -> Tensor:
    """Gumbel noise [n, V] float32 of all tokens for row keys [n, 2] int32, within [-2.9, 16.7].

    The argmax of log-probabilities plus such noise is a draw from their distribution (Maddison et
    al. 2014)."""
    return gumbel_of(keys, torch.arange(n_tokens, dtype=torch.int32, device=keys.device))


def gumbel_of(keys: Tensor, tokens: Tensor) -> Tensor:
    """The same noise [n, m] of some tokens, [m] or [n, m] ids."""
    hashed = _finalize(tokens.to(torch.int32, copy=True)) * (
        keys[:, :1] | 1
    )  # odd factors keep a row's tokens apart
    hashed = _finalize(hashed.add_(keys[:, 1:]))
    # 23 bits become the mantissa of a float in [1, 2), then the middle of one of 2**23 equal parts
    # of (0, 1), exactly.
    uniform = (
        (hashed >> 9)
        .bitwise_and_(0x7FFFFF)
        .bitwise_or_(0x3F800000)
        .view(torch.float32)
        .sub_(1 - 2**-24)
    )
    return uniform.log_().neg_().log_().neg_()


def _finalize(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer (Appleby 2011), in place on int32: products wrap, masks make
    shifts logical."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - 2**32)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
