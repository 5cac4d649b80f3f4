"""The operators of Ascend IR that only a vision tower's graph has.

Gelu has no attribute: torchair makes it of both of torch's, and CANN computes the tanh
approximation, as here. Read next: ascend_ir.py, which runs graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Outputs = Sequence[Tensor]


def layer_norm(
    x: Tensor, normalized_shape: Tensor, gamma: Tensor, beta: Tensor, epsilon: float
) -> Outputs:
    return torch.native_layer_norm(x, normalized_shape.tolist(), gamma, beta, epsilon)


def gelu(x: Tensor) -> Outputs:
    return [F.gelu(x, approximate="tanh")]


def pack(axis: int, N: int, **xs: Tensor) -> Outputs:
    return [torch.stack([xs[f"x{i}"] for i in range(N)], axis)]


def pad(
    x: Tensor, paddings: Tensor, constant_values: Tensor, mode: str, paddings_contiguous: bool
) -> Outputs:
    assert mode == "constant" and paddings_contiguous, "other paddings don't occur"
    pairs = paddings.view(-1, 2).flip(0)  # torch wants the last dimension's first
    return [F.pad(x, pairs.flatten().tolist(), value=float(constant_values))]


def strided_slice(
    x: Tensor, begin: Tensor, end: Tensor, axes: Tensor, strides: Tensor, **masks: int
) -> Outputs:
    assert not any(masks.values()), "masks don't occur"
    first, last, dims, steps = (part.flatten().tolist() for part in (begin, end, axes, strides))
    slices = [slice(None)] * x.dim()
    for dim, start, stop, step in zip(dims, first, last, steps, strict=True):
        slices[dim] = slice(start, stop, step)
    return [x[tuple(slices)].contiguous()]


def identity(x: Tensor) -> Outputs:
    return [x.clone()]


MEANINGS: dict[str, Callable[..., Any]] = {
    "LayerNormV4": layer_norm,
    "Gelu": gelu,
    "Pack": pack,
    "PadV3": pad,
    "StridedSliceV2": strided_slice,
    "Identity": identity,
}
