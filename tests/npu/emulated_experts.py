"""The NPU's operators for experts on the CPU: route, sort by expert, multiply group by group, put
back and add.

The law: whatever the documentation leaves undefined is NaN here, so that a result which depends on
it shows. One documented limit is left out on purpose: that the groups of a grouped product add up
to all of its rows. Counts are on the device, where nobody checks them, and expert parallelism
always has rows beyond the last group. Read next: emulation.py, which registers these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.npu.limits import FLOATS, limit

Tensor = torch.Tensor


def only(others: dict[str, Any]) -> None:
    """Refuse what is set and isn't modelled."""
    unknown = [
        name
        for name, x in others.items()
        if str(x) not in ("None", "0", "-1", "False", "[]", "[0]")
    ]
    limit(not unknown, f"this emulation doesn't know {unknown}")


def gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """npu_moe_gating_top_k_softmax: the k largest shares [T, k] of each row of logits [T, E],
    likeliest first, and their experts; rows that are finished get the expert E. The third result
    counts column by column."""
    limit(
        x.dtype in FLOATS and x.dim() == 2,
        f"this emulation knows 2 dimensions of floats, not {x.dim()} of {x.dtype}",
    )
    limit(0 < k <= min(x.shape[1], 1024), f"k is in [1, {min(x.shape[1], 1024)}], not {k}")
    weights, experts = x.float().softmax(-1).topk(k, -1)
    if finished is not None:
        limit(finished.dtype == torch.bool, f"finished is bool, not {finished.dtype}")
        limit(
            finished.shape == x.shape[:1],
            f"finished has one entry per row, not {tuple(finished.shape)}",
        )
        weights = weights.masked_fill(finished[:, None], torch.nan)
        experts = experts.masked_fill(finished[:, None], x.shape[1])
    rows = torch.arange(weights.numel()).view(k, -1).T.contiguous()
    return weights.to(x.dtype), experts.int(), rows.int()


def init_routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """npu_moe_init_routing_v2: rows of x [T, H] once for each of their experts [T, k] in the range,
    sorted by expert; where each of the T * k went, -1 for those outside the range; and the experts'
    counts."""
    only(others)
    check_routing(x, expert_idx, expert_num, active_expert_range)
    limit(
        active_num == expert_idx.numel(),
        f"active_num {active_num} is rows times k, {expert_idx.numel()}",
    )
    limit(drop_pad_mode == 0 and quant_mode == -1, "this emulation drops and quantizes nothing")
    limit(expert_tokens_num_flag, "expert_tokens_num_flag is set")
    limit(
        expert_tokens_num_type == 1,
        f"this emulation knows expert_tokens_num_type 1, not {expert_tokens_num_type}",
    )
    start, end = active_expert_range
    ids = expert_idx.flatten().long()
    is_active = (ids >= start) & (ids < end)
    order = torch.where(is_active, ids, expert_num).argsort(stable=True)[: int(is_active.sum())]
    expanded = x.new_full((len(ids), x.shape[1]), torch.nan)
    expanded[: len(order)] = x[order // expert_idx.shape[1]]
    places = torch.full((len(ids),), -1, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32)
    counts = torch.bincount(ids[is_active] - start, minlength=end - start)
    return expanded, places, counts, torch.full((len(ids),), torch.nan)


def check_routing(
    x: Tensor, expert_idx: Tensor, expert_num: int, active_range: Sequence[int]
) -> None:
    """Limits of what is routed, and of the range of experts."""
    limit(
        x.dtype in FLOATS and x.dim() == 2,
        f"x has 2 dimensions of floats, not {x.dim()} of {x.dtype}",
    )
    limit(expert_idx.dtype == torch.int32, f"expert_idx is int32, not {expert_idx.dtype}")
    limit(
        expert_idx.dim() == 2 and len(expert_idx) == len(x),
        f"expert_idx is a row per row of x, not {expert_idx.shape}",
    )
    limit(0 < expert_num <= 10240, f"expert_num is in [1, 10240], not {expert_num}")
    limit(
        bool(((expert_idx >= 0) & (expert_idx < expert_num)).all()),
        f"experts are in [0, {expert_num})",
    )
    limit(len(active_range) == 2, f"active_expert_range is a pair, not {active_range}")
    start, end = active_range
    limit(
        0 <= start < end <= expert_num,
        f"active_expert_range {active_range} lies in [0, {expert_num}]",
    )


def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    **others: Any,
) -> list[Tensor]:
    """npu_grouped_matmul: rows of x [R, K] in groups, each times its own of weight [E, K, N]."""
    only(others)
    limit(len(x) == len(weight) == 1, "this emulation knows one x and one weight")
    limit(split_item in (2, 3), f"one x and one weight want split_item 2 or 3, not {split_item}")
    limit(group_type == 0, f"this emulation groups rows, group_type 0, not {group_type}")
    (x,), (weight,) = x, weight
    check_product(x, weight)
    sizes = group_sizes(group_list, group_list_type, len(x), len(weight))
    groups = x[: sum(sizes)].float().split(sizes)
    out = x.new_full((len(x), weight.shape[2]), torch.nan)
    out[: sum(sizes)] = torch.cat(
        [rows @ each.float() for rows, each in zip(groups, weight, strict=True)]
    ).to(x.dtype)
    return [out]


