"""Logits to tokens: penalties and bias, temperature, min_p, top_k, top_p, then a draw by the
Gumbel-max trick.

The law: a token depends on its own row of logits, its parameters, seed, sample index and position,
and on nothing else. Batch mates, their order and the slices of the computation change nothing.
Tokens tied at the edge of a filter are kept together, so no order matters there either, and a tie
for the maximum goes to the lowest id. Nothing waits for the device before the one copy at the end.
Read next: Draw and Sampled in state/plan.py, then steps/commit.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nva.state.columns import Column, Ids, Int
from nva.state.plan import Draw, Logprobs, Sampled
from nva.state.request import NO_LOGPROBS
from nva.steps.noise import MOST_NOISE, gumbel_of, row_keys

Filter = Callable[[Tensor, Column], None]
"""What filter_gaps is: a device may have its own."""

_GREEDY, _PLAIN, _TOP_P, _TOP_K = range(4)
_MAX = torch.finfo(torch.float32).max
_INFINITY_BITS = 0x7F800000
_GROUP = 64  # tokens of which only the likeliest is looked at in the search for a bound
_FEW = 0.2  # of the tokens: beyond, working on all of them costs less than gathering some
_CPU_SLICE = 2**22  # bytes of logits worked on at once: small enough to stay in a cache
_DEVICE_SLICE = 2**26  # large enough to need few launches, small enough for temporaries


def sample(logits: Tensor, draw: Draw, filter_: Filter | None = None) -> Sampled:
    """One token for each of S samples, from logits [L, V] float32, and the log-probabilities that
    were asked for.

    `filter_` is a device's own way to do what filter_gaps does.
    """
    picked = choose(logits, draw, filter_)
    n_top = max(draw.params["n_logprobs"].tolist(), default=NO_LOGPROBS)
    results = list(picked)
    if n_top != NO_LOGPROBS:
        results += logprobs(logits, draw.logit_rows, torch.as_tensor(results[0]), n_top)
    if len(draw.score_rows):
        results += logprobs(
            logits, draw.score_rows, _put(draw.score_tokens, logits), draw.n_score_logprobs
        )
    tokens, is_finite, *rest = _to_host(results)
    return Sampled(
        tokens=tokens,
        is_finite=np.asarray(is_finite, np.bool_),
        logprobs=_as_logprobs(rest[:4]) if n_top != NO_LOGPROBS else None,
        scores=_as_logprobs(rest[-4:]) if len(draw.score_rows) else None,
    )


def choose(
    logits: Tensor, draw: Draw, filter_: Filter | None = None
) -> Tensor | tuple[Column, Column]:
    """[2, S] int32: the token of each sample, and 1 where its logits have a finite maximum and no
    NaN, before and after penalties and bias, else 0. They are two arrays where a CPU finds them
    without torch."""
    is_plain = not (draw.penalized or len(draw.bias) or any(draw.params["temperature"].tolist()))
    if is_plain and len(draw.logit_rows):  # logits are read, once on a CPU
        return _likeliest(logits, draw.logit_rows)
    kinds = _kinds(draw.params, logits.shape[1])
    order = np.lexsort((draw.params["top_k"], kinds))
    picked = [torch.empty((2, 0), dtype=torch.int32, device=logits.device)]
    for kind in range(4):
        group = order[kinds[order] == kind]
        for part in _slices(len(group), logits):
            members = group[part]
            x = _rows_of(logits, draw.logit_rows[members])
            picked.append(_choose_slice(x, draw, members, kind, filter_ or filter_gaps))
    return torch.cat(picked, dim=1).index_select(1, _put(np.argsort(order), logits))


def _kinds(params: Column, n_tokens: int) -> Column:
    """What each sample needs: the maximum, noise (and perhaps min_p), these and top_p, or these
    with a top_k."""
    has_top_k = (params["top_k"] > 0) & (params["top_k"] < n_tokens)
    kinds = np.where(has_top_k, _TOP_K, np.where(params["top_p"] < 1, _TOP_P, _PLAIN))
    return np.where(params["temperature"] == 0, _GREEDY, kinds)


def _rows_of(logits: Tensor, rows: Ids) -> Tensor:
    """These rows of the logits: a view where they follow each other, to read only."""
    first, *rest = rows.tolist()
    is_range = rest == [*range(first + 1, first + len(rows))]
    return (
        logits[first : first + len(rows)]
        if is_range
        else logits.index_select(0, _put(rows, logits))
    )


def _likeliest(logits: Tensor, rows: Ids) -> Tensor | tuple[Column, Column]:
    """As `choose`, for samples that are greedy and no more. On a CPU by numpy: an operator of torch
    takes up to 50 us after a forward that has driven its code out of the caches."""
    if not logits.is_cpu:
        x = _rows_of(logits, rows)
        return torch.stack([x.argmax(-1).int(), x.amax(-1).isfinite().int()])
    values = logits.numpy()
    tokens = [int(values[row].argmax()) for row in rows.tolist()]
    is_finite = [math.isfinite(values[at]) for at in zip(rows.tolist(), tokens, strict=True)]
    return np.array(tokens, np.int32), np.array(is_finite)


def _argmax(x: Tensor) -> Tensor:
    """[n] The first largest of each row of x [n, V]; on a CPU by numpy, which takes a tenth of
    torch's time."""
    return torch.as_tensor(x.numpy().argmax(-1)) if x.is_cpu else x.argmax(-1)


