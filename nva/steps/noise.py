"""The randomness of sampling: noise that belongs to one draw and one token, and to nothing else.

The law: noise is a pure function of (seed, sample, position, purpose) and the token's id, bit for
bit, however many tokens are asked for at once. There is no generator and no state, so a draw can be
repeated alone, in any batch and on any rank. Read next: sample.py, which adds it to logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nva.state.columns import Column
from nva.state.plan import Draw

NEXT_TOKEN = 0
"""The purpose of an ordinary draw. Another use of randomness at the same position takes another
number, and so gets noise of its own."""

MAX_NOISE = 17.0
"""An upper bound of the noise. Its largest value is -log(-log(1 - 2**-24)) = 16.64, so rounding
can't reach the bound."""


def row_keys(draw: Draw, members: Column, purpose: int = NEXT_TOKEN) -> Column:
    """[n, 2] int32: a 64-bit key for each of the samples `members`, by mixing seed, sample index,
    position and purpose with SplitMix64 (Steele et al. 2014)."""
    keys = _split_mix(draw.params["seed"][members])
    purposes = np.full(len(members), purpose)
    for numbers in (draw.samples[members], draw.positions[members], purposes):
        keys = _split_mix(keys ^ numbers.astype(np.uint64))
    return keys.view(np.int32).reshape(-1, 2)


def gumbel(keys: Tensor, n_tokens: int) -> Tensor:
    """Gumbel noise [n, V] float32, within [-2.9, 16.7], of all tokens for row keys [n, 2] int32.

    The argmax of log-probabilities plus such noise is a draw from their distribution (Maddison et
    al. 2014)."""
    tokens = torch.arange(n_tokens, dtype=torch.int32, device=keys.device)
    return gumbel_of(keys, tokens)


def gumbel_of(keys: Tensor, tokens: Tensor) -> Tensor:
    """The same noise, [n, m] float32, of some tokens only: ids [m], or [n, m] for ids per row."""
    # 1. Hash the token's id with the row's key. An odd factor maps different ids to different ones.
    factor = keys[:, :1] | 1
    hashed = _finalize(tokens.to(torch.int32, copy=True)) * factor
    hashed = _finalize(hashed.add_(keys[:, 1:]))

    # 2. The upper 23 bits, as the mantissa of a float in [1, 2), make a uniform number in (0, 1):
    #    the middle of one of 2**23 equal intervals, so neither 0 nor 1.
    mantissa = (hashed >> 9).bitwise_and_(0x7FFFFF)
    uniform = mantissa.bitwise_or_(0x3F800000).view(torch.float32)
    uniform.sub_(1 - 2**-24)

    # 3. The inverse of Gumbel's distribution function: -log(-log(u)).
    return uniform.log_().neg_().log_().neg_()


def _split_mix(z: Column) -> Column:
    """One step of SplitMix64, on uint64."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _finalize(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer (Appleby 2011), in place on int32. Products wrap around, and a
    mask makes each arithmetic shift a logical one."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    x.mul_(0x85EBCA6B - 2**32)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF))
    x.mul_(0xC2B2AE35 - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
