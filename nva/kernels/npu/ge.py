"""What the kernels are for the graph engine: lengths are device tensors, so one static graph serves
every mix of lengths.

The law: these functions only trace; the graph engine runs them. Read next: operators.py, where all
others are."""

from __future__ import annotations

import attrs
import torchair
from torch import Tensor

from nva.kernels import Layout
from nva.kernels.npu.devices import ACLGRAPH
from nva.kernels.npu.graph import compiled_ge
from nva.kernels.npu.operators import Lengths, attention_by, causal_mask, npu


def attention_inputs(host: Layout, on_device: Layout, k_cache: Tensor) -> Lengths:
    """Lengths as int64 tensors: a list would be part of the graph, and new lengths would compile a
    new one."""
    ends = on_device.query_ends.long()
    lens = on_device.context_lens.long()
    return Lengths(on_device.block_tables, ends, lens, causal_mask(k_cache.device))


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    inputs: Lengths,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention of operators.py, by the operator that takes lengths as tensors."""
    return attention_by(torchair.ops, q, k_cache, v_cache, inputs, scale, window, sinks)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v [T, Nk, D] to slots [T], in place, by one operator. Its default cache_mode would mean
    another layout."""
    npu.npu_scatter_pa_kv_cache(k, v, k_cache, v_cache, slots, cache_mode="Norm")


GE = attrs.evolve(
    ACLGRAPH,
    compiled=compiled_ge,
    kernels=attrs.evolve(
        ACLGRAPH.kernels,
        write_kv=write_kv,
        attention_inputs=attention_inputs,
        attention=attention,
    ),
)
"""An NPU whose forward the graph engine runs."""
