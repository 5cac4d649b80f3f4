"""The emulated operators compute what plain torch computes, and refuse whatever their documentation
refuses."""

from __future__ import annotations

import pytest
import torch

from tests.npu import emulated_attention as attention
from tests.npu import emulation
from tests.npu.emulation import LimitError

npu = torch.ops.npu
N_Q, N_KV, D, BLOCK, N_BLOCKS = 4, 2, 32, 128, 6
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def attention_call(dtype=torch.bfloat16, **changes):
    """A valid call over three rows: a chunk of 3 tokens, a decode token, and a padding row of
    none."""
    torch.manual_seed(0)
    call = {
        "query": torch.randn(4, N_Q, D).to(dtype),
        "key": torch.randn(N_BLOCKS, BLOCK, N_KV * D).to(dtype),
        "value": torch.randn(N_BLOCKS, BLOCK, N_KV * D).to(dtype),
        "num_query_heads": N_Q,
        "num_key_value_heads": N_KV,
        "softmax_scale": D**-0.5,
        "input_layout": "TND",
        "sparse_mode": 3,
        "atten_mask": MASK,
        "block_size": BLOCK,
        "block_table": torch.tensor([[4, 2], [5, 0], [0, 0]], dtype=torch.int32),
        "actual_seq_qlen": [3, 4, 4],
        "actual_seq_kvlen": [200, 7, 1],
    }
    call.update(changes)
    return call


def attend(call):
    call = dict(call)
    return npu.npu_fused_infer_attention_score_v2(
        call.pop("query"), call.pop("key"), call.pop("value"), **call
    )


def dense(call, first, last):
    """The first two rows by torch's own attention, key j visible to position p where first <= p - j
    <= last."""
    outs = []
    for (start, end), length, blocks in zip(
        ((0, 3), (3, 4)), (200, 7), call["block_table"], strict=False
    ):
        k, v = (
            call[x][blocks.long()].reshape(-1, N_KV, D)[:length].transpose(0, 1)
            for x in ("key", "value")
        )
        gap = torch.arange(length - end + start, length)[:, None] - torch.arange(length)
        visible = (gap >= first) & (gap <= last)
        q = call["query"][start:end].transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, enable_gqa=True
        )
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({}, 0, 1000),
        ({"sparse_mode": 0, "atten_mask": None}, -1000, 1000),
        ({"sparse_mode": 4, "pre_tokens": 9, "next_tokens": 0}, 0, 9),
    ],
    ids=["causal", "no mask", "a window of 10"],
)
def test_attention_is_torchs(changes, first, last):
    call = attention_call(torch.float32, **changes)
    with emulation.fp32_arithmetic():
        out, lse = attend(call)
    torch.testing.assert_close(out, dense(call, first, last), rtol=1e-5, atol=1e-5)
    assert lse.shape == (0,)


def test_a_sink_only_takes_weight():
    call = attention_call(torch.float32)
    with emulation.fp32_arithmetic():
        plain = attend(call)[0]
        none = attend(attention_call(torch.float32, learnable_sink=torch.full((N_Q,), -1e9)))[0]
        all_weight = attend(attention_call(torch.float32, learnable_sink=torch.full((N_Q,), 1e9)))[
            0
        ]
    torch.testing.assert_close(none, plain)
    assert not all_weight.any()


