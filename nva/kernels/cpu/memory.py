"""Memory for the kernels: it begins at a cache line, and for weights it lies on huge pages where
the system has them.

The law: what is given is nobody else's for as long as a tensor or array looks at it. Read next:
operators.py for what lies on huge pages, tape.py for what is computed in between."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LINE = 64
_CHUNK = 32 << 20
_HUGE = 4 << 20  # bytes from which numpy asks for huge pages
_chunk = np.empty(0, np.uint8)


def aligned(n_bytes: int) -> np.ndarray:
    """Bytes from the beginning of a cache line on, undefined."""
    memory = np.empty(n_bytes + _LINE, np.uint8)
    return memory[-memory.ctypes.data % _LINE :][:n_bytes]


def on_huge_pages(n_rows: int, n_columns: int, dtype: torch.dtype) -> Tensor:
    """Memory for a weight, small ones side by side in chunks. On 4 KB pages, TLB misses on
    weights (which also evict the KV cache's entries) cost a fifth of a decode step."""
    global _chunk
    n_bytes = n_rows * n_columns * dtype.itemsize
    if n_bytes >= _HUGE:
        memory = aligned(n_bytes)
    else:
        if n_bytes > len(_chunk):
            _chunk = aligned(_CHUNK)
        memory, _chunk = _chunk[:n_bytes], _chunk[n_bytes + -n_bytes % _LINE :]
    return torch.from_numpy(memory).view(dtype).view(n_rows, n_columns)
