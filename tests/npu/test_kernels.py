"""Every function of the contract, on the NPU's operators and in the reference, over random
shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nva.kernels import Layout, reference
from nva.kernels.npu import operators
from tests.kernels.cases import MoeCase, moe_cases
from tests.npu import emulation, here
from tests.npu.test_meaning import Altered

BLOCK = here.EAGER.block_size
few = settings(max_examples=30, deadline=None)
sizes = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@few
@given(seeds, sizes, sizes, st.sampled_from([8, 48]))
def test_norms(seed, n_tokens, n_heads, size):
    x, residual, weight = (
        normal(seed, n_tokens, n_heads, size),
        normal(seed + 1, n_tokens, n_heads, size),
        normal(2, size),
    )
    for unit_offset in (False, True):
        packed = operators.pack_norm(weight, unit_offset)
        same(
            [operators.rms_norm(x, packed, 1e-5, unit_offset)],
            [reference.rms_norm(x, weight, 1e-5, unit_offset)],
        )
        same(
            operators.add_rms_norm(x, residual, packed, 1e-5, unit_offset),
            reference.add_rms_norm(x, residual, weight, 1e-5, unit_offset),
        )


@few
@given(seeds, sizes, sizes, sizes, st.sampled_from([(32, 32), (32, 16), (48, 20)]))
def test_rotary(seed, n_tokens, n_heads, n_kv_heads, dims):
    """Of heads that are a part of a wider product, as the decoder's are, and that turn in part."""
    head_dim, n_rotated = dims
    heads = normal(seed, n_tokens, n_heads + n_kv_heads, head_dim)
    q, k = heads.split((n_heads, n_kv_heads), dim=1)
    cos, sin = normal(seed + 1, n_tokens, n_rotated), normal(seed + 2, n_tokens, n_rotated)
    same(operators.rotary(q, k, cos, sin), reference.rotary(q, k, cos, sin))


@few
@given(seeds, sizes, sizes, sizes)
def test_linear_and_gate(seed, n_tokens, n_in, n_out):
    x, weight, bias = (
        normal(seed, n_tokens, n_in),
        normal(seed + 1, n_out, n_in),
        normal(seed + 2, n_out),
    )
    packed = operators.pack_linear(weight)
    same([operators.linear(x, packed)], [reference.linear(x, weight)])
    same([operators.linear(x, packed, bias)], [reference.linear(x, weight, bias)])
    gates = normal(seed, n_tokens, 2 * n_in)
    same([operators.silu_mul(gates)], [reference.silu_mul(gates)])
    same([operators.gelu_tanh_mul(gates)], [reference.gelu_tanh_mul(gates)])


def experts_out(kernels, case):
    """What is left of a step when padding, whose result is arbitrary, is taken out."""
    weights = kernels.pack_linear(case.gate_up), kernels.pack_linear(case.down)
    out = kernels.moe(case.x, case.logits, *weights, case.n_active, case.normalize, case.is_padding)
    return out[~case.is_padding]


@settings(max_examples=100, deadline=None)
@given(case=moe_cases())
def test_experts(case):
    """Experts without a token, experts with all of them, and padding that is NaN, as are rows
    beyond the groups."""
    out, expected = experts_out(operators, case), experts_out(reference, case)
    assert expected.isfinite().all()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def sent_to(experts):
    """A step of 12 tokens, the last 5 of them padding, each sent to the expert of its place in the
    list."""
    logits = torch.full((12, 4), -9.0)
    logits[torch.arange(12), experts] = 9.0
    return MoeCase(
        x=normal(1, 12, 6), logits=logits, gate_up=normal(2, 4, 10, 6), down=normal(3, 4, 6, 5), n_active=1,
        normalize=False, is_padding=torch.arange(12) >= 7,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("experts", "expected"),
    [([0, 1, 2, 3] * 3, [2, 2, 2, 1]), ([2] * 12, [0, 0, 7, 0]), ([0, 3] * 6, [4, 0, 0, 3])],
    ids=["all experts", "one", "two"],
)
def test_padding_reaches_no_expert(experts, expected, monkeypatch):
    """Neither an expert that has all tokens nor one that has none counts the 5 that are padding."""
    counts = []

    def watch(args, options):
        counts.append(options["group_list"].tolist())
        return args, options

    monkeypatch.setattr(operators, "npu", Altered("npu_grouped_matmul", watch))
    case = sent_to(experts)
    same([experts_out(operators, case)], [experts_out(reference, case)])
    assert counts == [expected] * 2


@few
@given(seeds, sizes, st.integers(1, 3), st.integers(0, 3))
def test_writes_and_copies(seed, n_tokens, n_heads, n_copies):
    random = np.random.default_rng(seed)
    slots = torch.tensor(random.choice(6 * BLOCK, n_tokens, replace=False), dtype=torch.int32)
    blocks = random.permutation(6)[: 2 * n_copies]
    copies = torch.tensor(blocks.reshape(-1, 2), dtype=torch.int32)
    k, v = normal(seed, n_tokens, n_heads, 16), normal(seed + 1, n_tokens, n_heads, 16)
    caches = [[torch.zeros(6, BLOCK, n_heads, 16) for _ in range(2)] for _ in range(2)]
    for kernels, cache in zip((operators, reference), caches, strict=True):
        kernels.write_kv(k, v, *cache, slots)
        kernels.copy_blocks(*cache, copies)
    same(*caches)


@st.composite
def rows(draw):
    """(queries, context) of each row: decode rows, chunks, whole prompts, and rows of no queries at
    the end."""
    contexts = draw(st.lists(st.integers(1, 300), min_size=1, max_size=5))
    found = [
        (draw(st.sampled_from(sorted({1, min(7, context), context}))), context)
        for context in contexts
    ]
    return found + [(0, 1)] * draw(st.integers(0, 2))


@few
@given(
    rows=rows(),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (8, 1)]),
    window=st.none() | st.integers(1, 400),
    has_sinks=st.booleans(),
    seed=seeds,
)
def test_attention(rows, heads, window, has_sinks, seed):
    """Whatever a row doesn't own is NaN in the cache, and never comes out."""
    (n_heads, n_kv_heads), head_dim, n_blocks = heads, 32, 3
    counts, contexts = np.array(rows).T
    tables = (
        np.random.default_rng(seed)
        .permutation(len(rows) * n_blocks)
        .astype(np.int32)
        .reshape(-1, n_blocks)
    )
    caches = [normal(seed + i, tables.size, BLOCK, n_kv_heads, head_dim) for i in range(2)]
    owned = torch.zeros(tables.size, BLOCK, dtype=torch.bool)
    for table, context in zip(tables, contexts, strict=True):
        position = np.arange(context)
        owned[table[position // BLOCK], position % BLOCK] = True
    for cache in caches:
        cache[~owned] = torch.nan
    host = Layout(
        block_tables=tables,
        query_ends=counts.cumsum().astype(np.int32),
        context_lens=contexts.astype(np.int32),
    )
    on_device = Layout(
        **{
            name: torch.tensor(getattr(host, name))
            for name in ("block_tables", "query_ends", "context_lens")
        }
    )
    q = normal(seed + 2, counts.sum(), n_heads, head_dim)
    sinks = normal(seed + 3, n_heads) if has_sinks else None
    with emulation.fp32_arithmetic():
        out, expected = (
            kernels.attention(
                q, *caches, kernels.attention_inputs(host, on_device, caches[0]), 0.2, window, sinks
            )
            for kernels in (operators, reference)
        )
    assert expected.isfinite().all()
    same([out], [expected])
