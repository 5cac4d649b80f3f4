"""Rung a: every operator call that the backend makes fits the real schema and the real shape
inference."""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from nva.kernels import Layout
from nva.models import random_params
from nva.models.decoder import Inputs, decode, rope_axes, rope_tables
from nva.models.vision import encode_patches, place_patches
from tests.npu import emulation, models
from tests.npu.expected import n_levels
from tests.npu.here import EAGER, GE

ATTENTION = "npu_fused_infer_attention_score_v2"
COMMON = {"npu::npu_add_rms_norm", "npu::npu_rms_norm", "npu::npu_rotary_mul"}
ROUTED = {
    "npu::npu_moe_gating_top_k_softmax", "npu::npu_moe_init_routing_v2", "npu::npu_grouped_matmul",
    "npu::npu_moe_finalize_routing", "npu::npu_swiglu",
}  # fmt: skip
CALLS = {
    "operators": (EAGER, {f"npu::{ATTENTION}", "npu::npu_scatter_nd_update_"}),
    "ge": (GE, {f"air::{ATTENTION}", "npu::npu_scatter_pa_kv_cache"}),
}
N_TOKENS, N_ROWS, N_LOGITS = 16, 5, 3


class Recorder(TorchDispatchMode):
    """Names of the operators outside torch's own that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace not in ("aten", "prim"):
            self.names.add(func._schema.name)
        return func(*args, **kwargs or {})


def expected_calls(spec, mode) -> set[str]:
    """The operators that a model of this spec is made of."""
    gate = "npu::npu_swiglu" if spec.activation == "silu" else "npu::npu_geglu"
    return COMMON | CALLS[mode][1] | {gate} | (ROUTED if any(spec.experts) else set())


def meta_inputs(spec, kernels, cache) -> Inputs:
    """A step's inputs without values, but for the lengths on the host."""
    ints = lambda *shape: torch.empty(shape, dtype=torch.int32, device="meta")  # noqa: E731 - short, and used below
    host = types.SimpleNamespace(
        query_ends=np.array([4, 8, 9, 16, 16]), context_lens=np.array([9, 4, 200, 7, 1])
    )
    on_device = Layout(
        block_tables=ints(N_ROWS, 5), query_ends=ints(N_ROWS), context_lens=ints(N_ROWS)
    )
    return Inputs(
        token_ids=ints(N_TOKENS),
        positions=ints(3, N_TOKENS) if spec.rope_axes else ints(N_TOKENS),
        slots=ints(N_TOKENS),
        logit_index=ints(N_LOGITS),
        attention=kernels.attention_inputs(host, on_device, cache),
        rope_tables=rope_tables(spec, 64, torch.device("meta")),
        rope_axes=rope_axes(spec, torch.device("meta")),
        is_padding=torch.empty(N_TOKENS, dtype=torch.bool, device="meta"),
        features=(torch.empty(N_TOKENS, spec.hidden_size, dtype=cache.dtype, device="meta"),)
        * n_levels(spec)
        or None,
        is_image=torch.empty(N_TOKENS, 1, dtype=torch.bool, device="meta"),
    )


def meta_params(spec, kernels, dtype):
    """Parameters without values."""
    return tree_map(lambda x: x.to("meta"), random_params(spec, dtype, torch.Generator(), kernels))


@pytest.mark.parametrize("mode", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", models.CONFIGS)
def test_a_forward_fits_schemas_and_shape_inference(name, dtype, mode):
    spec, kernels = models.tiny_spec(name), CALLS[mode][0].kernels
    params = meta_params(spec, kernels, dtype)
    shape = (9, EAGER.block_size, spec.n_kv_heads, spec.head_dim)
    caches = tuple(
        (torch.empty(shape, dtype=dtype, device="meta"),) * 2 for _ in range(spec.n_layers)
    )
    with Recorder() as recorder:
        logits = decode(spec, kernels, params, caches, meta_inputs(spec, kernels, caches[0][0]))
    assert (logits.shape, logits.dtype) == ((N_LOGITS, spec.vocab_size), torch.float32)
    assert recorder.names == expected_calls(spec, mode)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in models.CONFIGS if models.tiny_spec(name).vision])
