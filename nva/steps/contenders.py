"""Which tokens can win a draw, so that a CPU need not work on the others.

The law: exactly the token that working on all would give. A token that is left out could not win:
it is not among the top_k, or the most noise there is would not lift it above another token. A CPU
gathers a few of 150,000 logits faster than it draws noise for all; a device works on all, since it
would have to tell the host how many there are. Read next: sample.py, which calls these."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from nva.state.columns import Column
from nva.steps.filters import min_p_limit, put
from nva.steps.noise import MAX_NOISE, gumbel_of

_GROUP = 64  # tokens; the maximum of each group bounds the k-th largest logit
_FEW = 0.2  # of all tokens; beyond, working on all of them costs less than gathering some


def on_host(x: Tensor) -> bool:
    """Whether a tensor lies in the host's memory, where numpy can read it as it is."""
    return x.is_cpu


def argmax(x: Tensor) -> Tensor:
    """[n] The first largest of each row of x [n, V]; on a host by numpy, in a tenth of torch's
    time."""
    if not on_host(x):
        return x.argmax(-1)
    return torch.as_tensor(x.numpy().argmax(-1))


def all_tokens(x: Tensor) -> Tensor:
    """[V] int32: the ids of all tokens that logits x [n, V] are for."""
    return torch.arange(x.shape[1], dtype=torch.int32, device=x.device)


def top_k_contenders(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Tokens of each row of x [n, V] among which its k likeliest are, by ascending id: their logits
    [n, m], filled up with minus infinity, and their ids."""
    n, n_tokens = x.shape
    n_groups = n_tokens // _GROUP
    if n_groups < 2 * k:
        return x, all_tokens(x).expand(n, -1)

    # 1. The k largest group maxima are k logits, so the k-th largest logit is at least the last.
    groups = x[:, : n_groups * _GROUP].reshape(n, n_groups, _GROUP)
    maxima = groups.amax(-1)
    bound = maxima.topk(k).values[:, -1:]
    is_near = ~(x.numpy() < bound.numpy())  # where the bound is NaN: all

    # 2. The tokens that reach it, from the left.
    counts = np.count_nonzero(is_near, axis=1)
    is_filled = torch.as_tensor(np.arange(counts.max()) < counts[:, None])
    row, token = _nonzero(is_near)
    ids = torch.zeros(is_filled.shape, dtype=torch.int32)
    ids[is_filled] = token.int()
    logits = x.new_full(is_filled.shape, -torch.inf)
    logits[is_filled] = x[row, token]
    return logits, ids


def within_reach(x: Tensor, params: Column, keys: Tensor) -> Column | None:
    """[n, V] bool: the tokens that the largest noise could lift above the likeliest token with its
    own noise. None if they are so many that working on all costs less.

    x [n, V] are logits, params [n] their samples' parameters, keys [n, 2] the keys of their
    noise."""
    likeliest = argmax(x)[:, None]
    temperature = put(params["temperature"][:, None], x)
    reach = temperature * (MAX_NOISE - gumbel_of(keys, likeliest))
    bound = x.gather(1, likeliest) - reach
    is_near = ~(x.numpy() < bound.numpy())  # where the bound is NaN: all
    is_few = np.count_nonzero(is_near) < _FEW * is_near.size
    return is_near if is_few else None


def draw_within_reach(x: Tensor, is_near: Column, params: Column, keys: Tensor) -> Tensor:
    """[n] The tokens drawn from logits x [n, V] of samples with neither top_k nor top_p, if only
    the tokens is_near [n, V] count."""
    # 1. All rows' tokens, one after another, each with its row's numbers.
    row, token = _nonzero(is_near)
    temperature = put(params["temperature"], x)[row]
    limit = put(min_p_limit(params), x)[row]

    # 2. The draw, as in sample.draw_from.
    gaps = (x.amax(-1)[row] - x[row, token]) / temperature
    gaps.masked_fill_(gaps > limit, torch.inf)
    noise = gumbel_of(keys[row], token[:, None])[:, 0]
    scores = noise.sub_(gaps).numpy()

    # 3. The best token of each row.
    ends = np.searchsorted(row.numpy(), np.arange(len(x) + 1))
    best: list[int] = []
    for start, end in itertools.pairwise(ends.tolist()):
        best.append(start + int(scores[start:end].argmax()))
    return token[best]


def _nonzero(mask: Column) -> tuple[Tensor, Tensor]:
    """The rows and columns where a mask [n, V] is set, row by row, in a fourth of np.nonzero's
    time."""
    row, column = np.divmod(np.flatnonzero(mask), mask.shape[1])
    return torch.as_tensor(row), torch.as_tensor(column)
