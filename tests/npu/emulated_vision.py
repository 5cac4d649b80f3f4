"""What the attention operator means without a cache, as a vision tower calls it: several images,
each all to all.

Keys and values lie packed as the queries do, [T, N, D], so their lengths are a running sum like the
queries'. Read next: emulation.py, which has the paged form and the limits that both share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.npu.limits import limit

HEAD_DIMS = (64, 128)
"""Sizes of heads that the kernels of every CANN version take; the operator's documentation names
128 and 192 only."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: list[int],
    kv_ends: list[int],
    n_kv_heads: int,
    scale: float,
) -> torch.Tensor:
    """query [T, Nq, D], key and value [S, Nk, D] -> [T, Nq, D] without a mask; both lengths are
    running sums."""
    check_keys(query, key, value, n_kv_heads)
    check_ends(ends, kv_ends, len(key))
    out = torch.zeros_like(query)
    for start, end, kv_start, kv_end in zip([0, *ends], ends, [0, *kv_ends], kv_ends, strict=False):
        q, k, v = query[start:end], key[kv_start:kv_end], value[kv_start:kv_end]
        q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
        out[start:end] = F.scaled_dot_product_attention(
            q, k, v, scale=scale, enable_gqa=True
        ).transpose(0, 1)
    return out


def check_keys(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, n_kv_heads: int
) -> None:
    """Limits of keys and values, and of the size of heads."""
    for x in (key, value):
        limit(
            x.dim() == 3,
            f"without a block table keys and values are [T, N, D], not {tuple(x.shape)}",
        )
        limit(x.is_contiguous(), "keys and values are contiguous")
        limit(x.dtype == query.dtype, f"keys and values have the query's type, not {x.dtype}")
        limit(
            x.shape[1:] == (n_kv_heads, query.shape[2]),
            f"{tuple(x.shape[1:])} is the KV heads, the head size",
        )
    limit(key.shape == value.shape, f"keys {key.shape} and values {value.shape} have one shape")
    limit(
        query.shape[2] in HEAD_DIMS,
        f"without a block table heads are of {HEAD_DIMS}, not {query.shape[2]}",
    )


def check_ends(ends: list[int], kv_ends: list[int], n_keys: int) -> None:
    """Limits of the KV lengths."""
    limit(len(kv_ends) == len(ends), f"{len(kv_ends)} KV lengths for {len(ends)} query lengths")
    limit(
        kv_ends == sorted(kv_ends) and kv_ends[0] >= 0,
        f"KV lengths are a running sum, not {kv_ends}",
    )
    limit(
        kv_ends[-1] == n_keys, f"the last KV length {kv_ends[-1]} is the number of keys, {n_keys}"
    )