def test_a_vision_tower_fits_too(name, dtype):
    spec = models.tiny_spec(name)
    params = meta_params(spec, EAGER.kernels, dtype)["vision"]
    patches = torch.empty(6 * 7 * 4, 96, dtype=dtype, device="meta")
    with Recorder() as recorder:
        at = place_patches(spec.vision, 6, 7, torch.device("meta"))
        features = encode_patches(spec.vision, EAGER.kernels, params, patches, at)
    assert (features.shape, features.dtype) == ((n_levels(spec), 6 * 7, spec.hidden_size), dtype)
    assert recorder.names == {f"npu::{ATTENTION}", "npu::npu_rotary_mul"}


def test_block_copies_fit_too():
    caches = [torch.empty(9, 128, 2, 32, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    with Recorder() as recorder:
        EAGER.kernels.copy_blocks(*caches, torch.empty(3, 2, dtype=torch.int32, device="meta"))
    assert recorder.names == {"npu::npu_scatter_nd_update_"}


def test_sinks_fit_too():
    q = torch.empty(N_TOKENS, 4, 64, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(9, 128, 2, 64, dtype=torch.bfloat16, device="meta")
    sinks = torch.empty(4, dtype=torch.bfloat16, device="meta")
    for kernels, window in itertools.product((EAGER.kernels, GE.kernels), (None, 37)):
        spec = models.tiny_spec("llama")
        lengths = meta_inputs(spec, kernels, cache).attention
        assert kernels.attention(q, cache, cache, lengths, 0.1, window, sinks).shape == q.shape


def test_emulated_operators_infer_shapes_as_the_real_ones():
    """The shapes and types that the emulation gives are those of torch_npu's own shape
    inference."""

    def on_meta(x):
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    floats, cache = (
        torch.randn(4, 4, 32).bfloat16(),
        torch.zeros(2, 128, 2, 32, dtype=torch.bfloat16),
    )
    keys, experts = floats[:, :2].contiguous(), torch.zeros(4, 2, dtype=torch.int32)
    routing = {
        "active_num": 8, "expert_num": 3, "active_expert_range": [0, 3], "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
    }  # fmt: skip
    groups = {
        "group_list": torch.tensor([1, 3]),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
    }
    calls = {
        "npu_rms_norm": ((floats, floats[0, 0].clone(), 1e-5), {}),
        "npu_add_rms_norm": ((floats, floats, floats[0, 0].clone(), 1e-5), {}),
        "npu_rotary_mul": ((floats[None], *[floats[None, :, :1].clone()] * 2), {}),
        "npu_swiglu": ((floats,), {}),
        "npu_geglu": ((floats,), {}),
        "npu_moe_gating_top_k_softmax": ((floats[0].float(), torch.zeros(4, dtype=torch.bool), 3), {}),
        "npu_moe_init_routing_v2": ((floats[0], experts), routing),
        "npu_grouped_matmul": (([floats[0]], [torch.zeros(2, 32, 7, dtype=torch.bfloat16)]), groups),
        "npu_moe_finalize_routing": (
            (floats[0], None, None, None, floats[0, :2, :2].clone(), torch.arange(4).int(), None, 2), {},
        ),
        "npu_scatter_nd_update_": ((cache, torch.tensor([[0]]), cache[:1].clone()), {}),
        "npu_scatter_pa_kv_cache": ((keys, keys, cache, cache.clone(), torch.arange(4)), {"cache_mode": "Norm"}),
        "npu_top_k_top_p": ((floats[0], floats[0, :, 0].clamp(0, 1), torch.ones(4, dtype=torch.int32)), {}),
    }  # fmt: skip
    assert {*calls, ATTENTION} == {
        name for name in emulation.OPERATORS if not name.startswith("_") and "." not in name
    }
    for name, (args, options) in calls.items():
        operator = getattr(torch.ops.npu, name)
        meta_args, meta_options = tree_map(on_meta, (args, options))
        expected, given = operator(*meta_args, **meta_options), operator(*args, **options)
        pairs = zip(
            *[x if isinstance(x, tuple | list) else (x,) for x in (expected, given)], strict=True
        )
        for one, other in pairs:
            assert one is other is None or (one.shape, one.dtype) == (other.shape, other.dtype), (
                name
            )
