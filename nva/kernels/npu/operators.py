"""The kernels on an Ascend NPU: the contract of nva/kernels, each function one fused operator of
torch_npu.

The law: one forward serves every graph mode, and only the lengths differ in form: host lists here
(eager and ACL graphs), device tensors in ge.py (graph engine), which also writes the cache with
another operator. Limits of the operators are quoted where they bind. Read next: graph.py, which
compiles a forward over these functions."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_npu  # noqa: F401 - defines torch.ops.npu
from torch import Tensor

from nva.kernels import Kernels, Layout
from nva.kernels.npu.support import filled_head_dim

npu = torch.ops.npu


class Lengths(NamedTuple):
    """What the attention operator wants to know about B rows. The last query end is T; context
    lengths are per row, never cumulative, because the cache is paged."""

    block_tables: Tensor  # [B, M] int32
    query_ends: Any  # [B] list of int, or int64 tensor for the graph engine
    context_lens: Any  # [B] likewise
    mask: Tensor  # [2048, 2048] bool, True is masked


@functools.cache
def causal_mask(device: torch.device) -> Tensor:
    """The one mask that sparse modes 3 and 4 take, whatever the lengths: True strictly above the
    diagonal."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


def pack_linear(weight: Tensor) -> Tensor:
    """The weight [..., N, K] as [..., K, N]: the product is then one operator, without a
    transpose."""
    return weight.mT.contiguous()


def pack_norm(weight: Tensor, unit_offset: bool) -> Tensor:
    """The factor of the operators, which know no offset: 1 + weight, rounded once here."""
    return 1 + weight if unit_offset else weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times [K, N], plus bias [N] in the same operator."""
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """x [..., H]. The weight is multiplied in float32, so bfloat16 rounds once where the reference
    rounds twice; a unit offset is in it already."""
    return npu.npu_rms_norm(x, weight, eps)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) in one pass over memory."""
    normed, _, total = npu.npu_add_rms_norm(x, residual, weight, eps)
    return normed, total


def silu_mul(x: Tensor) -> Tensor:
    """[T, 2I] -> [T, I]."""
    return npu.npu_swiglu(x)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """[T, 2I] -> [T, I]. The operator's default is to activate the second half."""
    return npu.npu_geglu(x, dim=-1, approximate=1, activate_left=True)[0]


def moe(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    n_active: int,
    normalize: bool,
    is_padding: Tensor,
) -> Tensor:
    """x [T, H] routed, sorted by expert, multiplied group by group, put back and added; counts stay
    on the device.

    Padding is "finished" for the router, which sends it to expert E, outside the range of those
    that are active. So its rows come after all groups, no product computes them, and their places
    are -1, which the last operator can't read."""
    n_tokens, n_experts = logits.shape
    weights, experts, _ = npu.npu_moe_gating_top_k_softmax(logits.float(), is_padding, n_active)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    grouped, places, counts, _ = npu.npu_moe_init_routing_v2(
        x,
        experts,
        active_num=n_tokens * n_active,
        expert_num=n_experts + 1,
        active_expert_range=[0, n_experts],
        expert_tokens_num_type=1,  # counts, no running sum
        expert_tokens_num_flag=True,
        quant_mode=-1,
    )
    grouped = silu_mul(_grouped_linear(grouped, gate_up, counts))
    grouped = _grouped_linear(grouped, down, counts)
    places = places.clamp(min=0)
    weights = weights.to(x.dtype)
    # Mode 2: places lie token by token, as the operator above gives them. Mode 0, the default, has
    # expert by expert.
    return npu.npu_moe_finalize_routing(
        grouped, None, None, None, weights, places, None, drop_pad_mode=2
    )


