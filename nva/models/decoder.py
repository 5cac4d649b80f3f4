"""The decoder: token ids in, logits out, for every family. Only the cache is written, in place.

The law: how models differ is read from the spec, what a device does best from the kernels; neither
is asked who it is, so there is one decoder. It traces with torch.compile: no branch depends on a
tensor's values. Read next: kernels/reference.py for what each call computes; forward.py, which
prepares the inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from nva.kernels import Kernels
from nva.models.params import Params
from nva.models.rope import rope_table
from nva.models.spec import ExpertSpec, ModelSpec

Cache = tuple[Tensor, Tensor]
"""Keys and values of one layer, [n_ids, block_size, n_kv_heads, head_dim] each."""

CosSin = tuple[tuple[Tensor, Tensor], ...]
"""(cos, sin) for each rope of a model: over all positions, [max_model_len, dim / 2], or at T
tokens, [T, dim]."""


@attrs.frozen(kw_only=True)
class Inputs:
    """T packed tokens on the device."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32, or [3, T] for a model with rope_axes
    slots: Tensor  # [T] int32
    logit_index: Tensor  # [L] int32, the tokens that want logits
    attention: Any  # of kernels.attention_inputs
    rope_tables: CosSin
    rope_axes: Tensor | None = None  # [3, 1, dim / 2] float32, for a model that has them
    is_padding: Tensor | None = None  # [T] bool, for a model with experts
    # 1 + n_deepstack of [T, H]: features where tokens show an image, 0 elsewhere
    features: tuple[Tensor, ...] | None = None
    is_image: Tensor | None = None  # [T, 1] bool


def rope_tables(spec: ModelSpec, max_model_len: int, device: torch.device) -> CosSin:
    """The table of every rope, float32."""
    tables = (rope_table(rope, max_model_len) for rope in spec.ropes)
    return tuple((cos.to(device), sin.to(device)) for cos, sin in tables)


def rope_axes(spec: ModelSpec, device: torch.device) -> Tensor | None:
    """[3, 1, dim / 2] float32: 1 where a pair turns by its token's position on that axis (M-RoPE),
    0 elsewhere."""
    if not spec.rope_axes:
        return None
    axes = torch.tensor(spec.rope_axes, dtype=torch.int64)
    return torch.eye(3)[:, axes].unsqueeze(1).to(device)


def decode(
    spec: ModelSpec, kernels: Kernels, params: Params, caches: tuple[Cache, ...], inputs: Inputs
) -> Tensor:
    """Logits [L, vocab_size] float32 at inputs.logit_index; the tokens' keys and values go into the
    caches.

    `residual` is the stream that runs through all layers; each norm takes in what the part before
    it has added. Once the last layer has attended, only the tokens that want logits go on."""
    residual = _embedding(spec, params["embed"], inputs)
    cos_sin = _gather_cos_sin(inputs, residual.dtype)
    norms = [layer["input_norm"] for layer in params["layers"]] + [params["norm"]]
    features, is_padding = inputs.features, inputs.is_padding
    x = kernels.rms_norm(residual, norms[0], *_norm_options(spec))

    for i, layer in enumerate(params["layers"]):
        # 1. Attention.
        attend = Attend(caches[i], cos_sin[spec.rope_ids[i]], spec.windows[i], inputs)
        x = _attention(spec, kernels, layer, x, attend)
        if i == spec.n_layers - 1:
            wanted = (x, residual, features, is_padding)
            x, residual, features, is_padding = _rows(wanted, inputs.logit_index)
        x = _added(spec, kernels, x, layer.get("attention_out_norm"))
        x, residual = kernels.add_rms_norm(x, residual, layer["post_norm"], *_norm_options(spec))

        # 2. MLP, or experts.
        experts = spec.experts[i]
        if experts:
            x = _moe(experts, kernels, layer, x, is_padding)
        else:
            x = _mlp(spec, kernels, layer, x)
        x = _added(spec, kernels, x, layer.get("mlp_out_norm"))
        x = _with_features(x, features, i + 1)
        x, residual = kernels.add_rms_norm(x, residual, norms[i + 1], *_norm_options(spec))

    return _scaled(kernels.linear(x, params["head"]).float(), spec.logit_scale)


def _rows(x: Any, index: Tensor) -> Any:
    """Those rows of every tensor in x, a tensor, a tuple of x, or None."""
    if isinstance(x, tuple):
        return tuple(_rows(each, index) for each in x)
    return None if x is None else x.index_select(0, index)