WIDE = torch.zeros(4, N_Q, D * 2, dtype=torch.bfloat16)
ATTENTION_FAULTS = {
    "a layout": ({"input_layout": "BSH"}, "TND"),
    "float32": ({"query": torch.zeros(4, N_Q, D)}, "float16 or bfloat16"),
    "a strided query": ({"query": WIDE[..., ::2]}, "contiguous"),
    "strided keys": ({"key": torch.zeros(N_BLOCKS, BLOCK, N_KV * D * 2, dtype=torch.bfloat16)[..., ::2]}, "contiguous"),
    "query heads": ({"num_query_heads": 2}, "num_query_heads"),
    "KV heads left out": ({"num_key_value_heads": 0}, "num_key_value_heads"),
    "KV heads": ({"num_key_value_heads": 3}, "heads is whole"),
    "head size": ({"query": torch.zeros(4, N_Q, 24, dtype=torch.bfloat16)}, "head size"),
    "a query that isn't [T, N, D]": ({"query": torch.zeros(4, N_Q * D, dtype=torch.bfloat16)}, "3 dimensions"),
    "query lengths per row": ({"actual_seq_qlen": [3, 1, 0]}, "running sum"),
    "last query length": ({"actual_seq_qlen": [3, 3, 3]}, "number of tokens"),
    "query lengths left out": ({"actual_seq_qlen": None}, "rows"),
    "KV lengths left out": ({"actual_seq_kvlen": None}, "KV lengths for"),
    "cumulative KV lengths": ({"actual_seq_kvlen": [200, 207, 408]}, "don't fit a table"),
    "negative KV lengths": ({"actual_seq_kvlen": [200, -1, 1]}, "negative"),
    "query beyond the context": ({"actual_seq_kvlen": [2, 7, 1]}, "sparse mode 3 wants"),
    "a narrow table": ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, "don't fit"),
    "a short table": ({"block_table": torch.zeros(2, 2, dtype=torch.int32)}, "2 rows for 3"),
    "an int64 table": ({"block_table": torch.zeros(3, 2, dtype=torch.int64)}, "int32"),
    "a strided table": ({"block_table": torch.zeros(3, 4, dtype=torch.int32)[:, ::2]}, "contiguous"),
    "a flat table": ({"block_table": torch.zeros(3, dtype=torch.int32)}, "2 dimensions"),
    "no table": ({"block_table": None}, "no mask without a block table"),
    "a block that isn't there": ({"block_table": torch.full((3, 2), N_BLOCKS, dtype=torch.int32)}, "block ids"),
    "block size": ({"block_size": 64}, "is the cache's"),
    "blocks of 16": (
        {"block_size": 16, "key": torch.zeros(48, 16, N_KV * D, dtype=torch.bfloat16),
         "value": torch.zeros(48, 16, N_KV * D, dtype=torch.bfloat16)},
        "128, 256, 384 or 512",
    ),
    "a cache of 4 dimensions": ({"key": torch.zeros(N_BLOCKS, BLOCK, N_KV, D, dtype=torch.bfloat16)}, "caches"),
    "types": ({"key": torch.zeros(N_BLOCKS, BLOCK, N_KV * D, dtype=torch.float16)}, "query's type"),
    "shapes of K and V": ({"value": torch.zeros(7, BLOCK, N_KV * D, dtype=torch.bfloat16)}, "one shape"),
    "a wide cache": ({"key": torch.zeros(N_BLOCKS, BLOCK, D, dtype=torch.bfloat16)}, "heads of the head size"),
    "sparse mode": ({"sparse_mode": 2}, "sparse modes"),
    "no mask": ({"atten_mask": None}, "takes a mask"),
    "a mask in mode 0": ({"sparse_mode": 0}, "takes a mask"),
    "a mask of the batch's size": ({"atten_mask": MASK[:512, :512].contiguous()}, "2048 x 2048"),
    "a float mask": ({"atten_mask": MASK.float()}, "bool"),
    "a strided mask": ({"atten_mask": MASK.T.contiguous().T}, "contiguous"),
    "a mask off by one": ({"atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(0)}, "above the diagonal"),
    "an inverted mask": ({"atten_mask": ~MASK}, "above the diagonal"),
    "an empty band": ({"sparse_mode": 4, "pre_tokens": 1, "next_tokens": -2}, "negative"),
    "float32 sinks": ({"learnable_sink": torch.zeros(N_Q)}, "bfloat16"),
    "sinks of the KV heads": ({"learnable_sink": torch.zeros(N_KV, dtype=torch.bfloat16)}, "per query head"),
    "something not modelled": ({"return_softmax_lse": True}, "return_softmax_lse"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), ATTENTION_FAULTS.values(), ids=ATTENTION_FAULTS)
def test_attention_refuses(changes, text):
    attend(attention_call())
    with pytest.raises(LimitError, match=text):
        attend(attention_call(**changes))


def test_sizes_that_attention_refuses():
    """Sizes too large to allocate, by the checks alone."""
    query = torch.zeros(1, 1, dtype=torch.bfloat16).expand(4, 1).view(4, 1, 1)
    big = torch.empty(2**24, 128, 1024, dtype=torch.bfloat16, device="meta")
    for text, check in {
        "1M tokens": lambda: attention.check_query(torch.empty(2**20 + 1, 1, 16, dtype=torch.float16), 1, 1, [1]),
        "4096 rows": lambda: attention.check_query(torch.empty(4, 1, 16, dtype=torch.float16), 1, 1, [4] * 4097),
        "256 heads": lambda: attention.check_query(torch.empty(4, 512, 16, dtype=torch.float16), 512, 512, [4]),
        "<= 64": lambda: attention.check_query(torch.empty(4, 128, 16, dtype=torch.float16), 128, 1, [4]),
        "up to 256": lambda: attention.check_query(torch.empty(4, 1, 512, dtype=torch.float16), 1, 1, [4]),
        "2\\^31": lambda: attention.check_cache(query.expand(4, 1, 1024), big, big, 1, 128),
        "65535": lambda: attention.check_cache(query.expand(4, 1, 65536), *[torch.empty(
            1, 128, 65536, dtype=torch.bfloat16, device="meta")] * 2, 1, 128),
        "at most 128": lambda: attention.check_sink(
            torch.zeros(1, dtype=torch.bfloat16), torch.empty(4, 1, 192, dtype=torch.bfloat16)),
    }.items():  # fmt: skip
        with pytest.raises(LimitError, match=text):
            check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype):
    x, residual, weight = (
        torch.randn(5, 3, 64).to(dtype),
        torch.randn(5, 3, 64).to(dtype),
        torch.randn(64).to(dtype),
    )
    expected = torch.nn.functional.rms_norm(x.float(), (64,), weight.float(), 1e-5).to(dtype)
    torch.testing.assert_close(npu.npu_rms_norm(x, weight, 1e-5)[0], expected)
    y, _, total = npu.npu_add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, npu.npu_rms_norm(total, weight, 1e-5)[0])


