"""How an NPU is used: operator by operator, and in ACL graphs. ge.py has the third mode.

The law: the modes differ in how a forward is compiled and in the form of its lengths, and in
nothing else. Read next: operators.py for the calls, graph.py for how they are compiled."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from nva.kernels import Device, no_buckets, plain_bytes, uncompiled
from nva.kernels.npu import device as seam
from nva.kernels.npu import operators
from nva.kernels.npu.graph import buckets, compiled_aclgraph
from nva.kernels.npu.sampling import make_filter_gaps

_RESERVED = 2 << 30
"""Bytes for communication buffers, the graphs' own memory, and other processes."""


def empty_cache(shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> Tensor:
    """Zeros in the NPU's memory."""
    return torch.zeros(shape, dtype=dtype, device=where)


def cache_memory(where: torch.device) -> int:
    """What is free when the largest step has run, but for a reserve."""
    return seam.free_memory(where) - _RESERVED


EAGER = Device(
    name="npu",
    where=torch.device("npu"),
    kernels=operators.KERNELS,
    dtypes=(torch.bfloat16, torch.float16),  # of the attention operator
    block_size=128,  # the paged attention operator wants a multiple of 128, and 128 wastes least
    empty_cache=empty_cache,
    cache_bytes=plain_bytes,
    cache_memory=cache_memory,
    buckets=no_buckets,
    compiled=uncompiled,
    make_filter_gaps=make_filter_gaps,
    is_checked=True,
    measured_with=operators.KERNELS,
    pins_memory=False,
    is_host=False,
)
ACLGRAPH = attrs.evolve(EAGER, buckets=buckets, compiled=compiled_aclgraph)
