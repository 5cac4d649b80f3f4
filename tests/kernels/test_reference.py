"""The reference kernels against their definitions, and against transformers' Llama where it defines
them."""

from __future__ import annotations

from unittest.mock import patch

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from nva.kernels import Device, Kernels, backend, reference
from nva.kernels.cpu.device import PLAIN
from nva.kernels.cuda import GPU
from tests.kernels.cases import (
    AttentionCase,
    MoeCase,
    attention_cases,
    dense_attention,
    dense_moe,
    moe_cases,
)

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def attend(case: AttentionCase) -> Tensor:
    inputs = reference.attention_inputs(case.host, case.on_device, case.k_cache)
    return reference.attention(
        case.q, case.k_cache, case.v_cache, inputs, case.scale, case.window, case.sinks
    )


@settings(max_examples=200)
@given(
    case=attention_cases(),
    group_bytes=st.sampled_from([1, 600, 1 << 20]),
    score_bytes=st.sampled_from([1, 900, 1 << 20]),
)
def test_attention_is_a_dense_softmax_over_what_a_row_owns(
    case: AttentionCase, group_bytes: int, score_bytes: int
) -> None:
    """However rows are grouped and queries sliced, and though all else in the cache is NaN."""
    with patch.multiple(reference, _GROUP_BYTES=group_bytes, _SCORE_BYTES=score_bytes):
        torch.testing.assert_close(
            attend(case).double(), dense_attention(case), atol=1e-5, rtol=1e-5
        )


@settings(max_examples=30)
@given(case=attention_cases(dtype=torch.bfloat16))
def test_attention_in_bfloat16_rounds_only_its_result(case: AttentionCase) -> None:
    expected = dense_attention(case)
    torch.testing.assert_close(attend(case).double(), expected, atol=2**-8, rtol=2**-7)
    assert attend(case).dtype == torch.bfloat16


@given(case=attention_cases())
@settings(max_examples=30)
def test_attention_leaves_queries_and_cache_alone(case: AttentionCase) -> None:
    before = [tensor.clone() for tensor in (case.q, case.k_cache, case.v_cache)]
    attend(case)
    for tensor, copy in zip((case.q, case.k_cache, case.v_cache), before, strict=True):
        torch.testing.assert_close(tensor, copy, equal_nan=True, atol=0, rtol=0)


def test_rows_of_similar_length_share_a_group() -> None:
    n_queries = np.array([1, 1, 0, 1, 4, 1, 1])
    contexts = np.array([500, 9, 7, 480, 50, 60, 100])
    assert reference._similar_rows(n_queries, contexts, 1000) == [[4], [0, 3], [6, 5], [1]]
    assert reference._similar_rows(n_queries, contexts, 1) == [[4], [0], [3], [6], [5], [1]]


@FLOATS
def test_rms_norm_is_llamas(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(48, eps=1e-3).to(dtype)
    x, residual = torch.randn(2, 5, 3, 48).to(dtype)
    torch.nn.init.normal_(norm.weight)
    with torch.no_grad():
        assert torch.equal(reference.rms_norm(x, norm.weight, 1e-3), norm(x))
        normed, total = reference.add_rms_norm(x, residual, norm.weight, 1e-3)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, norm(x + residual))


@FLOATS
def test_rms_norm_with_a_unit_offset_is_gemmas(dtype: torch.dtype) -> None:
    norm = Gemma3RMSNorm(48, eps=1e-3).to(dtype)
    x, residual = torch.randn(2, 5, 3, 48).to(dtype)
    torch.nn.init.normal_(norm.weight)
    with torch.no_grad():
        normed, total = reference.add_rms_norm(x, residual, norm.weight, 1e-3, unit_offset=True)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, norm(x + residual))
        assert torch.equal(normed, reference.rms_norm(total, norm.weight, 1e-3, unit_offset=True))