def _embedding(spec: ModelSpec, table: Tensor, inputs: Inputs) -> Tensor:
    """[T, H]. A scale is rounded to the model's dtype, since Gemma was trained with the rounded
    one."""
    x = F.embedding(inputs.token_ids, table)
    if spec.embed_scale != 1:
        x = x * x.new_full((), spec.embed_scale)
    if inputs.features is not None:
        x = torch.where(inputs.is_image, inputs.features[0], x)
    return x


def _with_features(x: Tensor, features: tuple[Tensor, ...] | None, level: int) -> Tensor:
    """What a layer adds, and what an image adds after it."""
    if features is None or level >= len(features):
        return x
    return x + features[level]


def _norm_options(spec: ModelSpec) -> tuple[float, bool]:
    """What the norms want to know beside their weight."""
    return spec.norm_eps, spec.unit_offset


def _added(spec: ModelSpec, kernels: Kernels, x: Tensor, norm: Tensor | None) -> Tensor:
    """What an attention or MLP that gives x [T, H] adds to the stream."""
    if norm is not None:
        x = kernels.rms_norm(x, norm, *_norm_options(spec))
    return _scaled(x, spec.residual_scale)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _gather_cos_sin(inputs: Inputs, dtype: torch.dtype) -> CosSin:
    """cos and sin at the tokens' positions, in the model's dtype. With M-RoPE each pair takes its
    position from one of three axes."""

    def gather(table: Tensor) -> Tensor:
        half = table.index_select(0, inputs.positions.flatten())
        if inputs.rope_axes is not None:  # two of three products are zeros, so the sum is exact
            half = (half.unflatten(0, (3, -1)) * inputs.rope_axes).sum(0)
        return torch.cat([half] * 2, dim=-1).to(dtype)

    return tuple((gather(cos), gather(sin)) for cos, sin in inputs.rope_tables)


class Attend(NamedTuple):
    """What a layer's attention reads beside its parameters."""

    cache: Cache
    cos_sin: tuple[Tensor, Tensor]  # [T, dim] each
    window: int | None
    inputs: Inputs


def _attention(
    spec: ModelSpec, kernels: Kernels, layer: Params, x: Tensor, attend: Attend
) -> Tensor:
    """x [T, H] -> [T, H]. Keys and values are written before any query reads, so chunks and decode
    are one path."""
    qkv = kernels.linear(x, layer["qkv"], layer.get("qkv_bias"))
    heads = qkv.unflatten(-1, (-1, spec.head_dim))
    q, k, v = heads.split((spec.n_heads, spec.n_kv_heads, spec.n_kv_heads), dim=1)
    if spec.qk_norm:
        q = kernels.rms_norm(q, layer["q_norm"], *_norm_options(spec))
        k = kernels.rms_norm(k, layer["k_norm"], *_norm_options(spec))
    q, k = kernels.rotary(q, k, *attend.cos_sin)
    kernels.write_kv(k, v, *attend.cache, attend.inputs.slots)
    scale, window = spec.attn_scale, attend.window
    out = kernels.attention(q, *attend.cache, attend.inputs.attention, scale, window)
    return kernels.linear(out.flatten(1), layer["o"], layer.get("o_bias"))


def _mlp(spec: ModelSpec, kernels: Kernels, layer: Params, x: Tensor) -> Tensor:
    """x [T, H] -> [T, H], gated: Shazeer 2020, GLU Variants Improve Transformer."""
    x = kernels.linear(x, layer["gate_up"], layer.get("gate_up_bias"))
    activate = kernels.silu_mul if spec.activation == "silu" else kernels.gelu_tanh_mul
    x = activate(x)
    return kernels.linear(x, layer["down"], layer.get("down_bias"))


def _moe(spec: ExpertSpec, kernels: Kernels, layer: Params, x: Tensor, is_padding: Any) -> Tensor:
    """x [T, H] -> [T, H]: each token by a few experts, and by one that computes all, as far as its
    own gate opens."""
    logits = kernels.linear(x, layer["router"])
    experts = layer["experts_gate_up"], layer["experts_down"]
    out = kernels.moe(x, logits, *experts, spec.n_active, spec.normalize, is_padding)
    if spec.shared_size:
        gated = kernels.silu_mul(kernels.linear(x, layer["shared_gate_up"]))
        shared = kernels.linear(gated, layer["shared_down"])
        out = out + torch.sigmoid(kernels.linear(x, layer["shared_gate"])) * shared
    return out
