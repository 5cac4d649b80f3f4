"""Logits to tokens: penalties and bias, temperature, min_p, top_k, top_p, then a draw by the
Gumbel-max trick.

The law: a token depends on its own row of logits, its parameters, seed, sample index and position,
and on nothing else. Batch mates, their order and the slices of the computation change nothing.
Tokens tied at the edge of a filter are kept together, so no order matters there either, and a tie
for the maximum goes to the lowest id. Nothing waits for the device before the one copy at the end.
Read first: filters.py, what the words mean, in a few lines each. Read next: steps/commit.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from nva.state.columns import Column, Ids
from nva.state.plan import Draw, Logprobs, Sampled
from nva.state.request import NO_LOGPROBS
from nva.steps.contenders import (
    all_tokens,
    argmax,
    draw_within_reach,
    on_host,
    top_k_contenders,
    within_reach,
)
from nva.steps.filters import Filter, adjust, filter_gaps, put
from nva.steps.noise import gumbel_of, row_keys

_GREEDY, _NOISE, _TOP_P, _TOP_K = range(4)
"""What a sample needs: the maximum; noise, and perhaps min_p; these and top_p; these and top_k."""

_HOST_SLICE = 2**22  # bytes of logits worked on at once: small enough to stay in a cache
_DEVICE_SLICE = 2**26  # large enough to need few launches, small enough for temporaries


def sample(logits: Tensor, draw: Draw, filter_: Filter | None = None) -> Sampled:
    """One token for each of S samples, from logits [L, V] float32, and the log-probabilities that
    were asked for. `filter_` is a device's own way to do what filter_gaps does."""
    # 1. A token for each sample.
    results = list(choose(logits, draw, filter_))

    # 2. Log-probabilities of these tokens, and of prompt tokens.
    n_top = max(draw.params["n_logprobs"].tolist(), default=NO_LOGPROBS)
    if n_top != NO_LOGPROBS:
        results += logprobs(logits, draw.logit_rows, torch.as_tensor(results[0]), n_top)
    has_scores = len(draw.score_rows) > 0
    if has_scores:
        prompt_tokens = put(draw.score_tokens, logits)
        results += logprobs(logits, draw.score_rows, prompt_tokens, draw.n_score_logprobs)

    # 3. All of it comes to the host at once.
    tokens, is_finite, *rest = _to_host(results)
    return Sampled(
        tokens=tokens,
        is_finite=np.asarray(is_finite, np.bool_),
        logprobs=_as_logprobs(rest[:4]) if n_top != NO_LOGPROBS else None,
        scores=_as_logprobs(rest[-4:]) if has_scores else None,
    )


def choose(
    logits: Tensor, draw: Draw, filter_: Filter | None = None
) -> Tensor | tuple[Column, Column]:
    """[2, S] int32: the token of each sample, and 1 where its logits have a finite maximum and no
    NaN, before and after penalties and bias, else 0. On a host they may be two arrays."""
    is_changed = draw.penalized or len(draw.bias)
    is_greedy = not any(draw.params["temperature"].tolist())
    if is_greedy and not is_changed and len(draw.logit_rows):
        return _likeliest(logits, draw.logit_rows)

    # Samples of one kind are computed together, some rows at a time, then put in order again.
    kinds = _kinds(draw.params, logits.shape[1])
    order = np.lexsort((draw.params["top_k"], kinds))
    picked = [_no_tokens(logits)]
    for kind in (_GREEDY, _NOISE, _TOP_P, _TOP_K):
        group = order[kinds[order] == kind]
        for part in _slices(len(group), logits):
            x = _rows_of(logits, draw.logit_rows[group[part]])
            picked.append(_choose_slice(x, draw, group[part], kind, filter_ or filter_gaps))
    inverse = put(np.argsort(order), logits)
    return torch.cat(picked, dim=1).index_select(1, inverse)


def _kinds(params: Column, n_tokens: int) -> Column:
    """[S] The kind of each sample."""
    top_k = params["top_k"]
    has_top_k = (top_k > 0) & (top_k < n_tokens)
    kinds = np.where(params["top_p"] < 1, _TOP_P, _NOISE)
    kinds = np.where(has_top_k, _TOP_K, kinds)
    return np.where(params["temperature"] == 0, _GREEDY, kinds)


def _no_tokens(logits: Tensor) -> Tensor:
    """[2, 0] What is chosen for no samples."""
    return torch.empty((2, 0), dtype=torch.int32, device=logits.device)


