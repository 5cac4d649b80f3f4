"""The kernels in plain torch: what they mean, and how they run on CPUs and GPUs that have none of
their own.

The law: this file is the specification; every other backend is tested against it. Temporaries are
small, because memory that stays in the processor's cache costs little and a large fresh allocation
costs more than the arithmetic. Read next: kernels/__init__.py for the contract, models/decoder.py
for the order of the calls."""

from __future__ import annotations

import functools

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nva.kernels import Kernels, Layout

_GROUP_BYTES = 2 << 20
"""Keys gathered at a time: 1 to 2 MB measured best for decode, 8 MB took 1.3 to 3 times as long."""

_SCORE_BYTES = 4 << 20
"""Attention scores held at a time."""

_VISION_QUERIES = 512
_VISION_SCORE_BYTES = 64 << 20
"""Patches that are queries at a time, and their scores, where torch holds scores at all."""


def pack_linear(weight: Tensor) -> Tensor:
    """The weight itself."""
    return weight


def pack_norm(weight: Tensor, unit_offset: bool) -> Tensor:
    """The weight itself: 1 + weight would be rounded."""
    return weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] -> [..., N]."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """Zhang and Sennrich 2019. float32 inside, rounded to x's dtype before the weight, as Llama was
    trained, or after a weight that is stored as its difference from 1, as Gemma was."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1 + weight.float())).to(x.dtype)
    return normed.to(x.dtype) * weight


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """The residual stream takes x in; returns (its norm, itself)."""
    residual = x + residual
    return rms_norm(residual, weight, eps, unit_offset), residual


