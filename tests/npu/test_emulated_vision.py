"""The emulated attention without a cache computes what plain torch computes, and refuses what is
documented."""

from __future__ import annotations

import pytest
import torch

from tests.npu import emulation
from tests.npu.emulated_attention import CAUSAL
from tests.npu.emulation import LimitError

N_Q, N_KV, D = 4, 2, 64


def call(dtype=torch.bfloat16, **changes):
    """A valid call over two images of 3 and 4 patches, the second of which sees 5 keys."""
    generator = torch.Generator().manual_seed(0)
    given = {
        "query": torch.randn(7, N_Q, D, generator=generator).to(dtype),
        "key": torch.randn(8, N_KV, D, generator=generator).to(dtype),
        "value": torch.randn(8, N_KV, D, generator=generator).to(dtype),
        "num_query_heads": N_Q,
        "num_key_value_heads": N_KV,
        "softmax_scale": 0.1,
        "input_layout": "TND",
        "actual_seq_qlen": [3, 7],
        "actual_seq_kvlen": [3, 8],
    }
    given |= changes
    inputs = [given.pop(name) for name in ("query", "key", "value")]
    return torch.ops.npu.npu_fused_infer_attention_score_v2(*inputs, **given)[0]


def test_each_image_sees_itself():
    """Worked out patch by patch: a softmax over the scores with the keys of its own image."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, heads, D, generator=generator)
        for n, heads in ((7, N_Q), (8, N_KV), (8, N_KV))
    )
    with emulation.fp32_arithmetic():
        out = call(torch.float32)
    for patch in range(7):
        own = slice(0, 3) if patch < 3 else slice(3, 8)
        for head in range(N_Q):
            weights = (k[own, head // 2] @ q[patch, head] * 0.1).softmax(0)
            torch.testing.assert_close(out[patch, head], weights @ v[own, head // 2])


def keys(*shape, dtype=torch.bfloat16):
    return {name: torch.zeros(shape, dtype=dtype) for name in ("key", "value")}


FAULTS = {
    "a mask": ({"atten_mask": CAUSAL, "sparse_mode": 3}, "no mask"),
    "a block size": ({"block_size": 128}, "no block size"),
    "a sink": ({"learnable_sink": torch.zeros(N_Q, dtype=torch.bfloat16)}, "no sinks"),
    "keys of a cache": (keys(2, 128, N_KV * D), "KV heads"),
    "flat keys": (keys(8, N_KV * D), "keys and values are"),
    "strided keys": (
        {"key": torch.zeros(8, N_KV, 2 * D, dtype=torch.bfloat16)[..., ::2]},
        "contiguous",
    ),
    "types": (keys(8, N_KV, D, dtype=torch.float16), "query's type"),
    "shapes of K and V": ({"value": torch.zeros(9, N_KV, D, dtype=torch.bfloat16)}, "one shape"),
    "KV lengths per image": ({"actual_seq_kvlen": [5, 3]}, "running sum"),
    "KV lengths left out": ({"actual_seq_kvlen": None}, "0 KV lengths for 2"),
    "the last KV length": ({"actual_seq_kvlen": [3, 7]}, "number of keys"),
    "heads of 80": (
        {"query": torch.zeros(7, N_Q, 80, dtype=torch.bfloat16), **keys(8, N_KV, 80)},
        "not 80",
    ),
}


@pytest.mark.parametrize(("changes", "text"), FAULTS.values(), ids=FAULTS)
def test_what_is_refused(changes, text):
    call()
    with pytest.raises(LimitError, match=text):
        call(**changes)