def test_rotary():
    """Half mode turns the pair (i, i + D/2), interleave the pair (2i, 2i + 1)."""
    x, angle = torch.randn(1, 7, 3, 8), torch.randn(1, 7, 1, 4)
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.polar(
        torch.ones_like(angle), angle
    )
    torch.testing.assert_close(
        npu.npu_rotary_mul(x, cos, sin), torch.cat([turned.real, turned.imag], -1)
    )
    cos, sin = (f(angle[:, :1]).repeat_interleave(2, -1) for f in (torch.cos, torch.sin))
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(
        torch.ones(4), angle[:, :1]
    )
    out = npu.npu_rotary_mul(x.transpose(1, 2), cos, sin, "interleave").transpose(1, 2)
    torch.testing.assert_close(out, torch.view_as_real(turned).flatten(-2))


def test_swiglu():
    x = torch.randn(5, 16)
    torch.testing.assert_close(npu.npu_swiglu(x), torch.nn.functional.silu(x[:, :8]) * x[:, 8:])


@pytest.mark.parametrize("cache_mode", ["Norm", "PA_NZ"])
def test_scatter_pa_kv_cache(cache_mode):
    k, v, slots = torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.tensor([5, 0, 2])
    k_cache, v_cache = torch.zeros(2, 4, 2, 16), torch.zeros(2, 4, 2, 16)
    k_nz, v_nz = (
        (torch.zeros(2, 4, 4, 8), torch.zeros(2, 4, 4, 8))
        if cache_mode == "PA_NZ"
        else (k_cache, v_cache)
    )
    npu.npu_scatter_pa_kv_cache(k, v, k_nz, v_nz, slots, cache_mode=cache_mode)
    k_cache.view(-1, 2, 16)[slots], v_cache.view(-1, 2, 16)[slots] = k, v
    for nz, cache in ((k_nz, k_cache), (v_nz, v_cache)):
        by_slot = nz.transpose(1, 2).reshape(2, 4, 2, 16) if cache_mode == "PA_NZ" else nz
        torch.testing.assert_close(by_slot, cache)


def test_scatter_nd_update():
    x, y = torch.zeros(4, 3, 2), torch.zeros(4, 3, 2)
    rows, cells = torch.randn(2, 3, 2), torch.randn(2, 2)
    npu.npu_scatter_nd_update_(x, torch.tensor([[3], [1]]), rows)
    npu.npu_scatter_nd_update_(x, torch.tensor([[0, 2], [1, 0]]), cells)
    y[[3, 1]], y[[0, 1], [2, 0]] = rows, cells
    y[[0, 1], [2, 0]] = cells
    torch.testing.assert_close(x, y)


