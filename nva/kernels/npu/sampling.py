"""top_k and top_p on an NPU: npu_top_k_top_p, for the samples that lie within its limits.

The law: which way a sample goes depends on its own parameters alone, so its tokens don't depend on
its batch mates. Read next: filter_gaps in steps/filters.py, the meaning, which also serves the
samples beyond the limits."""

from __future__ import annotations

import numpy as np
import torch
import torch_npu  # noqa: F401 - defines torch.ops.npu
from torch import Tensor

from nva.kernels import Filter

MAX_TOP_K = 1024
"""The operator's own limit. Beyond it the result has been reported to be wrong."""


def make_filter_gaps(general: Filter) -> Filter:
    """`filter_gaps(gaps, params)` in place: by the operator where it can, by `general` where it
    can't."""

    def filter_gaps(gaps: Tensor, params: np.ndarray) -> None:
        has_top_k = (params["top_k"] > 0) & (params["top_k"] < gaps.shape[1])
        fits = np.where(has_top_k, params["top_k"] <= MAX_TOP_K, params["top_p"] < 1)
        for members, filtered in (
            (fits & has_top_k, lambda x, p: _by_operator(x, p, has_top_k=True)),
            (fits & ~has_top_k, lambda x, p: _by_operator(x, p, has_top_k=False)),
            (~fits, general),
        ):
            _on_rows(gaps, params, np.flatnonzero(members), filtered)

    return filter_gaps


def _on_rows(gaps: Tensor, params: np.ndarray, members: np.ndarray, filtered: Filter) -> None:
    """Filter some rows, in place."""
    if len(members) == len(params):
        filtered(gaps, params)
    elif len(members):
        rows = torch.tensor(members, device=gaps.device)
        part = gaps.index_select(0, rows)
        filtered(part, params[members])
        gaps.index_copy_(0, rows, part)


def _by_operator(gaps: Tensor, params: np.ndarray, has_top_k: bool) -> None:
    """min_p, then the operator, on gaps [n, V]: how far log-probabilities lie below the likeliest,
    infinity is out.

    The operator wants k and p per row, in [1, 1024] and [0, 1]; p = 1 leaves out nothing that could
    be drawn."""
    put = lambda values: torch.tensor(values, device=gaps.device)  # noqa: E731 - short, and used below
    with np.errstate(divide="ignore"):
        limit = put(-np.log(params["min_p"].astype(np.float32)))
    kept = torch.where(gaps <= limit[:, None], -gaps, -torch.inf)
    top_k = put(params["top_k"].astype(np.int32)) if has_top_k else None
    top_p = put(params["top_p"].astype(np.float32))
    gaps.copy_(torch.ops.npu.npu_top_k_top_p(kept, top_p, top_k)).neg_()
