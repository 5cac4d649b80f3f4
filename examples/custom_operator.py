"""How to add an operator of your own: the rotary embedding, from schema to gradient.

Six parts make an operator that runs on every device, traces, converts for an NPU's graph engine and
differentiates: its schema, its meaning, its shapes, its NPU kernel, its conversion, its backward.
The law: the meaning, in plain torch, is the specification of the other five. Read next:
docs/custom_op.md, which tells when each part is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("nva::rotary", mutates_args=())
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Schema and meaning: x [T, N, D] turned by cos and sin [T, D], halves as in GPT-NeoX (Su et
    al. 2021).

    The schema is read from this signature: (Tensor x, Tensor cos, Tensor sin) -> Tensor, nothing
    changed in place."""
    return x * cos[:, None] + _turned(x) * sin[:, None]


def _turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


@rotary.register_fake
def _shapes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Shapes: what tracing asks for, on tensors without values. Errors here appear when a graph is
    traced."""
    if cos.shape != (x.shape[0], x.shape[2]) or sin.shape != cos.shape:
        raise ValueError(
            f"x is {tuple(x.shape)}, so cos and sin are {(x.shape[0], x.shape[2])}, not "
            f"{tuple(cos.shape)}"
        )
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    """What the backward will need."""
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Backward: the transpose of a turn is the turn back, so x's gradient is grad turned by -sin,
    half by half."""
    x, cos, sin = ctx.saved_tensors
    low, high = (grad * sin[:, None]).chunk(2, dim=-1)
    grad_x = grad * cos[:, None] + torch.cat((high, -low), dim=-1)
    return grad_x, (grad * x).sum(1), (grad * _turned(x)).sum(1)


rotary.register_autograd(_backward, setup_context=_keep)


def register_npu() -> None:
    """Kernel and conversion for an NPU. Call it once torch_npu is imported; without it, an NPU runs
    the meaning."""
    import torchair
    from torchair.ge_concrete_graph import ge_apis as ge

    @rotary.register_kernel("npu")
    def kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """NPU kernel, for eager mode and ACL graphs: one fused operator, which wants 4
        dimensions."""
        return torch.ops.npu.npu_rotary_mul(
            x[None], cos[None, :, None], sin[None, :, None]
        ).squeeze(0)

    @torchair.register_fx_node_ge_converter(torch.ops.nva.rotary.default)
    def convert(x: Any, cos: Any, sin: Any, meta_outputs: Any = None) -> Any:
        """Conversion, for the graph engine: the same in Ascend IR, whose values are not torch
        tensors."""
        cos, sin = (ge.Unsqueeze(table, axes=[0, 2]) for table in (cos, sin))
        return ge.Squeeze(ge.RotaryMul(ge.Unsqueeze(x, axes=[0]), cos, sin), axis=[0])
