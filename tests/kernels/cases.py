"""What any backend is compared on: attention and experts over drawn batches, and both written out
one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from nva.kernels import Layout


@attrs.frozen(kw_only=True, eq=False)
class AttentionCase:
    """Rows over a cache that holds NaN wherever no row owns a token."""

    q: Tensor  # [T, Nq, D]
    k_cache: Tensor  # [n_ids, block_size, Nk, D]
    v_cache: Tensor
    host: Layout
    keys: list[Tensor]  # of each row, [context_len, Nk, D]
    values: list[Tensor]
    window: int | None
    sinks: Tensor | None
    scale: float

    @property
    def on_device(self) -> Layout:
        arrays = attrs.asdict(self.host)
        return Layout(**{name: torch.from_numpy(array) for name, array in arrays.items()})


@st.composite
def attention_cases(
    draw: Any,
    dtype: torch.dtype = torch.float32,
    head_dims: Sequence[int] = (2, 6, 8),
    longest: int = 20,
) -> AttentionCase:
    """Any mix of decode rows, chunks, whole prefills and rows without queries, over shuffled
    blocks, some of which rows share with the first one."""
    lengths = draw(st.lists(st.integers(1, longest).flatmap(_row), min_size=1, max_size=6))
    if not any(n for _, n in lengths):
        lengths.append((3, 2))
    block_size, n_kv_heads, n_shared = (
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    head_dim = draw(st.sampled_from(head_dims))
    window = draw(st.none() | st.integers(1, longest + 2))
    seed, has_sinks = draw(st.integers(0, 2**31)), draw(st.booleans())
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    contexts, queries = (np.array(column, np.int32) for column in zip(*lengths, strict=True))
    n_blocks = -(-contexts // block_size)
    ids = rng.permutation(int(n_blocks.sum()) + 2)
    tables = rng.choice(ids, (len(lengths), int(n_blocks.max()) + 1)).astype(np.int32)
    caches = [
        torch.full((len(ids), block_size, n_kv_heads, head_dim), torch.nan, dtype=dtype)
        for _ in range(2)
    ]
    held: tuple[list[Tensor], list[Tensor]] = ([], [])
    for row, (context, owned) in enumerate(
        zip(contexts, np.split(ids, np.cumsum(n_blocks))[:-1], strict=True)
    ):
        n_common = min(contexts[[0, row]]) // block_size if row and draw(st.booleans()) else 0
        tables[row, : len(owned)] = owned
        tables[row, :n_common] = tables[0, :n_common]
        slots = (tables[row, : len(owned), None] * block_size + np.arange(block_size)).ravel()[
            :context
        ]
        own = slots[n_common * block_size :]
        for cache, tensors in zip(caches, held, strict=True):
            flat = cache.view(-1, n_kv_heads, head_dim)
            flat[own] = normal(len(own), n_kv_heads, head_dim)
            tensors.append(flat[slots])
    return AttentionCase(
        q=normal(int(queries.sum()), n_kv_heads * n_shared, head_dim),
        k_cache=caches[0],
        v_cache=caches[1],
        host=Layout(
            block_tables=tables,
            query_ends=np.cumsum(queries, dtype=np.int32),
            context_lens=contexts,
        ),
        keys=held[0],
        values=held[1],
        window=window,
        sinks=normal(n_kv_heads * n_shared) if has_sinks else None,
        scale=draw(st.sampled_from([0.3, 1.0])),
    )


def _row(context_len: int) -> st.SearchStrategy[tuple[int, int]]:
    """(context_len, number of queries): none, one, some or all of the context."""
    return st.tuples(
        st.just(context_len),
        st.sampled_from([0, 1, 1, 1, context_len]) | st.integers(1, context_len),
    )


def dense_attention(case: AttentionCase) -> Tensor:
    """What attention means, in float64, one query of one head at a time."""
    out = torch.empty(case.q.shape, dtype=torch.float64)
    n_shared = case.q.shape[1] // case.k_cache.shape[2]
    starts = np.concatenate([[0], case.host.query_ends[:-1]])
    for row, (start, end) in enumerate(zip(starts, case.host.query_ends, strict=True)):
        for i in range(start, end):
            position = case.host.context_lens[row] - end + i
            first = 0 if case.window is None else max(0, position - case.window + 1)
            for head in range(case.q.shape[1]):
                k = case.keys[row][first : position + 1, head // n_shared].double()
                v = case.values[row][first : position + 1, head // n_shared].double()
                scores = k @ case.q[i, head].double() * case.scale
                sink = torch.zeros(0) if case.sinks is None else case.sinks[head : head + 1]
                weights = torch.cat([scores, sink.double()]).softmax(0)[: len(scores)]
                out[i, head] = weights @ v
    return out


@attrs.frozen(kw_only=True, eq=False)
class MoeCase:
    """Tokens and experts. What is padding is NaN."""

    x: Tensor  # [T, H]
    logits: Tensor  # [T, E]
    gate_up: Tensor  # [E, 2J, H]
    down: Tensor  # [E, H, J]
    n_active: int
    normalize: bool
    is_padding: Tensor  # [T] bool


@st.composite
def moe_cases(
    draw: Any,
    dtype: torch.dtype = torch.float32,
    most_experts: int = 9,
    largest: int = 6,
    most_tokens: int = 20,
) -> MoeCase:
    """Any number of tokens and experts, every routing; some experts drawn more often, by up to all
    tokens."""
    n_tokens, n_experts = draw(st.integers(1, most_tokens)), draw(st.integers(1, most_experts))
    hidden, inner = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    n_active, n_padding = draw(st.integers(1, n_experts)), draw(st.integers(0, n_tokens))
    popularity = draw(
        st.lists(st.sampled_from([-20.0, 0.0, 20.0]), min_size=n_experts, max_size=n_experts)
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    # Half a unit apart in any order, as of equally likely experts any may be chosen.
    x, order = normal(n_tokens, hidden), normal(n_tokens, n_experts).argsort(-1)
    logits = order.to(dtype) / 2 + torch.tensor(popularity, dtype=dtype)
    is_padding = torch.arange(n_tokens) >= n_tokens - n_padding
    x[is_padding], logits[is_padding] = torch.nan, torch.nan
    return MoeCase(
        x=x,
        logits=logits,
        gate_up=normal(n_experts, 2 * inner, hidden) / hidden**0.5,
        down=normal(n_experts, hidden, inner) / inner**0.5,
        n_active=n_active,
        normalize=draw(st.booleans()),
        is_padding=is_padding,
    )


def dense_moe(case: MoeCase, is_size: bool = False) -> Tensor:
    """What experts mean, in float64: every expert computes every token, and those not chosen weigh
    nothing. Or the size of what is added up, by which rounding errors are measured."""
    x, gate_up, down = case.x.double(), case.gate_up.double(), case.down.double()
    probabilities = case.logits.double().softmax(-1)
    is_chosen = probabilities.argsort(-1, descending=True).argsort(-1) < case.n_active
    weights = torch.where(is_chosen, probabilities, 0)
    if case.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,ejh->tej", x, gate_up).chunk(2, -1)
    inner = gate * torch.sigmoid(gate) * up
    inner, down = (inner.abs(), down.abs()) if is_size else (inner, down)
    outputs = torch.einsum("tej,ehj->teh", inner, down)
    return (outputs * weights[..., None]).sum(1)
