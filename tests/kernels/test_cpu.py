"""The compiled kernels against the reference, over shapes that no vector or tile divides."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nva.kernels import Layout, backend, reference
from nva.kernels.cpu import operators
from tests.kernels.cases import AttentionCase, attention_cases, dense_attention

pytestmark = pytest.mark.usefixtures("n_threads")
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 2**-7, "rtol": 2**-6},
}
GATES = pytest.mark.parametrize("gate", ["silu_mul", "gelu_tanh_mul"])
SIZES = st.integers(1, 150)
SEEDS = st.integers(0, 2**31)


def normal(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attend(case: AttentionCase, kernels: Any = operators) -> Tensor:
    inputs = kernels.attention_inputs(case.host, case.on_device, case.k_cache)
    return kernels.attention(
        case.q, *written(case, kernels), inputs, case.scale, case.window, case.sinks
    )


def written(case: AttentionCase, kernels: Any) -> list[Tensor]:
    """The case's caches as a backend lays them out."""
    caches = [torch.full_like(case.k_cache, torch.nan) for _ in range(2)]
    slots = torch.randperm(case.k_cache[..., 0, 0].numel(), dtype=torch.int32)
    k, v = (cache.flatten(0, 1)[slots] for cache in (case.k_cache, case.v_cache))
    kernels.write_kv(k, v, *caches, slots)
    return caches


def test_the_compiled_kernels_serve_the_cpu() -> None:
    assert backend("cpu") is operators.COMPILED


@settings(max_examples=100, deadline=None)
@given(case=attention_cases(head_dims=(1, 2, 7, 16, 34, 64, 128)))
def test_attention_is_a_dense_softmax_over_what_a_row_owns(case: AttentionCase) -> None:
    """Though all else in the cache is NaN."""
    torch.testing.assert_close(
        attend(case).double(), dense_attention(case), **TOLERANCE[torch.float32]
    )


@settings(max_examples=40, deadline=None)
@given(case=attention_cases(dtype=torch.bfloat16, head_dims=(1, 2, 7, 34, 64, 128)))
def test_attention_in_bfloat16(case: AttentionCase) -> None:
    found = attend(case)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), dense_attention(case), **TOLERANCE[torch.bfloat16])