def _grouped_linear(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """x [R, K] -> [R, N]: counts[e] rows times weights[e] [K, N], expert after expert; what follows
    is undefined."""
    # split_item 2: one result; group_type 0: rows are grouped; group_list_type 1: by counts.
    (out,) = npu.npu_grouped_matmul(
        [x], [weights], group_list=counts, split_item=2, group_type=0, group_list_type=1
    )
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, Nq, D] and k [T, Nk, D] in the operator's layout BSND, with B = 1 and S = T; cos and
    sin [T, R]."""
    cos, sin = cos[None, :, None], sin[None, :, None]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n_rotated = cos.shape[-1]
    turned, rest = x.split((n_rotated, x.shape[-1] - n_rotated), dim=-1)
    turned = npu.npu_rotary_mul(turned.unsqueeze(0), cos, sin).squeeze(0)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v [T, Nk, D] to slots [T], in place. index_put would not convert to Ascend IR."""
    for new, cache in ((k, k_cache), (v, v_cache)):
        npu.npu_scatter_nd_update_(cache.view(-1, *cache.shape[2:]), slots[:, None], new)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, copies: Tensor) -> None:
    """Blocks copies[:, 0] onto copies[:, 1], in place; the gather is a copy, so reads come
    first."""
    sources, targets = copies.unbind(1)
    for cache in (k_cache, v_cache):
        npu.npu_scatter_nd_update_(
            cache, targets[:, None].contiguous(), cache.index_select(0, sources)
        )


def attention_inputs(host: Layout, on_device: Layout, k_cache: Tensor) -> Lengths:
    """Lengths as host lists, which torch.ops.npu demands: a tensor would be copied to the host and
    waited for."""
    ends = host.query_ends.tolist()
    lens = host.context_lens.tolist()
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
    """npu_fused_infer_attention_score_v2 in layout TND over the paged cache, for decode and prefill
    rows mixed."""
    return attention_by(npu, q, k_cache, v_cache, inputs, scale, window, sinks)


def attention_by(
    operators: Any,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    inputs: Lengths,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same by torch.ops.npu, which takes lengths as lists, or torchair.ops, which takes them as
    tensors and exists for the graph engine alone.

    Sparse mode 3 is causal, aligned at each row's end; mode 4 is a band that also ends `pre_tokens`
    before the query."""
    band = {} if window is None else {"pre_tokens": window - 1, "next_tokens": 0}
    out, _ = operators.npu_fused_infer_attention_score_v2(
        q,
        k_cache.flatten(2),
        v_cache.flatten(2),
        num_query_heads=q.shape[1],
        num_key_value_heads=k_cache.shape[2],  # 0, the default, divides by zero in the tiling
        softmax_scale=scale,
        input_layout="TND",
        sparse_mode=3 if window is None else 4,
        atten_mask=inputs.mask,
        block_table=inputs.block_tables,
        block_size=k_cache.shape[1],
        actual_seq_qlen=inputs.query_ends,
        actual_seq_kvlen=inputs.context_lens,
        learnable_sink=sinks,
        **band,
    )
    return out


def vision_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q, k, v [P, N, D] -> [P, N, D] by the same operator, with neither cache nor mask.

    Without a cache key lengths are a running sum too, here of one image. Heads are filled up with
    zeros, which change no product, to a size that the operator takes."""
    n_patches, n_heads, head_dim = q.shape
    n_zeros = filled_head_dim(head_dim) - head_dim
    q, k, v = (F.pad(each, (0, n_zeros)) if n_zeros else each.contiguous() for each in (q, k, v))
    out, _ = npu.npu_fused_infer_attention_score_v2(
        q,
        k,
        v,
        num_query_heads=n_heads,
        num_key_value_heads=n_heads,
        softmax_scale=scale,
        input_layout="TND",
        sparse_mode=0,
        actual_seq_qlen=[n_patches],
        actual_seq_kvlen=[n_patches],
    )
    return out[..., :head_dim]


KERNELS = Kernels(
    pack_linear=pack_linear,
    linear=linear,
    pack_norm=pack_norm,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_mul=silu_mul,
    gelu_tanh_mul=gelu_tanh_mul,
    moe=moe,
    rotary=rotary,
    write_kv=write_kv,
    copy_blocks=copy_blocks,
    attention_inputs=attention_inputs,
    attention=attention,
    vision_attention=vision_attention,
)
