"""What sampling means: penalties, min_p, top_k, top_p, and the draw among what they leave.

The law: the meaning is the plain functions at the top, one row of logits at a time; the tests hold
everything below, and sample.py, to them. Read next: sample.py, the draw for a whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nva.kernels import Filter as Filter  # filter_gaps below is one; a device may have its own
from nva.state.columns import Column, Int
from nva.state.plan import Draw

# The meaning, in plain torch, for one row of logits [V].


def penalize(
    logits: Tensor, history: Tensor, n_prompt: int, factor: float, presence: float, frequency: float
) -> Tensor:
    """Make the tokens of a history [n] less likely. `factor` (repetition_penalty) is for tokens of
    prompt and output (Keskar et al. 2019, CTRL, section 4.1), the other two for those of the
    output: `presence` once, `frequency` for each occurrence."""
    n_seen = torch.bincount(history, minlength=len(logits))
    n_output = torch.bincount(history[n_prompt:], minlength=len(logits))
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(n_seen > 0, repeated, logits)
    return logits - (presence * (n_output > 0) + frequency * n_output)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Keep the tokens at least `min_p` times as likely as the likeliest."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < min_p * probs.max(), -torch.inf)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Keep the `top_k` likeliest tokens, and those tied with the last of them."""
    last = logits.topk(top_k).values[-1]
    return logits.masked_fill(logits < last, -torch.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the fewest likeliest tokens that together reach probability `top_p` (Holtzman et al.
    2020, nucleus sampling), and those tied with the last of them."""
    probs, order = logits.softmax(-1).sort(descending=True)
    mass_before = probs.cumsum(-1) - probs
    last = logits[order[mass_before < top_p]][-1]
    return logits.masked_fill(logits < last, -torch.inf)


def pick(logits: Tensor, noise: Tensor, params: Any) -> Tensor:
    """The token drawn from logits [V] with Gumbel noise [V]: the argmax of log-probabilities plus
    such noise is a draw from their distribution (Maddison et al. 2014)."""
    if params["temperature"] == 0:
        return logits.argmax()
    logits = logits / float(params["temperature"])
    logits = keep_min_p(logits, float(params["min_p"]))
    if 0 < params["top_k"] < len(logits):
        logits = keep_top_k(logits, int(params["top_k"]))
    if params["top_p"] < 1:
        logits = keep_top_p(logits, float(params["top_p"]))
    return (logits + noise).argmax()


# The same for a batch, and fast. Three things differ. A softmax or a sort of 150,000 logits costs
# more than the rest of a step, so everything is said in gaps: how far a token's tempered
# log-probability lies below the likeliest token's. Each filter is then an upper limit of the gap.
# All rows are worked on at once, each with parameters of its own. And on a host, sample.py gives
# the filters only tokens that can win the draw.

_MAX = torch.finfo(torch.float32).max
_INFINITY = np.float32(np.inf)
_INFINITY_BITS = 0x7F800000  # those of a float32


def put(values: Column, like: Tensor) -> Tensor:
    """A copy of an array on the device of a tensor, without waiting for the device."""
    own = values.copy()  # torch refuses the strides of a record's field
    return torch.as_tensor(own).to(like.device, non_blocking=True)


def adjust(x: Tensor, draw: Draw, members: Column) -> None:
    """Apply penalties, then bias, in place, to the logits x [n, V] of the samples `members` [n].

    What overflows becomes the largest number: if the maximum were infinite, its own gap would be
    NaN."""
    row_of = np.full(len(draw.params), -1)  # of each sample; -1 where it is not a member
    row_of[members] = np.arange(len(members))
    _penalize_rows(x, draw, row_of)
    _add_bias(x, draw, row_of)


def _penalize_rows(x: Tensor, draw: Draw, row_of: Column) -> None:
    """Apply penalties, in place, to x [n, V], of which row_of[j] is sample j's row."""
    columns = [
        _penalties(int(row_of[j]), history, n_prompt, draw.params[j])
        for j, history, n_prompt in draw.penalized
        if row_of[j] >= 0
    ]
    if columns:
        joined = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
        rows, tokens, factor, minus = (put(column, x) for column in joined)
        before = x[rows, tokens]
        repeated = torch.where(before > 0, before / factor, before * factor)
        x[rows, tokens] = (repeated - minus).clamp(max=_MAX)


def _penalties(row: int, history: Int, n_prompt: int, params: Any) -> tuple[Column, ...]:
    """Columns (row, token, factor, minus) over the distinct tokens of a history [n]: a logit is
    divided or multiplied by `factor`, then `minus` is subtracted."""
    tokens, indices = np.unique(history, return_inverse=True)
    n_output = np.bincount(indices[n_prompt:], minlength=len(tokens))
    minus = params["presence_penalty"] * (n_output > 0) + params["frequency_penalty"] * n_output
    factor = np.full(len(tokens), params["repetition_penalty"])
    rows = np.full(len(tokens), row)
    return rows, tokens.astype(np.int64), factor, minus.astype(np.float32)


def _add_bias(x: Tensor, draw: Draw, row_of: Column) -> None:
    """Add each sample's bias, in place, to x [n, V], of which row_of[j] is sample j's row."""
    rows = row_of[draw.bias_at[:, 0]]
    is_member = rows >= 0
    # Logits are numbered from the first row on. A bias may be as long as the vocabulary, so nothing
    # is picked out where all samples are members.
    at = rows * x.shape[1] + draw.bias_at[:, 1]
    bias = draw.bias
    if not is_member.all():
        at = at[is_member]
        bias = bias[is_member]
    if len(at):
        x.view(-1).index_add_(0, put(at, x), put(bias, x).to(x.dtype).clamp(max=_MAX))
        x.clamp_(max=_MAX)


def filter_gaps(gaps: Tensor, params: Column) -> None:
    """Put infinity, in place, for the tokens that min_p, top_k and top_p leave out of gaps [n, V].

    A token stays if its gap is at most -log(min_p), if fewer than top_k tokens are strictly
    likelier, and if those hold less than top_p of the probability of the k likeliest."""
    n_tokens = gaps.shape[1]
    is_cut = (params["top_k"] > 0) & (params["top_k"] < n_tokens)
    top_k = np.where(is_cut, params["top_k"], n_tokens)[:, None]
    # Where top_p is off, no rounding of a sum may drop a token.
    has_top_p = params["top_p"] < 1
    top_p = np.where(has_top_p, params["top_p"], _INFINITY)[:, None]
    top_p = put(top_p, gaps)

    limit = put(min_p_limit(params)[:, None], gaps)
    if is_cut.any():
        limit = _limit_by_sorting(gaps, limit, top_k, top_p)
    elif has_top_p.any():
        limit = _limit_by_bits(gaps, limit, top_p)
    gaps.masked_fill_(gaps > limit, torch.inf)


def min_p_limit(params: Column) -> Column:
    """[n] The largest gap that min_p leaves; infinity where it is off."""
    with np.errstate(divide="ignore"):
        return -np.log(params["min_p"])


def _limit_by_sorting(gaps: Tensor, limit: Tensor, top_k: Column, top_p: Tensor) -> Tensor:
    """[n, 1] The largest gap within the limit [n, 1], top_k and top_p, from the sorted nearest few
    tokens."""
    nearest = gaps.topk(int(top_k.max()), largest=False).values
    place = torch.arange(nearest.shape[1], device=gaps.device)
    is_kept = (nearest <= limit) & (place < put(top_k, gaps))
    weights = (-nearest).exp() * is_kept
    mass_before = weights.cumsum(-1) - weights
    is_kept &= mass_before < top_p * weights.sum(-1, keepdim=True)
    return nearest.masked_fill(~is_kept, 0).amax(-1, keepdim=True)


def _limit_by_bits(gaps: Tensor, limit: Tensor, top_p: Tensor) -> Tensor:
    """[n, 1] The largest gap within the limit [n, 1] and top_p, by bisection over the 31 bits of a
    float: floats from 0 up are ordered like their bits.

    31 sums over a row that stays in the processor's cache cost a fraction of sorting it. Torch may
    add up a lone row in another order, which moves a sum by 1e-7 of itself, and so a token with
    that probability."""
    scratch = gaps.clone().le_(limit)  # a new tensor for each sum would not be in the cache
    weights = (-gaps).exp().mul_(scratch)
    target = top_p * weights.sum(-1, keepdim=True)
    bits = torch.zeros_like(target, dtype=torch.int32)
    for bit in reversed(range(31)):
        trial = bits + (1 << bit)
        torch.lt(gaps, _as_float(trial), out=scratch)
        mass_before = scratch.mul_(weights).sum(-1, keepdim=True)
        bits = torch.where(mass_before < target, trial, bits)
    return torch.minimum(limit, _as_float(bits))


def _as_float(bits: Tensor) -> Tensor:
    """The float32 that has these bits, or infinity where they are beyond it."""
    return bits.clamp(max=_INFINITY_BITS).view(torch.float32)
