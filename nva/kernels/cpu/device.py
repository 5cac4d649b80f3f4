"""How a CPU is used: its memory, and caches that take memory only as they are written.

The law: whatever kernels serve, compiled or the reference, the device is the same. Read next:
__init__.py, which chooses between them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nva.kernels import (
    Device,
    general_filter,
    no_buckets,
    plain_bytes,
    reference,
    uncompiled,
)
from nva.kernels.host_memory import free_memory


def empty_cache(shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> Tensor:
    """Zeros, by numpy: they take memory only as they are first written, where torch writes them
    all, and ask for huge pages, from which scattered blocks are read faster."""
    zeros = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return torch.from_numpy(zeros).view(dtype)


def cache_memory(where: torch.device) -> int:
    """A third of what is free: the machine may have other uses for the rest."""
    return free_memory() // 3


PLAIN = Device(
    name="cpu",
    where=torch.device("cpu"),
    kernels=reference.KERNELS,
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    block_size=16,
    empty_cache=empty_cache,
    cache_bytes=plain_bytes,
    cache_memory=cache_memory,
    buckets=no_buckets,
    compiled=uncompiled,
    make_filter_gaps=general_filter,
    is_checked=False,
    measured_with=None,
    pins_memory=False,
    is_host=True,
)
"""A CPU with the reference kernels, plain torch."""