def test_top_k_top_p():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.3, 0.2]]))
    ints, floats = (lambda *x: torch.tensor(x, dtype=torch.int32)), (lambda *x: torch.tensor(x))
    kept = lambda *args: npu.npu_top_k_top_p(*args).isfinite().tolist()  # noqa: E731 - short, and used below
    assert kept(logits, None, ints(1, 2)) == [
        [False, True, False, False],
        [True, True, True, False],
    ]
    assert kept(logits, floats(0.5, 1.0), None) == [
        [False, True, False, True],
        [True, True, True, True],
    ]
    assert kept(logits, floats(0.5, 0.0), ints(3, 4)) == [
        [False, True, False, True],
        [False, False, True, False],
    ]


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def kv(
    shape=(2, 2, 16),
    cache=(2, 4, 2, 16),
    slots=(1, 2),
    slot_type=torch.int32,
    mode="Norm",
    value=None,
    **others,
):
    value = zeros(*(value or shape))
    slots = torch.tensor(slots, dtype=slot_type)
    npu.npu_scatter_pa_kv_cache(
        zeros(*shape), value, zeros(*cache), zeros(*cache), slots, cache_mode=mode, **others
    )


REFUSED = {
    "gamma's type": (lambda: npu.npu_rms_norm(zeros(2, 8), zeros(8, dtype=torch.bfloat16)), "gamma has"),
    "gamma's shape": (lambda: npu.npu_rms_norm(zeros(2, 8), zeros(4)), "gamma"),
    "a norm of whole numbers": (lambda: npu.npu_rms_norm(*[zeros(2, dtype=torch.int32)] * 2), "float16"),
    "residual's shape": (lambda: npu.npu_add_rms_norm(zeros(2, 8), zeros(1, 8), zeros(8)), "one shape"),
    "residual's type": (lambda: npu.npu_add_rms_norm(zeros(2, 8).half(), zeros(2, 8), zeros(8)), "one type"),
    "rotary over 3 dimensions": (lambda: npu.npu_rotary_mul(zeros(7, 3, 8), *[zeros(7, 1, 8)] * 2), "4 dimensions"),
    "rotary's tables per pair": (lambda: npu.npu_rotary_mul(zeros(1, 7, 3, 8), *[zeros(1, 7, 1, 4)] * 2), "with"),
    "rotary's tables per head": (lambda: npu.npu_rotary_mul(zeros(1, 7, 3, 8), *[zeros(1, 7, 2, 8)] * 2), "with"),
    "rotary's types": (lambda: npu.npu_rotary_mul(zeros(1, 7, 3, 8).half(), *[zeros(1, 7, 1, 8)] * 2), "one float"),
    "an odd head": (lambda: npu.npu_rotary_mul(zeros(1, 7, 3, 9), *[zeros(1, 7, 1, 9)] * 2), "even"),
    "a wide head": (lambda: npu.npu_rotary_mul(zeros(1, 7, 3, 896), *[zeros(1, 7, 1, 896)] * 2), "below 896"),
    "rotary's batch": (lambda: npu.npu_rotary_mul(*[zeros(1, 1, 1, 8).expand(1000, 1000, 1, 8)] * 3), "with"),
    "r1 and r2": (lambda: npu.npu_rotary_mul(zeros(1, 7, 3, 8), zeros(1, 7, 1, 8), zeros(1, 7, 3, 8)), "one shape"),
    "a rotary mode": (lambda: npu.npu_rotary_mul(zeros(1, 7, 3, 8), *[zeros(1, 7, 1, 8)] * 2, "quarter"), "half or"),
    "a rotary matrix": (lambda: npu.npu_rotary_mul(zeros(1, 7, 3, 8), *[zeros(1, 7, 1, 8)] * 2, "half", zeros(8, 8)),
                        "rotate"),
    "an odd swiglu": (lambda: npu.npu_swiglu(zeros(2, 7)), "even"),
    "swiglu of whole numbers": (lambda: npu.npu_swiglu(zeros(2, 8, dtype=torch.int32)), "floats"),
    "PA_NZ left as the mode": (lambda: kv(mode="PA_NZ"), "PA_NZ wants"),
    "an unknown mode": (lambda: kv(mode="NZ"), "Norm or PA_NZ"),
    "a slot twice": (lambda: kv(slots=(1, 1)), "twice"),
    "a slot too far": (lambda: kv(slots=(1, 8)), "slots are in"),
    "a negative slot": (lambda: kv(slots=(-1, 1)), "slots are in"),
    "16-bit slots": (lambda: kv(slot_type=torch.int16), "int32 or int64"),
    "slots as a column": (lambda: kv(slots=((1,), (2,))), "one slot per token"),
    "too few slots": (lambda: kv(slots=(1,)), "one slot per token"),
    "another head size": (lambda: kv(shape=(2, 2, 8)), "per slot"),
    "K and V of other heads": (lambda: kv(value=(2, 1, 16)), "agree in tokens"),
    "flat keys": (lambda: kv(shape=(2, 32)), "agree|3 dimensions"),
    "a flat cache": (lambda: kv(cache=(8, 2, 16)), "3 dimensions, caches 4"),
    "compression": (lambda: kv(seq_lens=zeros(2, dtype=torch.int32)), "doesn't know"),
    "strided keys": (lambda: npu.npu_scatter_pa_kv_cache(zeros(2, 2, 32)[..., :16], zeros(2, 2, 16), zeros(
        2, 4, 2, 16), zeros(2, 4, 2, 16), torch.tensor([0, 1]), cache_mode="Norm"), "contiguous"),
    "mixed types": (lambda: npu.npu_scatter_pa_kv_cache(zeros(2, 2, 16).half(), zeros(2, 2, 16), zeros(
        2, 4, 2, 16), zeros(2, 4, 2, 16), torch.tensor([0, 1]), cache_mode="Norm"), "one type"),
    "flat indices": (lambda: npu.npu_scatter_nd_update_(zeros(4, 2), torch.tensor([1]), zeros(2)), "address"),
    "indices too deep": (lambda: npu.npu_scatter_nd_update_(zeros(4), torch.tensor([[1, 1]]), zeros(1)), "address"),
    "updates' shape": (lambda: npu.npu_scatter_nd_update_(zeros(4, 2), torch.tensor([[1]]), zeros(2)), "updates are"),
    "updates' type": (lambda: npu.npu_scatter_nd_update_(zeros(4, 2), torch.tensor([[1]]), zeros(1, 2).half()), "type"),
    "an index too far": (lambda: npu.npu_scatter_nd_update_(zeros(4, 2), torch.tensor([[4]]), zeros(1, 2)), "indices"),
    "a negative index": (lambda: npu.npu_scatter_nd_update_(zeros(4, 2), torch.tensor([[-1]]), zeros(1, 2)), "indices"),
    "an index twice": (lambda: npu.npu_scatter_nd_update_(zeros(4, 2), torch.tensor([[1], [1]]), zeros(2, 2)), "twice"),
    "16-bit indices": (lambda: npu.npu_scatter_nd_update_(zeros(4), torch.tensor([[1]], dtype=torch.int16), zeros(1)),
                       "int32 or int64"),
    "neither k nor p": (lambda: npu.npu_top_k_top_p(zeros(2, 8)), "both None"),
    "k = 0": (lambda: npu.npu_top_k_top_p(zeros(1, 8), None, torch.tensor([0], dtype=torch.int32)), "k is in"),
    "k past the vocabulary": (lambda: npu.npu_top_k_top_p(zeros(1, 8), None, torch.tensor([9]).int()), "k is in"),
    "k past 1024": (lambda: npu.npu_top_k_top_p(zeros(1, 2048), None, torch.tensor([1025]).int()), "k is in"),
    "int64 k": (lambda: npu.npu_top_k_top_p(zeros(1, 8), None, torch.tensor([1])), "k is int32"),
    "p past 1": (lambda: npu.npu_top_k_top_p(zeros(1, 8), torch.tensor([1.5])), "p is in"),
    "one p for all": (lambda: npu.npu_top_k_top_p(zeros(2, 8), torch.tensor([0.5])), "one per row"),
    "p's type": (lambda: npu.npu_top_k_top_p(zeros(1, 8).half(), torch.tensor([0.5])), "p has"),
    "flat logits": (lambda: npu.npu_top_k_top_p(zeros(8), torch.tensor([0.5])), "2-dimensional"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "text"), REFUSED.values(), ids=REFUSED)
def test_operators_refuse(call, text):
    with pytest.raises(LimitError, match=text):
        call()