@FLOATS
def test_rotary_is_llamas(dtype: torch.dtype) -> None:
    q, k = torch.randn(7, 4, 16).to(dtype), torch.randn(7, 2, 16).to(dtype)
    angles = torch.randn(7, 8).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for ours, theirs in zip(
        reference.rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_rotary_of_part_of_a_head_passes_the_rest_through() -> None:
    q, k = torch.randn(7, 4, 16), torch.randn(7, 2, 16)
    angles = torch.randn(7, 3).repeat(1, 2)
    turned, _ = reference.rotary(q, k, angles.cos(), angles.sin())
    alone, _ = reference.rotary(q[..., :6], k[..., :6], angles.cos(), angles.sin())
    assert torch.equal(turned[..., 6:], q[..., 6:])
    assert torch.equal(turned[..., :6], alone)


def test_silu_mul_takes_the_gate_first() -> None:
    gate, up = torch.randn(2, 5, 8)
    torch.testing.assert_close(
        reference.silu_mul(torch.cat([gate, up], -1)), gate * torch.sigmoid(gate) * up
    )


def test_gelu_tanh_mul_takes_the_gate_first() -> None:
    gate, up = torch.randn(2, 5, 8)
    gelu = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(reference.gelu_tanh_mul(torch.cat([gate, up], -1)), gelu * up)


def computed(case: MoeCase) -> Tensor:
    experts = reference.pack_linear(case.gate_up), reference.pack_linear(case.down)
    return reference.moe(
        case.x, case.logits, *experts, case.n_active, case.normalize, case.is_padding
    )


@settings(max_examples=200)
@given(case=moe_cases())
def test_experts_are_a_weighted_sum_over_those_chosen(case: MoeCase) -> None:
    """Some experts get no token, some all of them; padding, which is NaN, changes nothing."""
    real = ~case.is_padding
    torch.testing.assert_close(
        computed(case).double()[real], dense_moe(case)[real], atol=1e-4, rtol=1e-4
    )


@settings(max_examples=30)
@given(case=moe_cases(dtype=torch.bfloat16))
def test_experts_in_bfloat16(case: MoeCase) -> None:
    out, expected, size = (
        x[~case.is_padding]
        for x in (computed(case), dense_moe(case), dense_moe(case, is_size=True))
    )
    assert out.dtype == torch.bfloat16
    assert ((out.double() - expected).abs() <= 2**-6 * size + 2**-8).all()


def test_padding_reaches_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 of 5 tokens are real: 6 rows in two groups, though the last router logits would send
    padding to expert 0."""
    ends, grouped_linear = [], reference.grouped_linear

    def watched(x: Tensor, weights: Tensor, group_ends: Tensor) -> Tensor:
        ends.append(group_ends.tolist())
        return grouped_linear(x, weights, group_ends)

    monkeypatch.setattr(reference, "grouped_linear", watched)
    logits = torch.tensor([[0.0, 5, 9]]).repeat(5, 1)
    x, is_padding = torch.randn(5, 4), torch.tensor([False, False, False, True, True])
    out = reference.moe(x, logits, torch.randn(3, 4, 4), torch.randn(3, 4, 2), 2, True, is_padding)
    assert ends == [[0, 3, 6]] * 2
    assert torch.equal(out[3:], torch.zeros(2, 4))


def test_linear_multiplies_with_packed_rows() -> None:
    x, weight, bias = torch.randn(5, 4), torch.randn(3, 4), torch.randn(3)
    packed = reference.pack_linear(weight)
    torch.testing.assert_close(reference.linear(x, packed), x @ weight.T)
    torch.testing.assert_close(reference.linear(x, packed, bias), x @ weight.T + bias)


@given(slots=st.lists(st.integers(0, 19), unique=True, max_size=20))
def test_write_kv_writes_its_slots_and_no_other(slots: list[int]) -> None:
    k_cache, v_cache = torch.zeros(2, 5, 4, 2, 3)
    k, v = torch.randn(2, len(slots), 2, 3)
    reference.write_kv(k, v, k_cache, v_cache, torch.tensor(slots, dtype=torch.int32))
    for cache, written in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache.view(20, 2, 3)[slots], written)
        assert cache.count_nonzero() == written.count_nonzero()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), unique_by=lambda copy: copy[1]))
def test_copy_blocks_reads_all_before_it_writes_any(copies: list[tuple[int, int]]) -> None:
    k_cache, v_cache = torch.randn(2, 6, 4, 2, 3)
    expected = k_cache.clone(), v_cache.clone()
    for source, target in copies:
        expected[0][target], expected[1][target] = k_cache[source], v_cache[source]
    reference.copy_blocks(k_cache, v_cache, torch.tensor(copies, dtype=torch.int32).view(-1, 2))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'meta'; give cpu, cuda, npu, cuda:1"):
        backend("meta")


def test_a_backend_that_lacks_a_function_fails_at_once() -> None:
    functions = attrs.asdict(reference.KERNELS, recurse=False)
    for name in set(functions) - {"is_approximate"}:
        others = {other: function for other, function in functions.items() if other != name}
        with pytest.raises(TypeError, match=name):
            Kernels(**others)
    with pytest.raises(TypeError, match="rotray"):
        attrs.evolve(reference.KERNELS, rotray=reference.rotary)


@pytest.mark.parametrize("device", [PLAIN, GPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize("dtype", PLAIN.dtypes, ids=str)
def test_a_cache_takes_the_bytes_that_it_is_said_to(device: Device, dtype: torch.dtype) -> None:
    shape = 3, 5, 2, 8
    cache = device.empty_cache(shape, dtype, torch.device("cpu"))
    assert (cache.shape, cache.dtype) == (shape, dtype)
    assert cache.nbytes == device.cache_bytes(shape, dtype)
    assert not cache.any()