@FLOATS
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_attention_over_many_parts_and_tiles(dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(attention_cases(dtype=dtype, head_dims=(8, 32), longest=600))
    expected = attend(case, reference)
    torch.testing.assert_close(attend(case), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("n_shared", [1, 3, 7, 8, 9, 17])
@pytest.mark.parametrize("n_queries", [1, 40])
def test_any_number_of_heads_may_share_a_key(n_shared: int, n_queries: int) -> None:
    case = long_row(n_queries, n_shared)
    torch.testing.assert_close(attend(case), attend(case, reference), **TOLERANCE[torch.float32])


@FLOATS
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    assert_same_bits_alone(data.draw(attention_cases(dtype=dtype, head_dims=(8, 32), longest=600)))


@FLOATS
@pytest.mark.parametrize("n_common", [0, 40, 512, 600])
def test_rows_that_share_blocks_have_the_bits_that_they_have_alone(
    dtype: torch.dtype, n_common: int
) -> None:
    """More of them than are ever read together, every other one over its own first block; ends
    differ."""
    n_rows, block_size = 40, 8
    tables = np.arange(n_rows * 75, dtype=np.int32).reshape(n_rows, 75)
    tables[::2, : n_common // block_size] = tables[0, : n_common // block_size]
    tables[1::2, 1 : n_common // block_size] = tables[1, 1 : n_common // block_size]
    cache = normal(0, dtype, 2, tables.size, block_size, 2, 48)
    queries, lengths = 1 + np.arange(n_rows) % 3, 600 - 4 * (np.arange(n_rows) % 5)
    ends = np.cumsum(queries)
    host = Layout(
        block_tables=tables, query_ends=ends.astype(np.int32), context_lens=lengths.astype(np.int32)
    )
    case = attrs.evolve(long_row(1), k_cache=cache[0], v_cache=cache[1], host=host)
    assert_same_bits_alone(attrs.evolve(case, q=normal(1, dtype, int(ends[-1]), 6, 48)))


def assert_same_bits_alone(case: AttentionCase) -> None:
    together, start = attend(case), 0
    for row, end in enumerate(case.host.query_ends.tolist()):
        host = Layout(
            block_tables=case.host.block_tables[row : row + 1],
            query_ends=np.array([end - start], np.int32),
            context_lens=case.host.context_lens[row : row + 1],
        )
        alone = attrs.evolve(case, q=case.q[start:end], host=host)
        assert torch.equal(attend(alone), together[start:end])
        start = end


def long_row(n_queries: int, n_shared: int = 2) -> AttentionCase:

    tables = np.random.default_rng(0).permutation(50)[None, :44].astype(np.int32)
    cache = normal(0, torch.float32, 2, 50, 16, 2, 24)
    ends, lengths = np.array([n_queries], np.int32), np.array([700], np.int32)
    return AttentionCase(
        q=normal(1, torch.float32, n_queries, 2 * n_shared, 24),
        k_cache=cache[0],
        v_cache=cache[1],
        host=Layout(block_tables=tables, query_ends=ends, context_lens=lengths),
        keys=[],
        values=[],
        window=None,
        sinks=None,
        scale=0.3,
    )


@FLOATS
@settings(max_examples=60, deadline=None)
@given(m=st.integers(0, 40), n=SIZES, k=SIZES, has_bias=st.booleans(), seed=SEEDS)
def test_linear_is_the_references(
    dtype: torch.dtype, m: int, n: int, k: int, has_bias: bool, seed: int
) -> None:
    x, weight = normal(seed, dtype, m, k), normal(seed + 1, dtype, n, k) / k**0.5
    bias = normal(seed + 2, dtype, n) if has_bias else None
    found = operators.linear(x, operators.pack_linear(weight), bias)
    torch.testing.assert_close(found, reference.linear(x, weight, bias), **TOLERANCE[dtype])


@FLOATS
def test_a_row_of_linear_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    x, weight = normal(0, dtype, 300, 130), operators.pack_linear(normal(1, dtype, 70, 130))
    whole = operators.linear(x, weight)
    for n in (1, 2, 5, 7, 13, 16, 31, 100):
        assert torch.equal(operators.linear(x[:n], weight), whole[:n])


@FLOATS
@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 300), size=SIZES, unit=st.booleans(), seed=SEEDS)
def test_norms_are_the_references(
    dtype: torch.dtype, n: int, size: int, unit: bool, seed: int
) -> None:
    x, residual, weight = (
        normal(seed, dtype, n, size),
        normal(seed + 1, dtype, n, size),
        normal(seed + 2, dtype, size),
    )
    for found, expected in zip(
        (
            operators.rms_norm(x, weight, 1e-5, unit),
            *operators.add_rms_norm(x, residual, weight, 1e-5, unit),
        ),
        (
            reference.rms_norm(x, weight, 1e-5, unit),
            *reference.add_rms_norm(x, residual, weight, 1e-5, unit),
        ),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@GATES
@FLOATS
@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 300), size=SIZES, seed=SEEDS)
def test_gates_are_the_references(
    gate: str, dtype: torch.dtype, n: int, size: int, seed: int
) -> None:
    x = normal(seed, dtype, n, 2 * size) * 3
    torch.testing.assert_close(
        getattr(operators, gate)(x), getattr(reference, gate)(x), **TOLERANCE[dtype]
    )


@GATES
@FLOATS
def test_gates_of_extremes(gate: str, dtype: torch.dtype) -> None:
    gates = [
        -torch.inf,
        -3e38,
        -1e30,
        -1e13,
        -200.0,
        -100.0,
        -0.0,
        1e-30,
        100.0,
        1e13,
        1e30,
        3e38,
        torch.inf,
    ]
    x = torch.tensor([gates + [1.0] * len(gates)], dtype=dtype)
    found, expected = getattr(operators, gate)(x), getattr(reference, gate)(x)
    torch.testing.assert_close(found, expected, atol=1e-30, rtol=1e-5, equal_nan=True)


@FLOATS
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 60),
    heads=st.integers(1, 5),
    half=st.integers(1, 40),
    rest=st.integers(0, 9),
    seed=SEEDS,
)
def test_parts_of_one_tensor_are_normed_rotated_and_written(
    dtype: torch.dtype, n: int, heads: int, half: int, rest: int, seed: int
) -> None:
    """As the decoder does with the q, k and v that one product gave."""
    size = 2 * half + rest
    q, k, v = normal(seed, dtype, n, heads + 4, size).split((heads, 2, 2), dim=1)
    weight, slots = normal(seed + 1, dtype, size), torch.randperm(n + 7, dtype=torch.int32)[:n]
    angles = normal(seed + 2, torch.float32, n, half).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    tolerance = (
        {"atol": 2**-4, "rtol": 2**-6} if dtype == torch.bfloat16 else TOLERANCE[dtype]
    )  # theirs rounds thrice
    results = []
    for kernels in (operators, reference):
        caches = torch.zeros(2, n + 7, 1, 2, size, dtype=dtype)
        turned = kernels.rotary(kernels.rms_norm(q, weight, 1e-5), k, cos, sin)
        kernels.write_kv(turned[1], v, *caches, slots)
        results.append((*turned, caches, kernels.rotary(q, k, cos, sin)[0]))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **tolerance)


def test_not_a_number_stays_one() -> None:
    """An overflow must reach the logits, where the sampler finds it."""
    x = torch.full((3, 40), torch.nan)
    weight = torch.ones(40)
    assert operators.rms_norm(x, weight, 1e-5).isnan().all()
    for gate in (operators.silu_mul, operators.gelu_tanh_mul):
        assert gate(x).isnan().all()
        assert gate(x.bfloat16()).isnan().all()
    assert operators.linear(x, operators.pack_linear(torch.ones(5, 40))).isnan().all()
    for n_queries in (1, 40):
        case = long_row(n_queries)
        case.q[:] = torch.nan
        assert attend(case).isnan().all()


def test_float16_goes_to_the_reference() -> None:
    x, weight = normal(0, torch.float16, 3, 8), normal(1, torch.float16, 4, 8)
    assert torch.equal(
        operators.linear(x, operators.pack_linear(weight)), reference.linear(x, weight)
    )
    assert torch.equal(operators.silu_mul(x), reference.silu_mul(x))
