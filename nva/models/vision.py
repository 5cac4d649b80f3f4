"""The vision tower: an image's patches in, one vector for each of its tokens out.

The law: an image is computed alone, so its features are the same whatever else is in a batch, and may be kept.
Read next: state/media.py for what an image is, decoder.py for where its features go.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nva.kernels import Kernels
from nva.models.params import Params
from nva.models.spec import VisionSpec
from nva.state.media import Image

_NORM_EPS = 1e-6


def encode_image(spec: VisionSpec, kernels: Kernels, params: Params, image: Image, device: torch.device) -> Tensor:
    """Features [1 + n_deepstack, n_tokens, out_size] for the input and the first layers of the decoder.

    A vision transformer (Dosovitskiy et al. 2020) with DeepStack (Meng et al. 2024), as in Qwen3-VL.
    """
    rows, columns = _patch_places(image, spec.merge_size, device)
    patches = torch.from_numpy(image.patches.copy()).to(device, params["grid"].dtype)
    x = kernels.linear(patches, params["patch"], params["patch_bias"])
    x = x + _interpolated(params["grid"], spec.grid_side, rows, columns)
    cos, sin = _turns(spec, rows, columns)
    levels: list[Tensor] = []
    for i, layer in enumerate(params["layers"]):
        x = x + _attention(spec, kernels, layer, _norm(x, layer, "vision_input_norm"), cos, sin)
        x = x + _mlp(kernels, layer, _norm(x, layer, "vision_post_norm"))
        if i in spec.deepstack_layers:
            deepstack = params["deepstack"][spec.deepstack_layers.index(i)]
            merged = _norm(_merged(spec, x), deepstack, "deepstack_norm")
            levels.append(_project(kernels, deepstack, "deepstack", merged))
    merged = _merged(spec, _norm(x, params, "merger_norm"))
    return torch.stack([_project(kernels, params, "merger", merged), *levels])


def _patch_places(image: Image, merge_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The row and column [n_patches] of each patch in its image; the patches of one feature follow each other."""
    n_rows, n_columns = image.n_rows * merge_size, image.n_columns * merge_size
    place = torch.arange(n_rows * n_columns, device=device).view(n_rows, n_columns)
    tiles = place.unflatten(1, (-1, merge_size)).unflatten(0, (-1, merge_size)).transpose(1, 2)
    return tiles.flatten() // n_columns, tiles.flatten() % n_columns


def _interpolated(grid: Tensor, side: int, rows: Tensor, columns: Tensor) -> Tensor:
    """The learned grid [side^2, D] stretched over an image, bilinear, corner on corner: [n_patches, D]."""
    corners = [
        grid[row * side + column] * (row_share * column_share)[:, None]
        for row, row_share in _between(rows, side)
        for column, column_share in _between(columns, side)
    ]
    return torch.stack(corners).sum(0).to(grid.dtype)


def _between(places: Tensor, side: int) -> list[tuple[Tensor, Tensor]]:
    """The two lines of the grid beside each place, and the share of each."""
    at = places * ((side - 1) / places.max().clamp(min=1))
    low = at.floor()
    return [(low.long(), 1 - (at - low)), ((low.long() + 1).clamp(max=side - 1), at - low)]


def _turns(spec: VisionSpec, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [n_patches, D] float32: a quarter of each head's numbers turn by row, a quarter by column, twice."""
    n = spec.hidden_size // spec.n_heads // 2
    frequencies = 1.0 / spec.rope_theta ** (torch.arange(0, n, 2, dtype=torch.float32, device=rows.device) / n)
    angles = torch.cat([places[:, None] * frequencies for places in (rows, columns)] * 2, dim=-1)
    return angles.cos(), angles.sin()


def _attention(spec: VisionSpec, kernels: Kernels, layer: Params, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n_patches, D]: every patch sees all others."""
    heads = kernels.linear(x, layer["vision_qkv"], layer["vision_qkv_bias"]).unflatten(-1, (3, spec.n_heads, -1))
    q, k, v = heads.unbind(1)
    turned = kernels.rotary(q.float(), k.float(), cos, sin)
    q, k = (each.to(x.dtype) for each in turned)
    out = kernels.vision_attention(q, k, v, q.shape[-1] ** -0.5)
    return kernels.linear(out.flatten(1), layer["vision_o"], layer["vision_o_bias"])


def _mlp(kernels: Kernels, layer: Params, x: Tensor) -> Tensor:
    x = F.gelu(kernels.linear(x, layer["fc1"], layer["fc1_bias"]), approximate="tanh")
    return kernels.linear(x, layer["fc2"], layer["fc2_bias"])


def _norm(x: Tensor, params: Params, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], params[name], params[f"{name}_bias"], _NORM_EPS)


def _merged(spec: VisionSpec, x: Tensor) -> Tensor:
    """[n_patches, D] -> [n_tokens, merge_size^2 * D]."""
    return x.reshape(-1, spec.merge_size**2 * spec.hidden_size)


def _project(kernels: Kernels, params: Params, name: str, x: Tensor) -> Tensor:
    """[n_tokens, merge_size^2 * D] -> [n_tokens, out_size]."""
    x = F.gelu(kernels.linear(x, params[f"{name}_fc1"], params[f"{name}_fc1_bias"]))
    return kernels.linear(x, params[f"{name}_fc2"], params[f"{name}_fc2_bias"])