def _choose_slice(x: Tensor, draw: Draw, members: Column, kind: int, filter_: Filter) -> Tensor:
    """[2, n] as in `choose`, for n samples of one kind and their logits x [n, V]."""
    is_finite, params, is_cpu = x.amax(-1).isfinite(), draw.params[members], x.is_cpu
    if draw.penalized or len(draw.bias):
        x = x.clone()
        adjust(x, draw, members)
        is_finite &= x.amax(-1).isfinite()  # a bias may ban every token
    if kind == _GREEDY:
        tokens = _argmax(x)
    elif kind == _TOP_K and is_cpu:
        x, ids = _nearest(x, int(params["top_k"].max()))
        tokens = ids.gather(1, _draw_from(x, ids, draw, members, filter_)[:, None])[:, 0]
    else:
        near = _within_reach(x, draw, members) if kind == _PLAIN and is_cpu else None
        if near is not None:
            tokens = _draw_near(x, near, draw, members)
        else:
            has_filter = kind != _PLAIN or (params["min_p"] > 0).any()
            tokens = _draw_from(x, _ids(x), draw, members, filter_ if has_filter else None)
    return torch.stack([tokens.int(), is_finite.int()])


def _draw_from(
    x: Tensor, ids: Tensor, draw: Draw, members: Column, filter_: Filter | None
) -> Tensor:
    """[n] Which of the tokens `ids`, whose logits are x [n, m], is drawn in each row."""
    params = draw.params[members]
    gaps = (x - x.amax(-1, keepdim=True)).div_(_put(-params["temperature"][:, None], x))
    if filter_:
        filter_(gaps, params)
    return _argmax(gumbel_of(_put(row_keys(draw, members), x), ids).sub_(gaps))


def _within_reach(x: Tensor, draw: Draw, members: Column) -> Column | None:
    """[n, V] The tokens that the most noise there is could lift above the likeliest token and its
    own noise; no other is ever drawn. None if they are so many that working on all costs less."""
    likeliest = _argmax(x)[:, None]
    noise = gumbel_of(_put(row_keys(draw, members), x), likeliest)
    temperature = _put(draw.params["temperature"][members][:, None], x)
    is_near = ~(
        x.numpy() < (x.gather(1, likeliest) - temperature * (MOST_NOISE - noise)).numpy()
    )  # all, where NaN
    return is_near if np.count_nonzero(is_near) < _FEW * is_near.size else None


def _draw_near(x: Tensor, is_near: Column, draw: Draw, members: Column) -> Tensor:
    """[n] The tokens drawn from x [n, V], without top_k and top_p, if only these count."""
    params, (row, token) = draw.params[members], _places(is_near)
    keys, temperature, limit = (
        _put(column, x)[row]
        for column in (row_keys(draw, members), params["temperature"], _min_p_limit(params))
    )
    gaps = (x.amax(-1)[row] - x[row, token]) / temperature
    scores = (
        gumbel_of(keys, token[:, None])[:, 0]
        .sub_(gaps.masked_fill_(gaps > limit, torch.inf))
        .numpy()
    )
    starts = np.searchsorted(row.numpy(), np.arange(len(x) + 1))
    return token[
        [start + scores[start:end].argmax() for start, end in itertools.pairwise(starts.tolist())]
    ]