def _slices(n_rows: int, logits: Tensor) -> Iterator[slice]:
    """Consecutive slices of the rows, of a size that suits where the logits lie."""
    budget = _HOST_SLICE if on_host(logits) else _DEVICE_SLICE
    step = max(1, budget // (4 * logits.shape[1]))
    for start in range(0, n_rows, step):
        yield slice(start, start + step)


def _rows_of(logits: Tensor, rows: Ids) -> Tensor:
    """These rows of the logits: a view where they are consecutive, so only to be read."""
    first = int(rows[0])
    end = first + len(rows)
    if rows.tolist() == list(range(first, end)):
        return logits[first:end]
    return logits.index_select(0, put(rows, logits))


def _likeliest(logits: Tensor, rows: Ids) -> Tensor | tuple[Column, Column]:
    """As `choose`, for samples that are greedy and no more. On a host by numpy: an operator of
    torch takes up to 50 us after a forward that has driven its code out of the caches."""
    if not on_host(logits):
        x = _rows_of(logits, rows)
        return _as_picked(x.argmax(-1), x.amax(-1).isfinite())
    tokens: list[int] = []
    is_finite: list[bool] = []
    values = logits.numpy()
    for row in rows.tolist():
        token = int(values[row].argmax())  # the first NaN, if there is one
        tokens.append(token)
        is_finite.append(math.isfinite(values[row, token]))
    return np.array(tokens, np.int32), np.array(is_finite)


def _as_picked(tokens: Tensor, is_finite: Tensor) -> Tensor:
    """[2, n] int32, as `choose` gives them."""
    return torch.stack([tokens.int(), is_finite.int()])


def _choose_slice(x: Tensor, draw: Draw, members: Column, kind: int, filter_: Filter) -> Tensor:
    """[2, n] as in `choose`, for n samples of one kind and their logits x [n, V]."""
    is_finite = x.amax(-1).isfinite()
    if draw.penalized or len(draw.bias):
        x = x.clone()
        adjust(x, draw, members)
        is_finite &= x.amax(-1).isfinite()  # a bias may ban every token
    if kind == _GREEDY:
        return _as_picked(argmax(x), is_finite)
    keys = put(row_keys(draw, members), x)
    tokens = _draw_tokens(x, draw.params[members], keys, kind, filter_)
    return _as_picked(tokens, is_finite)


def _draw_tokens(x: Tensor, params: Column, keys: Tensor, kind: int, filter_: Filter) -> Tensor:
    """[n] A token for each row of logits x [n, V], with parameters [n] and the noise of keys
    [n, 2]. On a host only tokens that can win are looked at."""
    if kind == _TOP_K and on_host(x):
        x, ids = top_k_contenders(x, int(params["top_k"].max()))
        places = draw_from(x, ids, params, keys, filter_)
        return ids.gather(1, places[:, None])[:, 0]
    if kind == _NOISE and on_host(x):
        is_near = within_reach(x, params, keys)
        if is_near is not None:
            return draw_within_reach(x, is_near, params, keys)
    has_filter = kind != _NOISE or (params["min_p"] > 0).any()
    return draw_from(x, all_tokens(x), params, keys, filter_ if has_filter else None)


def draw_from(
    x: Tensor, ids: Tensor, params: Column, keys: Tensor, filter_: Filter | None
) -> Tensor:
    """[n] The column of x [n, m] that is drawn in each row, where x are the logits of tokens `ids`,
    [m] or [n, m]: filters.pick for a batch."""
    temperature = put(params["temperature"][:, None], x)
    gaps = (x.amax(-1, keepdim=True) - x).div_(temperature)
    if filter_:
        filter_(gaps, params)
    return argmax(gumbel_of(keys, ids).sub_(gaps))


def logprobs(logits: Tensor, rows: Column, tokens: Tensor, n_top: int) -> list[Tensor]:
    """Log-probabilities under the softmax of logits[rows]: those of tokens [N], their ranks [N],
    the likeliest tokens [N, K] and theirs [N, K]. Equally likely tokens come in no set order."""
    parts: list[tuple[Tensor, ...]] = []
    for part in _slices(len(rows), logits):
        x = logits.index_select(0, put(rows[part], logits))
        scores = x.log_softmax(-1)
        chosen = scores.gather(1, tokens[part, None].long())
        top, top_tokens = scores.topk(min(n_top, logits.shape[1]))
        ranks = scores.gt_(chosen).sum(-1).int() + 1
        parts.append((chosen[:, 0], ranks, top_tokens.int(), top))
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _to_host(results: Sequence[Tensor | Column]) -> list[Column]:
    """Tensors of int32 and float32 as arrays, by one copy from a device."""
    tensors = [found for found in results if isinstance(found, Tensor)]
    if all(on_host(tensor) for tensor in tensors):
        return [np.asarray(found) for found in results]
    words = [tensor.contiguous().view(torch.int32).flatten() for tensor in tensors]
    ends = np.cumsum([len(each) for each in words])
    parts = np.split(torch.cat(words).cpu().numpy(), ends[:-1])
    return [_as_array(part, tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _as_array(words: Column, like: Tensor) -> Column:
    """A tensor's numbers, which came as int32, in its own shape and dtype."""
    dtype = np.float32 if like.is_floating_point() else np.int32
    return words.view(dtype).reshape(like.shape)


def _as_logprobs(arrays: Sequence[Column]) -> Logprobs:
    """A record of what logprobs() found."""
    chosen, ranks, top_tokens, top = arrays
    return Logprobs(chosen=chosen, ranks=ranks, top_tokens=top_tokens, top=top)
