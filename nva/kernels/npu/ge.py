"""The kernels for the graph engine: lengths are device tensors, so one static graph serves every
mix of lengths.

The law: these functions only trace; the graph engine runs them. Read next: operators.py, where all
others are."""

from __future__ import annotations

from torch import Tensor

from nva.kernels import Layout
from nva.kernels.npu.graph import buckets
from nva.kernels.npu.graph import compiled_ge as compiled
from nva.kernels.npu.operators import (
    Lengths,
    add_rms_norm,
    attention,
    block_size,
    cache_memory,
    causal_mask,
    copy_blocks,
    dtypes,
    gelu_tanh_mul,
    linear,
    make_filter_gaps,
    moe,
    npu,
    pack_linear,
    pack_norm,
    rms_norm,
    rotary,
    silu_mul,
    vision_attention,
)

__all__ = [
    "add_rms_norm",
    "attention",
    "attention_inputs",
    "block_size",
    "buckets",
    "cache_memory",
    "compiled",
    "copy_blocks",
    "dtypes",
    "gelu_tanh_mul",
    "linear",
    "make_filter_gaps",
    "moe",
    "pack_linear",
    "pack_norm",
    "rms_norm",
    "rotary",
    "silu_mul",
    "vision_attention",
    "write_kv",
]


def attention_inputs(host: Layout, on_device: Layout, k_cache: Tensor) -> Lengths:
    """Lengths as int64 tensors: a list would be part of the graph, and new lengths would compile a
    new one."""
    ends, lens = on_device.query_ends.long(), on_device.context_lens.long()
    return Lengths(on_device.block_tables, ends, lens, causal_mask(k_cache.device))


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v [T, Nk, D] to slots [T], in place, by one operator. Its default cache_mode would mean
    another layout."""
    npu.npu_scatter_pa_kv_cache(k, v, k_cache, v_cache, slots, cache_mode="Norm")