def _ids(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], dtype=torch.int32, device=x.device)


def _places(mask: Column) -> tuple[Tensor, Tensor]:
    """The rows and columns where a mask [n, V] is set, in order; a fourth of np.nonzero's time."""
    row, column = np.divmod(np.flatnonzero(mask), mask.shape[1])
    return torch.as_tensor(row), torch.as_tensor(column)


def _nearest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The tokens of each row of x [n, V] among which its k likeliest are, in order: their logits
    and ids [n, m], filled up with minus infinity. At least k tokens reach the k-th largest of the
    maxima of groups of tokens."""
    n, n_tokens = x.shape
    n_groups = n_tokens // _GROUP
    if n_groups < 2 * k:
        return x, _ids(x).expand(n, -1)
    maxima = x[:, : n_groups * _GROUP].reshape(n, n_groups, _GROUP).amax(-1)
    is_near = ~(x.numpy() < maxima.topk(k).values[:, -1:].numpy())
    counts = np.count_nonzero(is_near, axis=1)
    is_filled = torch.as_tensor(np.arange(counts.max()) < counts[:, None])
    row, token = _places(is_near)
    ids, logits = (
        torch.zeros(is_filled.shape, dtype=torch.int32),
        x.new_full(is_filled.shape, -torch.inf),
    )
    ids[is_filled], logits[is_filled] = token.int(), x[row, token]
    return logits, ids


def adjust(x: Tensor, draw: Draw, members: Column) -> None:
    """Apply penalties, then bias, in place, to the logits x [n, V] of the samples `members` [n].
    What overflows becomes the largest number: an infinite maximum would make NaN of its own gap."""
    row_of = np.full(len(draw.params), -1)
    row_of[members] = np.arange(len(members))
    penalties = [
        _penalties(int(row_of[j]), history, n_prompt, draw.params[j])
        for j, history, n_prompt in draw.penalized
        if row_of[j] >= 0
    ]
    if penalties:
        rows, tokens, factor, minus = (
            _put(np.concatenate(column), x) for column in zip(*penalties, strict=True)
        )
        before = x[rows, tokens]
        x[rows, tokens] = (torch.where(before > 0, before / factor, before * factor) - minus).clamp(
            max=_MAX
        )
    rows = row_of[draw.bias_at[:, 0]]
    is_mine = rows >= 0
    if is_mine.any():
        at = _put(rows[is_mine], x), _put(draw.bias_at[is_mine, 1].astype(np.int64), x)
        bias = _put(draw.bias[is_mine], x).to(x.dtype).clamp(max=_MAX)
        x[at] = (x[at] + bias).clamp(max=_MAX)


def _penalties(row: int, history: Int, n_prompt: int, params: Any) -> tuple[Column, ...]:
    """Columns (row, token, factor, minus) over the distinct tokens of a history: the factor is for
    tokens of prompt and output (Keskar et al. 2019, CTRL, section 4.1), what is subtracted for
    tokens of the output."""
    tokens, places = np.unique(history, return_inverse=True)
    n_output = np.bincount(places[n_prompt:], minlength=len(tokens))
    minus = params["presence_penalty"] * (n_output > 0) + params["frequency_penalty"] * n_output
    factor = np.full(len(tokens), params["repetition_penalty"])
    return np.full(len(tokens), row), tokens.astype(np.int64), factor, minus.astype(np.float32)


def filter_gaps(gaps: Tensor, params: Column) -> None:
    """Put infinity, in place, for the tokens to leave out of gaps [n, V]: how far each token's
    tempered log-probability lies below the likeliest token's.

    A token stays if its gap is at most -log(min_p), if fewer than top_k tokens are strictly
    likelier, and if those hold less than top_p of the probability of the k likeliest (Holtzman et
    al. 2020, nucleus sampling)."""
    n_tokens = gaps.shape[1]
    top_k = np.where(
        (params["top_k"] > 0) & (params["top_k"] < n_tokens), params["top_k"], n_tokens
    )[:, None]
    limit = _put(_min_p_limit(params)[:, None], gaps)
    # Where top_p is off, no rounding of a sum may drop a token.
    top_p = _put(np.where(params["top_p"] < 1, params["top_p"], np.float32(np.inf))[:, None], gaps)
    if top_k.min() < n_tokens:
        limit = _limit_of_nearest(gaps, limit, top_k, top_p)
    elif params["top_p"].min() < 1:
        limit = _limit_of_all(gaps, limit, top_p)
    gaps.masked_fill_(gaps > limit, torch.inf)


def _min_p_limit(params: Column) -> Column:
    """[n] The largest gap that min_p leaves."""
    with np.errstate(divide="ignore"):
        return -np.log(params["min_p"])


def _limit_of_nearest(gaps: Tensor, limit: Tensor, top_k: Column, top_p: Tensor) -> Tensor:
    """[n, 1] The largest gap within the limit, top_k and top_p: the nearest few tokens are sorted
    and summed up."""
    nearest = gaps.topk(int(top_k.max()), largest=False).values
    is_kept = (nearest <= limit) & (
        torch.arange(nearest.shape[1], device=gaps.device) < _put(top_k, gaps)
    )
    weights = (-nearest).exp() * is_kept
    is_kept &= weights.cumsum(-1) - weights < top_p * weights.sum(-1, keepdim=True)
    return nearest.masked_fill(~is_kept, 0).amax(-1, keepdim=True)


def _limit_of_all(gaps: Tensor, limit: Tensor, top_p: Tensor) -> Tensor:
    """[n, 1] The largest gap within the limit and top_p, found bit by bit, as floats from 0 up are
    ordered like their bits: 31 sums over a cached row cost a fraction of sorting it. Torch may add
    up a lone row in another order, which moves a sum by 1e-7 of itself and a token with that
    probability."""
    weights = (-gaps).exp().mul_(gaps.clone().le_(limit))
    target = top_p * weights.sum(-1, keepdim=True)
    bits = torch.zeros_like(target, dtype=torch.int32)
    for bit in reversed(range(31)):
        trial = bits + (1 << bit)
        nearer = gaps.clone().lt_(_as_float(trial)).mul_(weights).sum(-1, keepdim=True)
        bits = torch.where(nearer < target, trial, bits)
    return torch.minimum(limit, _as_float(bits))


def _as_float(bits: Tensor) -> Tensor:
    return bits.clamp(max=_INFINITY_BITS).view(torch.float32)


def logprobs(logits: Tensor, rows: Column, tokens: Tensor, n_top: int) -> list[Tensor]:
    """Log-probabilities under the softmax of logits[rows]: those of tokens [N], their ranks [N],
    the likeliest tokens [N, K] and theirs [N, K]. Equally likely tokens come in no set order."""
    parts: list[tuple[Tensor, ...]] = []
    for part in _slices(len(rows), logits):
        scores = logits.index_select(0, _put(rows[part], logits)).log_softmax(-1)
        chosen = scores.gather(1, tokens[part, None].long())
        top, top_tokens = scores.topk(min(n_top, logits.shape[1]))
        ranks = scores.gt_(chosen).sum(-1).int() + 1
        parts.append((chosen[:, 0], ranks, top_tokens.int(), top))
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _slices(n_rows: int, logits: Tensor) -> Iterator[slice]:
    """Consecutive slices of the rows, of a size that suits the device."""
    budget = _CPU_SLICE if logits.is_cpu else _DEVICE_SLICE
    step = max(1, budget // (4 * logits.shape[1]))
    return (slice(start, start + step) for start in range(0, n_rows, step))


def _put(values: Column, like: Tensor) -> Tensor:
    """A copy of an array on the device of a tensor. Torch refuses the strides of a record's field,
    so copy first; a blocking copy would wait for the forward."""
    return torch.tensor(values.copy()).to(like.device, non_blocking=True)


def _to_host(results: Sequence[Tensor | Column]) -> list[Column]:
    """Tensors of int32 and float32 as arrays, by one copy from a device."""
    tensors = [result for result in results if isinstance(result, Tensor) and not result.is_cpu]
    if not tensors:
        return [np.asarray(result) for result in results]
    flat = (
        torch.cat([tensor.contiguous().view(torch.int32).flatten() for tensor in tensors])
        .cpu()
        .numpy()
    )
    parts = np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return [
        part.view(np.float32 if tensor.is_floating_point() else np.int32).reshape(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _as_logprobs(arrays: Sequence[Column]) -> Logprobs:
    chosen, ranks, top_tokens, top = arrays
    return Logprobs(chosen=chosen, ranks=ranks, top_tokens=top_tokens, top=top)