def check_product(x: Tensor, weight: Tensor) -> None:
    """Limits of the factors."""
    limit(
        x.dim() == 2 and weight.dim() == 3,
        f"x has 2 dimensions, weight 3, not {x.dim()} and {weight.dim()}",
    )
    limit(
        x.dtype in FLOATS and x.dtype == weight.dtype,
        f"one float type, not {x.dtype} and {weight.dtype}",
    )
    limit(
        x.shape[1] == weight.shape[1],
        f"{x.shape[1]} columns of x are {weight.shape[1]} rows of weight",
    )
    limit(x.is_contiguous(), "x isn't transposed")
    limit(max(x.shape[1], weight.shape[2]) < 65536, "last dimensions are below 65536")


def group_sizes(
    group_list: Tensor | None, group_list_type: int, n_rows: int, n_groups: int
) -> list[int]:
    """How many rows each group has, from their running sum (type 0) or their counts (type 1)."""
    limit(group_list is not None and group_list.dtype == torch.int64, "group_list is int64")
    limit(
        group_list.shape == (n_groups,),
        f"group_list has an entry per weight, {n_groups}, not {group_list.shape}",
    )
    limit(n_groups <= 1024, f"at most 1024 groups, not {n_groups}")
    limit(group_list_type in (0, 1), f"group_list_type is 0 or 1, not {group_list_type}")
    sizes = group_list if group_list_type == 1 else group_list.diff(prepend=group_list.new_zeros(1))
    limit(
        bool((sizes >= 0).all()),
        f"group_list {group_list.tolist()} of type {group_list_type} has no negative size",
    )
    limit(
        int(sizes.sum()) <= n_rows,
        f"groups {group_list.tolist()} of type {group_list_type} fit {n_rows} rows",
    )
    return sizes.tolist()


def finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int = 0,
    k: int = 1,
) -> Tensor:
    """npu_moe_finalize_routing: the weighted sum of the k rows that belong to a token, [T * k, H]
    -> [T, H]."""
    rows, places = expanded_permuted_rows, expanded_src_to_dst_row
    only({"skip1": skip1, "skip2": skip2, "bias": bias, "experts": export_for_source_row})
    limit(
        drop_pad_mode in (0, 2), f"this emulation drops nothing, modes 0 and 2, not {drop_pad_mode}"
    )
    limit(
        rows.dtype in FLOATS and rows.dim() == 2,
        f"rows have 2 dimensions of floats, not {rows.dim()} of {rows.dtype}",
    )
    limit(scales is not None and scales.dim() == 2, "this emulation knows scales of 2 dimensions")
    limit(
        scales.dtype == rows.dtype, f"scales have the rows' type {rows.dtype}, not {scales.dtype}"
    )
    limit(places.dtype == torch.int32, f"places are int32, not {places.dtype}")
    limit(
        places.shape == (scales.numel(),) == (len(rows),),
        f"{len(rows)} rows, {places.shape} places, {scales.shape}",
    )
    limit(bool(((places >= 0) & (places < len(rows))).all()), f"places are in [0, {len(rows)})")
    n_tokens, n_active = scales.shape
    places = (
        places.long().view(n_active, n_tokens).T
        if drop_pad_mode == 0
        else places.long().view(n_tokens, n_active)
    )
    return (rows[places].float() * scales[..., None].float()).sum(1).to(rows.dtype)
