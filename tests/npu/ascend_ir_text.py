"""The operators of Ascend IR in a decoder's graph, by the names of their IR declarations.

The NPU's own run by emulation.py, with all its limits. Read next: ascend_ir.py, which runs graphs;
ascend_ir_vision.py, what only a vision tower's graph has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchair.ge._ge_graph import ge_type_to_torch_type

from tests.npu import emulated_experts as experts
from tests.npu import emulation

Tensor = torch.Tensor
Outputs = Sequence[Tensor]


def const(value: Tensor) -> Outputs:
    return [value]


def gather(
    x: Tensor,
    indices: Tensor,
    axis: Tensor,
    batch_dims: int,
    negative_index_support: bool,
    **_: Any,
) -> Outputs:
    assert batch_dims == 0, "gathers in batches don't occur"
    dim, ids = int(axis), indices.long()
    size = x.shape[dim]
    low = -size if negative_index_support else 0
    if bool(((ids < low) | (ids >= size)).any()):
        raise IndexError(f"GatherV2 takes indices in [{low}, {size})")
    return [
        x.index_select(dim, ids.flatten() % size).reshape(
            *x.shape[:dim], *ids.shape, *x.shape[dim + 1 :]
        )
    ]


def unsqueeze(x: Tensor, axes: list[int]) -> Outputs:
    for axis in axes:
        x = x.unsqueeze(axis)
    return [x]


def squeeze(x: Tensor, axis: list[int]) -> Outputs:
    return [x.squeeze(tuple(axis) or tuple(range(x.dim())))]


def reshape(x: Tensor, shape: Tensor, axis: int, num_axes: int) -> Outputs:
    assert (axis, num_axes) == (0, -1), "reshapes of some axes don't occur"
    return [x.reshape(shape.tolist())]


def cast(x: Tensor, dst_type: int, **_: Any) -> Outputs:
    return [x.to(ge_type_to_torch_type(dst_type))]


def select(condition: Tensor, **branches: Tensor) -> Outputs:
    return [torch.where(condition, branches["then"], branches["else"])]


def add(x1: Tensor, x2: Tensor) -> Outputs:
    return [x1 + x2]


def mul(x1: Tensor, x2: Tensor) -> Outputs:
    return [x1 * x2]


def muls(x: Tensor, value: float) -> Outputs:
    return [(x.float() * value).to(x.dtype)]


def real_div(x1: Tensor, x2: Tensor) -> Outputs:
    return [x1 / x2]


def reduce_sum(x: Tensor, axes: Tensor, keep_dims: bool) -> Outputs:
    return [x.sum(axes.tolist(), keep_dims)]


def sigmoid(x: Tensor) -> Outputs:
    return [x.sigmoid()]


def clip_by_value(x: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Outputs:
    return [x.clamp(clip_value_min, clip_value_max)]


def fill(dims: Tensor, value: Tensor) -> Outputs:
    return [value.expand(dims.tolist()).contiguous()]


def split(x: Tensor, size_splits: Tensor, split_dim: Tensor, num_split: int) -> Outputs:
    parts = x.split(size_splits.tolist(), int(split_dim))
    assert len(parts) == num_split, f"{num_split} parts, not {len(parts)}"
    return [part.contiguous() for part in parts]


def concat(concat_dim: Any, N: int, **xs: Any) -> Outputs:
    return [torch.cat([xs[f"x{i}"] for i in range(N)], int(concat_dim))]


def matmul(
    x1: Tensor,
    x2: Tensor,
    transpose_x1: bool,
    transpose_x2: bool,
    bias: Tensor | None = None,
    **_: Any,
) -> Outputs:
    product = (x1.mT if transpose_x1 else x1) @ (x2.mT if transpose_x2 else x2)
    return [product if bias is None else product + bias]


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Outputs:
    return emulation.rms_norm(x, gamma, epsilon)


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> Outputs:
    return emulation.add_rms_norm(x1, x2, gamma, epsilon)


def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, **attrs: Any) -> Outputs:
    return [emulation.rotary_mul(x, r1, r2, **attrs)]


def swiglu(x: Tensor, dim: int) -> Outputs:
    return [emulation.swiglu(x, dim)]


def gelu_gate(x: Tensor, dim: int, approximate: int, activate_left: bool) -> Outputs:
    return emulation.geglu(x, dim, approximate, activate_left)


def gating_top_k_softmax(x: Tensor, k: int, finished: Tensor | None = None) -> Outputs:
    return experts.gating_top_k_softmax(x, finished, k)


def grouped_matmul(x0: Tensor, weight0: Tensor, group_list: Tensor, **attrs: Any) -> Outputs:
    absent = [attrs.pop(name) for name in list(attrs) if isinstance(attrs[name], Tensor)]
    assert not any(tensor.numel() for tensor in absent), "biases, scales and offsets don't occur"
    return experts.grouped_matmul([x0], [weight0], group_list=group_list, **attrs)


def finalize_routing(
    expanded_x: Tensor, expanded_row_idx: Tensor, scales: Tensor, drop_pad_mode: int, **_: Any
) -> Outputs:
    """The number of experts per token, k, is read where there are no scales."""
    return [
        experts.finalize_routing(
            expanded_x, None, None, None, scales, expanded_row_idx, None, drop_pad_mode
        )
    ]


def scatter_pa_kv_cache(
    key: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    value: Tensor,
    value_cache: Tensor,
    cache_mode: str,
    scatter_mode: str,
    strides: list[int],
    offsets: list[int],
) -> Outputs:
    assert (scatter_mode, strides, offsets) == ("None", [1, 1], [0, 0]), (
        "other ways to scatter don't occur"
    )
    emulation.scatter_pa_kv_cache(
        key, value, key_cache, value_cache, slot_mapping, cache_mode=cache_mode
    )
    return [key_cache, value_cache]


def attention(
    query: Tensor,
    key0: Tensor,
    value0: Tensor,
    num_heads: int,
    scale: float,
    actual_seq_lengths: Tensor,
    actual_seq_lengths_kv: Tensor,
    antiquant_mode: int,
    out_dtype: int = 0,
    **others: Any,
) -> Outputs:
    lengths = (actual_seq_lengths, actual_seq_lengths_kv)
    emulation.limit(all(x.dtype == torch.int64 for x in lengths), "lengths are int64")
    assert antiquant_mode == 0 and out_dtype == 0, "quantized attention doesn't occur"
    names = {"softmax_lse_flag": "return_softmax_lse"}
    return emulation.attention(
        query,
        key0,
        value0,
        num_query_heads=num_heads,
        softmax_scale=scale,
        actual_seq_qlen=lengths[0].tolist(),
        actual_seq_kvlen=lengths[1].tolist(),
        **{names.get(name, name): value for name, value in others.items()},
    )


MEANINGS: dict[str, Callable[..., Outputs]] = {
    "Const": const,
    "GatherV2": gather,
    "Unsqueeze": unsqueeze,
    "Squeeze": squeeze,
    "Reshape": reshape,
    "Cast": cast,
    "SelectV2": select,
    "Add": add,
    "Mul": mul,
    "Muls": muls,
    "RealDiv": real_div,
    "ReduceSum": reduce_sum,
    "Sigmoid": sigmoid,
    "ClipByValueV2": clip_by_value,
    "Fill": fill,
    "SplitV": split,
    "ConcatV2": concat,
    "MatMul": matmul,
    "MatMulV2": matmul,
    "RmsNorm": rms_norm,
    "AddRmsNorm": add_rms_norm,
    "RotaryMul": rotary_mul,
    "SwiGlu": swiglu,
    "GeGluV2": gelu_gate,
    "MoeGatingTopKSoftmax": gating_top_k_softmax,
    "MoeInitRoutingV3": experts.init_routing,
    "GroupedMatmul": grouped_matmul,
    "MoeFinalizeRoutingV2": finalize_routing,
    "ScatterPaKvCache": scatter_pa_kv_cache,
    "FusedInferAttentionScore": attention,
}
