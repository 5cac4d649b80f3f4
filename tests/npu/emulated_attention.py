"""What the NPU's attention operator means over a paged cache, on the CPU, strict about its
documented limits.

Read next: emulation.py, which registers it and says which limits are left out on purpose;
emulated_vision.py, for attention without a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.npu import emulated_vision as vision
from tests.npu.limits import HALVES, limit

UNLIMITED = 2**31 - 1
CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
_attention_dtypes = set(HALVES)


@contextlib.contextmanager
def fp32_arithmetic() -> Iterator[None]:
    """Let attention take float32 too, so that a comparison isn't blurred by rounding. All other
    limits stay."""
    _attention_dtypes.add(torch.float32)
    try:
        yield
    finally:
        _attention_dtypes.discard(torch.float32)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_fused_infer_attention_score_v2 in layout TND over a paged cache; without a block table,
    vision.attention.

    query [T, Nq, D], key and value [NB, BS, Nk*D] -> [T, Nq, D], and an empty tensor.
    Query lengths are a running sum; KV lengths are per row, because there is a block table.
    """
    modelled = {name: value for name, value in others.items() if value not in (None, 0, False)}
    limit(not modelled, f"this emulation doesn't know {sorted(modelled)}")
    limit(input_layout == "TND", f"this emulation knows the layout TND, not {input_layout}")
    ends, lengths = list(actual_seq_qlen or ()), list(actual_seq_kvlen or ())
    check_query(query, num_query_heads, num_key_value_heads, ends)
    if block_table is None:
        limit(
            sparse_mode == 0 and atten_mask is None,
            "this emulation knows no mask without a block table",
        )
        limit(
            learnable_sink is None and not block_size,
            "without a block table, it knows no sinks and no block size",
        )
        out = vision.attention(query, key, value, ends, lengths, num_key_value_heads, softmax_scale)
        return out, torch.zeros(0)
    check_cache(query, key, value, num_key_value_heads, block_size)
    check_rows(ends, lengths, block_table, key)
    check_mask(sparse_mode, atten_mask, pre_tokens, next_tokens)
    check_sink(learnable_sink, query)
    bounds = {0: (UNLIMITED, UNLIMITED), 3: (UNLIMITED, 0), 4: (pre_tokens, next_tokens)}[
        sparse_mode
    ]
    out = torch.zeros_like(query)
    for start, end, length, blocks in zip([0, *ends], ends, lengths, block_table, strict=False):
        limit(
            sparse_mode != 3 or end - start <= length,
            f"sparse mode 3 wants query {end - start} <= KV {length} tokens",
        )
        blocks = blocks[: -(-length // block_size)].long()
        k, v = (
            cache[blocks].flatten(0, 1)[:length].unflatten(-1, (num_key_value_heads, -1))
            for cache in (key, value)
        )
        out[start:end] = attend(query[start:end], k, v, softmax_scale, bounds, learnable_sink)
    return out, torch.zeros(0)


def attention_workspace(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The scratch memory of `attention_out`, which a captured graph holds: none here."""
    return query.new_empty(0)


def attention_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    workspace: Any,
    out: list[torch.Tensor],
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """`attention` into given tensors: what npugraph_ex puts in its place, so that a captured graph
    can be updated."""
    for given, computed in zip(out, attention(query, key, value, **options), strict=True):
        given.copy_(computed)
    return tuple(out)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    bounds: tuple[int, int],
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """One row: q [n, Nq, D], k and v [s, Nk, D] -> [n, Nq, D]. Query i stands at position s - n + i
    (bottom-right)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    n, s = scores.shape[1:]
    distance = torch.arange(s) - torch.arange(s - n, s)[:, None]
    scores.masked_fill_((distance < -bounds[0]) | (distance > bounds[1]), -torch.inf)
    if sink is not None:  # a logit that every softmax normalizes over and that brings no value
        scores = torch.cat([scores, sink.float()[:, None, None].expand(-1, n, 1)], -1)
    weights = scores.softmax(-1)[..., :s]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def check_query(query: torch.Tensor, n_heads: int, n_kv_heads: int, ends: list[int]) -> None:
    """Limits of the query and of its lengths, which are a running sum."""
    limit(query.dim() == 3, f"TND wants a query of 3 dimensions, not {query.dim()}")
    limit(query.is_contiguous(), "the query is contiguous")
    limit(query.dtype in _attention_dtypes, f"the query is float16 or bfloat16, not {query.dtype}")
    limit(query.shape[1] == n_heads, f"num_query_heads {n_heads} is the query's, {query.shape[1]}")
    limit(n_kv_heads > 0, "num_key_value_heads is given")
    limit(
        n_heads % n_kv_heads == 0 and n_heads // n_kv_heads <= 64,
        f"{n_heads} / {n_kv_heads} heads is whole and <= 64",
    )
    limit(n_heads <= 256, f"at most 256 heads, not {n_heads}")
    limit(
        query.shape[2] % 16 == 0 and query.shape[2] <= 256,
        f"head size {query.shape[2]} is a multiple of 16 up to 256",
    )
    limit(query.shape[0] <= 1 << 20, f"at most 1M tokens, not {query.shape[0]}")
    limit(0 < len(ends) <= 4096, f"1 to 4096 rows, not {len(ends)}")
    limit(ends == sorted(ends) and ends[0] >= 0, f"query lengths are a running sum, not {ends}")
    limit(
        ends[-1] == query.shape[0],
        f"the last query length {ends[-1]} is the number of tokens, {query.shape[0]}",
    )


def check_cache(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, n_kv_heads: int, block_size: int
) -> None:
    """Limits of the paged cache."""
    for cache in (key, value):
        limit(
            cache.dim() == 3,
            f"this emulation knows caches [blocks, block size, heads * head size], not {cache.shape}",
        )
        limit(cache.is_contiguous(), "keys and values are contiguous")
        limit(
            cache.dtype == query.dtype, f"keys and values have the query's type, not {cache.dtype}"
        )
        limit(
            cache.shape[1] == block_size,
            f"block_size {block_size} is the cache's, {cache.shape[1]}",
        )
        limit(
            cache.shape[2] == n_kv_heads * query.shape[2],
            f"{cache.shape[2]} is {n_kv_heads} heads of the head size",
        )
        limit(cache.numel() <= UNLIMITED, "a cache has fewer than 2^31 elements")
    limit(key.shape == value.shape, f"keys {key.shape} and values {value.shape} have one shape")
    limit(
        block_size % 128 == 0 and 128 <= block_size <= 512,
        f"block_size is 128, 256, 384 or 512, not {block_size}",
    )
    limit(key.shape[2] <= 65535, f"KV heads * head size is at most 65535, not {key.shape[2]}")


def check_rows(
    ends: list[int], lengths: list[int], block_table: torch.Tensor | None, key: torch.Tensor
) -> None:
    """Limits of the KV lengths, which are per row, and of the block table."""
    limit(len(lengths) == len(ends), f"{len(lengths)} KV lengths for {len(ends)} query lengths")
    limit(all(length >= 0 for length in lengths), f"KV lengths aren't negative: {lengths}")
    limit(block_table is not None and block_table.dim() == 2, "the block table has 2 dimensions")
    limit(block_table.dtype == torch.int32, f"the block table is int32, not {block_table.dtype}")
    limit(block_table.is_contiguous(), "the block table is contiguous")
    limit(
        len(block_table) == len(ends),
        f"the block table has {len(block_table)} rows for {len(ends)} lengths",
    )
    needed = [-(-length // key.shape[1]) for length in lengths]
    limit(
        max(needed) <= block_table.shape[1],
        f"{max(needed)} blocks don't fit a table {block_table.shape[1]} wide",
    )
    for n, blocks in zip(needed, block_table.tolist(), strict=True):
        limit(
            all(0 <= block < len(key) for block in blocks[:n]),
            f"block ids {blocks[:n]} are in [0, {len(key)})",
        )


def check_mask(
    sparse_mode: int, mask: torch.Tensor | None, pre_tokens: int, next_tokens: int
) -> None:
    """Limits of the sparse mode: none (0), causal (3) or band (4), the last two over one fixed
    triangular mask."""
    limit(sparse_mode in (0, 3, 4), f"TND knows the sparse modes 0, 3 and 4, not {sparse_mode}")
    limit(
        (mask is None) == (sparse_mode == 0),
        "TND takes a mask in the sparse modes 3 and 4, and only there",
    )
    if mask is not None:
        limit(
            mask.dtype in {torch.bool, torch.int8, torch.uint8},
            f"the mask is bool, int8 or uint8, not {mask.dtype}",
        )
        limit(mask.is_contiguous(), "the mask is contiguous")
        limit(
            mask.shape[-2:] == (2048, 2048) and mask.numel() == 2048**2,
            f"the mask is 2048 x 2048, not {mask.shape}",
        )
        limit(
            torch.equal(mask.bool().view(2048, 2048), CAUSAL),
            "the mask is True strictly above the diagonal",
        )
    if sparse_mode == 4:
        limit(
            pre_tokens + next_tokens >= 0,
            f"pre_tokens {pre_tokens} + next_tokens {next_tokens} isn't negative",
        )


def check_sink(sink: torch.Tensor | None, query: torch.Tensor) -> None:
    """Limits of the learnable sink, one logit per query head."""
    if sink is not None:
        dtypes = {torch.bfloat16} | (_attention_dtypes - HALVES)
        limit(sink.dtype in dtypes, f"sinks are bfloat16, not {sink.dtype}")
        limit(sink.shape == query.shape[1:2], f"one sink per query head, not {sink.shape}")
        limit(query.shape[2] <= 128, f"sinks want a head size of at most 128, not {query.shape[2]}")
