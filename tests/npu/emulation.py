"""What each NPU operator that nva calls means, on the CPU: written from its documentation, strict
about its limits.

The law: a call outside the documented limits raises LimitError, even where the device would compute
something wrong in silence. Importing this file gives the operators of the real torch_npu a CPU
kernel; their schemas, their shape inference and the tracing stay torch_npu's own. Three documented
limits are left out on purpose: `r1` and `r2` of rotary within [-1, 1] (yarn scales them past 1 and
the formula doesn't mind), as many cache blocks as the rows' lengths add up to (rows that share a
prefix need fewer), and query lengths strictly below context lengths in sparse mode 3 (the formula
holds for equal lengths, and a whole prompt has them). Read next: emulated_attention.py and
emulated_experts.py, the larger ones; test_emulation.py breaks each limit."""

from __future__ import annotations

from typing import Any

import torch
import torch_npu  # noqa: F401 - defines the schemas

from tests.npu import emulated_experts as experts
from tests.npu.emulated_attention import (
    attention,
    attention_out,
    attention_workspace,
    fp32_arithmetic,
)
from tests.npu.limits import FLOATS, LimitError, limit

__all__ = ["OPERATORS", "LimitError", "fp32_arithmetic", "limit"]


def rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_rms_norm: x / rms(x) * gamma over gamma's dimensions, in float32; and 1 / rms."""
    limit(x.dtype in FLOATS, f"x is float16, bfloat16 or float32, not {x.dtype}")
    limit(gamma.dtype == x.dtype, f"gamma has x's type {x.dtype}, not {gamma.dtype}")
    limit(
        1 <= x.dim() <= 8 and x.shape[x.dim() - gamma.dim() :] == gamma.shape,
        f"gamma {gamma.shape} ends {x.shape}",
    )
    dims = list(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(x.float().square().mean(dims, keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """npu_add_rms_norm: the norm of x1 + x2, 1 / rms, and x1 + x2."""
    limit(x1.shape == x2.shape, f"x1 {x1.shape} and x2 {x2.shape} have one shape")
    limit(x1.dtype == x2.dtype, f"x1 {x1.dtype} and x2 {x2.dtype} have one type")
    total = x1 + x2
    return (*rms_norm(total, gamma, epsilon), total)


def rotary_mul(
    x: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """npu_rotary_mul: x * r1 + turned(x) * r2, over 4 dimensions in one of the layouts BNSD, BSND,
    SBND."""
    limit(rotate is None, "this emulation doesn't know `rotate`")
    limit(
        rotary_mode in ("half", "interleave"),
        f"rotary_mode is half or interleave, not {rotary_mode}",
    )
    limit(x.dim() == r1.dim() == r2.dim() == 4, "x, r1 and r2 have 4 dimensions")
    limit(
        x.dtype in FLOATS and x.dtype == r1.dtype == r2.dtype,
        f"one float type, not {x.dtype, r1.dtype, r2.dtype}",
    )
    limit(
        x.shape[3] % 2 == 0 and x.shape[3] < 896,
        f"the last dimension is even and below 896, not {x.shape[3]}",
    )
    limit(r1.shape == r2.shape, f"r1 {r1.shape} and r2 {r2.shape} have one shape")
    limit(
        any(fits(layout, x, r1, rotary_mode) for layout in ("BNSD", "BSND", "SBND")),
        f"{x.shape} with {r1.shape}",
    )
    if rotary_mode == "half":
        turned = torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (x.float() * r1.float() + turned.float() * r2.float()).to(x.dtype)


def fits(layout: str, x: torch.Tensor, r1: torch.Tensor, rotary_mode: str) -> bool:
    """Whether x is within the limits of the layout, and r1 is x with heads, or heads and batch, of
    size 1."""
    size = dict(zip(layout, x.shape, strict=True))
    small = (
        size["B"] < 1000
        and size["N"] < 1000
        and (rotary_mode == "half" or size["B"] * size["N"] < 1000)
    )
    ones = ["BN"] if rotary_mode == "interleave" else ["BN", "N", ""]
    return small and any(
        list(r1.shape) == [1 if d in one else size[d] for d in layout] for one in ones
    )


def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """npu_swiglu: silu of the first half times the second half."""
    limit(
        x.dtype in FLOATS and 1 <= x.dim() <= 8,
        f"1 to 8 dimensions of floats, not {x.dim()} of {x.dtype}",
    )
    limit(x.shape[dim] % 2 == 0, f"dimension {dim} is even, not {x.shape[dim]}")
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def geglu(
    x: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_geglu: one half times the gelu of the other, and that gelu; by tanh (approximate 1) or
    erf (0)."""
    limit(
        x.dtype in FLOATS and 1 <= x.dim() <= 8,
        f"1 to 8 dimensions of floats, not {x.dim()} of {x.dtype}",
    )
    limit(x.shape[dim] % 2 == 0, f"dimension {dim} is even, not {x.shape[dim]}")
    limit(approximate in (0, 1), f"approximate is 0 or 1, not {approximate}")
    left, right = x.float().chunk(2, dim)
    gate, up = (left, right) if activate_left else (right, left)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh" if approximate else "none")
    return (gelu * up).to(x.dtype), gelu.to(x.dtype)


def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
    **others: Any,
) -> None:
    """npu_scatter_pa_kv_cache: key [T, N, D] into cache [NB, BS, N, D], or [NB, N*D/16, BS, 16] if
    PA_NZ."""
    limit(
        not any(x is not None for x in others.values()),
        f"this emulation doesn't know {sorted(others)}",
    )
    limit(cache_mode in (None, "Norm", "PA_NZ"), f"cache_mode is Norm or PA_NZ, not {cache_mode}")
    limit(
        slot_mapping.dim() == 1 and len(slot_mapping) == len(key),
        f"one slot per token, not {slot_mapping.shape}",
    )
    limit(
        key.shape[:2] == value.shape[:2],
        f"keys {key.shape} and values {value.shape} agree in tokens and heads",
    )
    for new, cache in ((key, key_cache), (value, value_cache)):
        limit(new.dim() == 3 and cache.dim() == 4, "keys and values have 3 dimensions, caches 4")
        limit(
            new.is_contiguous() and cache.is_contiguous(), "keys, values and caches are contiguous"
        )
        limit(
            new.dtype == cache.dtype == key.dtype,
            f"keys, values and caches have one type, not {new.dtype, cache.dtype}",
        )
        if cache_mode == "PA_NZ":  # [NB, N*D/width, BS, width], width 32 bytes
            new, cache = new.reshape(len(new), -1, 32 // new.element_size()), cache.transpose(1, 2)
        limit(
            cache.shape[2:] == new.shape[1:],
            f"{cache_mode} wants {tuple(new.shape[1:])} per slot, not {cache.shape[2:]}",
        )
        check_slots(slot_mapping, cache.shape[0] * cache.shape[1])
        slots = slot_mapping.long()
        cache[slots // cache.shape[1], slots % cache.shape[1]] = new


def check_slots(slots: torch.Tensor, n_slots: int) -> None:
    """Slots are whole numbers in range, each at most once."""
    limit(slots.dtype in {torch.int32, torch.int64}, f"slots are int32 or int64, not {slots.dtype}")
    limit(bool(((slots >= 0) & (slots < n_slots)).all()), f"slots are in [0, {n_slots})")
    limit(len(slots.unique(dim=0)) == len(slots), "no slot occurs twice")


def scatter_nd_update(
    x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    """npu_scatter_nd_update_: x[indices[i]] = updates[i], in place; indices [..., a] address x's
    first a dimensions."""
    limit(
        indices.dim() >= 2 and indices.shape[-1] <= x.dim(),
        f"indices {indices.shape} address x {x.shape}",
    )
    limit(x.dtype == updates.dtype, f"x {x.dtype} and updates {updates.dtype} have one type")
    wanted = indices.shape[:-1] + x.shape[indices.shape[-1] :]
    limit(updates.shape == wanted, f"updates are {tuple(wanted)}, not {tuple(updates.shape)}")
    columns = indices.flatten(0, -2).unbind(-1)
    for column, size in zip(columns, x.shape, strict=False):
        limit(bool(((column >= 0) & (column < size)).all()), f"indices are in [0, {size})")
    check_slots(indices.flatten(0, -2), max(x.shape))
    x[tuple(column.long() for column in columns)] = updates.flatten(0, indices.dim() - 2)
    return x


def top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None
) -> torch.Tensor:
    """npu_top_k_top_p: logits [B, V] with minus infinity outside the top k, and then outside the
    top p."""
    limit(
        logits.dim() == 2 and logits.dtype in FLOATS,
        f"logits are 2-dimensional floats, not {logits.shape}",
    )
    limit(p is not None or k is not None, "p and k aren't both None")
    ordered, ids = logits.sort(dim=-1, stable=True)
    if k is not None:
        limit(
            k.dtype == torch.int32 and k.shape == logits.shape[:1],
            f"k is int32, one per row, not {k.dtype} {k.shape}",
        )
        limit(
            bool(((k >= 1) & (k <= min(1024, logits.shape[1]))).all()),
            "k is in [1, 1024] and at most the vocabulary",
        )
        ordered = ordered.masked_fill(
            ordered < ordered.gather(1, (logits.shape[1] - k.long())[:, None]), -torch.inf
        )
    if p is not None:
        limit(
            p.dtype == logits.dtype and p.shape == logits.shape[:1],
            f"p has the logits' type, one per row, not {p.dtype}",
        )
        limit(bool(((p >= 0) & (p <= 1)).all()), "p is in [0, 1]")
        filtered = ordered.softmax(-1).cumsum(-1) <= 1 - p[:, None]
        filtered[:, -1] = False
        ordered = ordered.masked_fill(filtered, -torch.inf)
    return torch.empty_like(logits).scatter(1, ids, ordered)


OPERATORS = {
    "npu_fused_infer_attention_score_v2": attention,
    "npu_fused_infer_attention_score_v2.out": attention_out,
    "_npu_fused_infer_attention_score_v2_get_max_workspace": attention_workspace,
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_swiglu": swiglu,
    "npu_geglu": geglu,
    "npu_moe_gating_top_k_softmax": experts.gating_top_k_softmax,
    "npu_moe_init_routing_v2": experts.init_routing,
    "npu_grouped_matmul": experts.grouped_matmul,
    "npu_moe_finalize_routing": experts.finalize_routing,
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_scatter_nd_update_": scatter_nd_update,
    "npu_top_k_top_p": top_k_top_p,
}

_library = torch.library.Library("npu", "IMPL")  # registrations live as long as this
for _name, _function in OPERATORS.items():
    _library.impl(_name, _function, "CPU")