def silu_mul(x: Tensor) -> Tensor:
    """[T, 2I] -> [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """[T, 2I] -> [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def moe(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    n_active: int,
    normalize: bool,
    is_padding: Tensor,
) -> Tensor:
    """Shazeer et al. 2017, sparsely gated experts: route, sort by expert, compute group by group,
    put back and add.

    Padding is routed to an expert beyond the last, which doesn't exist.
    """
    n_experts = logits.shape[1]
    weights, experts = _route(logits, n_active, normalize)
    experts = torch.where(is_padding[:, None], n_experts, experts).flatten()
    order = experts.argsort(stable=True)
    ends = torch.searchsorted(experts[order], torch.arange(n_experts, device=x.device), right=True)
    grouped = silu_mul(grouped_linear(x[order // n_active], gate_up, ends))
    grouped = grouped_linear(grouped, down, ends)
    out = torch.empty_like(grouped).index_copy_(0, order, grouped).unflatten(0, (-1, n_active))
    return (out * weights[..., None]).sum(1)


def _route(logits: Tensor, n_active: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The weights [T, n_active], in the dtype of the logits, and ids of each token's experts,
    likeliest first."""
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(n_active, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), experts


# An operator of its own, because a tracer can't follow a loop over groups whose sizes only the
# device knows.
@torch.library.custom_op("nva::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """x [R, K] -> [R, N]: rows [ends[e - 1], ends[e]) times the transpose of weights[e] [N, K];
    zero beyond the last.

    A GPU is waited for here, to know the groups.
    """
    out = x.new_zeros(len(x), weights.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if start < end:
            torch.mm(x[start:end], weights[expert].t(), out=out[start:end])
        start = end
    return out


@grouped_linear.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(x), weights.shape[1])


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Su et al. 2021 in the layout of GPT-NeoX: number i turns with number i + R/2, not with its
    neighbour."""
    return _rotate(q, cos[:, None], sin[:, None]), _rotate(k, cos[:, None], sin[:, None])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n_rotated = cos.shape[-1]
    turned = x[..., :n_rotated]
    rest = x[..., n_rotated:]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v [T, Nk, D] into the caches, in place."""
    k_cache.flatten(0, 1)[slots] = k
    v_cache.flatten(0, 1)[slots] = v


def copy_blocks(k_cache: Tensor, v_cache: Tensor, copies: Tensor) -> None:
    """Blocks copies[:, 0] onto copies[:, 1], in place; the right-hand side is a copy, so reads come
    first."""
    sources, targets = copies.unbind(1)
    k_cache[targets] = k_cache[sources]
    v_cache[targets] = v_cache[sources]


@attrs.frozen(kw_only=True)
class Group:
    """G rows with S queries each, and their contexts side by side, aligned at the end: column C - 1
    is every row's newest token, and a shorter row starts with padding that repeats its first token
    (finite, and masked)."""

    queries: Tensor  # [G, S] int64, where the queries lie among the packed tokens
    # [G, Nk, C] int64, where keys and values lie in a cache seen as [n_ids * block_size * Nk, D]
    vectors: Tensor
    n_padding: Tensor  # [G] columns before the first token


def attention_inputs(host: Layout, on_device: Layout, k_cache: Tensor) -> list[Group]:
    """The rows in groups: as many together as their keys fit into _GROUP_BYTES, at least one."""
    n_queries = np.diff(host.query_ends, prepend=0)
    token_bytes = k_cache[0, 0].numel() * k_cache.element_size()
    groups = _similar_rows(n_queries, host.context_lens, _GROUP_BYTES // token_bytes)
    return [_group(rows, int(n_queries[rows[0]]), host, on_device, k_cache) for rows in groups]


def _similar_rows(
    n_queries: np.ndarray, context_lens: np.ndarray, max_tokens: int
) -> list[list[int]]:
    """Row ids, longest context first, together if their query lengths are equal, their padded
    contexts at most max_tokens, and not more than half of any is padding (below 64 columns, padding
    costs less than a group)."""
    groups: list[list[int]] = []
    for row in np.lexsort((-context_lens, -n_queries)).tolist():
        longest = context_lens[groups[-1][0]] if groups else 0
        if (
            groups
            and n_queries[row] == n_queries[groups[-1][0]]
            and (len(groups[-1]) + 1) * longest <= max_tokens
            and longest <= max(64, 2 * context_lens[row])
        ):
            groups[-1].append(row)
        elif n_queries[row] > 0:
            groups.append([row])
    return groups


def _group(
    rows: list[int], n_queries: int, host: Layout, on_device: Layout, k_cache: Tensor
) -> Group:
    _, block_size, n_kv_heads, _ = k_cache.shape
    n_columns = int(host.context_lens[rows].max())
    ids = torch.tensor(rows, device=k_cache.device)
    arange = functools.partial(torch.arange, device=k_cache.device)
    n_padding = n_columns - on_device.context_lens[ids].long()
    positions = (arange(n_columns) - n_padding[:, None]).clamp(min=0)
    blocks = on_device.block_tables[ids].long().gather(1, positions // block_size)
    slots = blocks * block_size + positions % block_size
    return Group(
        queries=on_device.query_ends[ids].long()[:, None] - n_queries + arange(n_queries),
        vectors=slots[:, None] * n_kv_heads + arange(n_kv_heads)[:, None],
        n_padding=n_padding,
    )


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    inputs: list[Group],
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, Nq, D] -> [T, Nq, D], group by group; a group's keys and values are held whole, its
    scores in slices."""
    out = torch.empty_like(q)
    for group in inputs:
        n_unseen = _first_seen(group.queries.shape[1], group.vectors.shape[2], window)
        vectors = group.vectors[..., n_unseen:]
        n_padding = group.n_padding - n_unseen
        k, v = _gather(k_cache, vectors), _gather(v_cache, vectors)
        for queries, seen in _slices(group.queries, k.shape[2], q.shape[1], window):
            n_seen = seen.stop - seen.start
            visible = _visible(n_padding - seen.start, queries.shape[1], n_seen, window)
            scaled = q[queries].float() * scale
            found = _attend(scaled, k[:, :, seen], v[:, :, seen], visible, sinks)
            out[queries] = found.to(q.dtype)
    return out


def _first_seen(n_queries: int, n_columns: int, window: int | None) -> int:
    """The first column that any of n_queries sees, when the last of them stands at the last of
    n_columns."""
    return 0 if window is None else max(0, n_columns - n_queries - window + 1)


def _slices(
    queries: Tensor, n_columns: int, n_heads: int, window: int | None
) -> list[tuple[Tensor, slice]]:
    """Queries [G, S] in slices whose scores fit _SCORE_BYTES, each with the columns it sees."""
    n_rows, n_queries = queries.shape
    slices = []
    end = n_columns - n_queries
    size = max(1, _SCORE_BYTES // (4 * n_rows * n_heads * n_columns))
    for part in queries.split(size, dim=1):
        end += part.shape[1]
        slices.append((part, slice(_first_seen(part.shape[1], end, window), end)))
    return slices


def _gather(cache: Tensor, vectors: Tensor) -> Tensor:
    """Keys or values [G, Nk, C, D] float32: head by head, so that the products read them in
    order."""
    return (
        cache.view(-1, cache.shape[-1])
        .index_select(0, vectors.flatten())
        .view(*vectors.shape, -1)
        .float()
    )


def _visible(n_padding: Tensor, n_queries: int, n_columns: int, window: int | None) -> Tensor:
    """[G, S, C] bool: which columns a query sees, when the last of S queries stands at the last of
    C columns."""
    columns = torch.arange(n_columns, device=n_padding.device)
    own = columns[n_columns - n_queries :, None]
    visible = (columns <= own) & (columns >= n_padding[:, None, None])
    return visible if window is None else visible & (columns > own - window)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    """softmax(q k^T) v in float32: scaled q [G, S, Nq, D], k and v [G, Nk, C, D] -> [G, S, Nq, D].

    The Nq / Nk query heads that share a key-value head are multiplied with it as if they were
    further queries."""
    n_rows, n_queries, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[1]
    q = q.unflatten(2, (n_kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [G, Nk, Nq / Nk, S, D]
    scores = (q.flatten(2, 3) @ k.transpose(-1, -2)).unflatten(2, (-1, n_queries))
    scores.masked_fill_(~visible[:, None, None], -torch.inf)
    weights = scores.softmax(-1)
    if sinks is not None:
        # The softmax over (scores, sink) is softmax(scores) * sigmoid(logsumexp(scores) - sink).
        above = scores.logsumexp(-1, keepdim=True) - sinks.float().view(n_kv_heads, -1, 1, 1)
        weights *= torch.sigmoid(above)
    out = (weights.flatten(2, 3) @ v).unflatten(2, (-1, n_queries))
    return out.permute(0, 3, 1, 2, 4).reshape(n_rows, n_queries, n_heads, head_dim)


def vision_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q, k, v [P, N, D] -> [P, N, D]: some heads at a time, and some queries of theirs.

    With a batch dimension torch takes a kernel that never holds the P x P scores (Dao et al. 2022,
    FlashAttention), where it has one for the device and the sizes. Where it has none, the scores of
    one call are still bounded."""
    n_patches, n_heads, _ = q.shape
    n_together = max(1, _VISION_SCORE_BYTES // (4 * min(_VISION_QUERIES, n_patches) * n_patches))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start in range(0, n_heads, n_together):
        heads = slice(start, start + n_together)
        keys, values = (each[:, heads].transpose(0, 1)[None].float() for each in (k, v))
        for first in range(0, n_patches, _VISION_QUERIES):
            part = slice(first, first + _VISION_QUERIES)
            queries = q[part, heads].transpose(0, 1)[None].float()
            found = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
            out[part, heads] = found[0].transpose(0, 1).to(q.dtype)
    return out


KERNELS = Kernels(
    pack_linear=pack_linear,
    linear=linear,
    pack_norm=pack_norm,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_mul=silu_mul,
    gelu_tanh_mul=gelu_tanh_mul,
    moe=moe,
    rotary=rotary,
    write_kv=write_kv,
    copy_blocks=copy_blocks,
    attention_inputs=attention_inputs,
    attention=attention,
    vision_attention=vision_attention,
)
"""The reference: what every other backend is compared with."""
