"""The vision tower: an image's patches in, one vector for each of its tokens out.

A vision transformer (Dosovitskiy et al. 2020) with DeepStack (Meng et al. 2024), as in Qwen3-VL. P
patches of D numbers go through its layers; each `merge_size`^2 of them become one token.

The law: an image is computed alone, so its features are the same whatever else is in a batch, and
may be kept. Memory grows with P, never with P^2: a photograph of 12 megapixels has 47,000 patches.
Read next: state/media.py for what an image is, decoder.py for where its features go.
"""

from __future__ import annotations

import functools

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from nva.kernels import Kernels
from nva.models.params import Params
from nva.models.spec import VisionSpec
from nva.state.media import Image

_NORM_EPS = 1e-6
_PATCHES_AT_ONCE = 2048  # that are copied to the device together, 12 MB of Qwen3-VL's


@attrs.frozen(kw_only=True)
class Places:
    """Where an image's P patches lie, in the terms that the tower reads; the image's size alone
    decides it."""

    # Position embeddings are read bilinearly from a learned grid of side^2 points.
    corners: Tensor  # [4, P] int64, the points of the grid around a patch
    shares: Tensor  # [4, P] float32, the weight of each of them
    cos: Tensor  # [P, head_dim] float32, of the rope
    sin: Tensor  # [P, head_dim] float32


def encode_image(
    spec: VisionSpec, kernels: Kernels, params: Params, image: Image, device: torch.device
) -> Tensor:
    """Features [1 + n_deepstack, n_tokens, out_size] for the input and the first layers of the
    decoder."""
    at = place_patches(spec, image.n_rows, image.n_columns, device)
    dtype = params["grid"].dtype
    pieces = []
    for start in range(0, len(image.patches), _PATCHES_AT_ONCE):
        piece = image.patches[start : start + _PATCHES_AT_ONCE]
        pieces.append(_embed(kernels, params, torch.tensor(piece, dtype=dtype, device=device)))
    return _encode(spec, kernels, params, torch.cat(pieces), at)


def encode_patches(
    spec: VisionSpec, kernels: Kernels, params: Params, patches: Tensor, at: Places
) -> Tensor:
    """The same for patches [P, patch size] in the model's dtype, on the device. It traces with
    torch.compile, one graph for each P."""
    return _encode(spec, kernels, params, _embed(kernels, params, patches), at)


def place_patches(spec: VisionSpec, n_rows: int, n_columns: int, device: torch.device) -> Places:
    """The places of the patches of n_rows * n_columns features. A host works them out in integers
    and float32."""
    rows, columns = _rows_and_columns(
        n_rows * spec.merge_size, n_columns * spec.merge_size, spec.merge_size
    )
    corners, shares = _corners(spec.grid_side, rows, columns)
    cos, sin = _cos_sin(spec, rows, columns)
    return Places(
        corners=corners.to(device),
        shares=shares.to(device),
        cos=cos.to(device),
        sin=sin.to(device),
    )


def _embed(kernels: Kernels, params: Params, patches: Tensor) -> Tensor:
    """[P, patch size] -> [P, D]."""
    return kernels.linear(patches, params["patch"], params["patch_bias"])


def _encode(spec: VisionSpec, kernels: Kernels, params: Params, x: Tensor, at: Places) -> Tensor:
    """Embedded patches [P, D] -> [1 + n_deepstack, n_tokens, out_size]."""
    x = x + _position_embeddings(params["grid"], at)
    levels: list[Tensor] = []
    for i, layer in enumerate(params["layers"]):
        x = x + _attention(spec, kernels, layer, _norm(x, layer, "vision_input_norm"), at)
        x = x + _mlp(kernels, layer, _norm(x, layer, "vision_post_norm"))
        if i in spec.deepstack_layers:
            deepstack = params["deepstack"][spec.deepstack_layers.index(i)]
            merged = _norm(_merged(spec, x), deepstack, "deepstack_norm")
            levels.append(_project(kernels, deepstack, "deepstack", merged))
    merged = _merged(spec, _norm(x, params, "merger_norm"))
    return torch.stack([_project(kernels, params, "merger", merged), *levels])


def _rows_and_columns(n_rows: int, n_columns: int, merge_size: int) -> tuple[Tensor, Tensor]:
    """The row and column [P] of each patch of n_rows * n_columns; the patches of one feature follow
    each other."""
    index = torch.arange(n_rows * n_columns).view(n_rows, n_columns)
    tiles = index.unflatten(1, (-1, merge_size)).unflatten(0, (-1, merge_size)).transpose(1, 2)
    return tiles.flatten() // n_columns, tiles.flatten() % n_columns


def _corners(side: int, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The points [4, P] of a grid of side^2 around each patch, and their shares [4, P]: the grid is
    stretched over the image, corner on corner, and read bilinearly."""
    points, shares = [], []
    for row, row_share in _grid_lines(rows, side):
        for column, column_share in _grid_lines(columns, side):
            points.append(row * side + column)
            shares.append(row_share * column_share)
    return torch.stack(points), torch.stack(shares)


def _grid_lines(indices: Tensor, side: int) -> list[tuple[Tensor, Tensor]]:
    """The two lines of the grid beside each row, or column, and the share of each."""
    at = indices * ((side - 1) / indices.max().clamp(min=1))
    low = at.floor()
    high = (low + 1).clamp(max=side - 1)
    return [(low.long(), 1 - (at - low)), (high.long(), at - low)]


def _position_embeddings(grid: Tensor, at: Places) -> Tensor:
    """The learned grid [side^2, D] at the patches: [P, D], a mean taken in float32."""
    corners = zip(at.corners, at.shares, strict=True)
    weighted = (grid.index_select(0, points) * share[:, None] for points, share in corners)
    return functools.reduce(torch.add, weighted).to(grid.dtype)  # one at a time


def _cos_sin(spec: VisionSpec, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [P, head_dim] float32: a quarter of each head's numbers turn by row, a quarter by
    column, twice."""
    n = spec.hidden_size // spec.n_heads // 2
    frequencies = 1.0 / spec.rope_theta ** (torch.arange(0, n, 2, dtype=torch.float32) / n)
    angles = [indices[:, None] * frequencies for indices in (rows, columns)]
    both = torch.cat([*angles, *angles], dim=-1)
    return both.cos(), both.sin()


def _attention(spec: VisionSpec, kernels: Kernels, layer: Params, x: Tensor, at: Places) -> Tensor:
    """x [P, D]: every patch sees all others. The rope is float32, as the tower was trained."""
    qkv = kernels.linear(x, layer["vision_qkv"], layer["vision_qkv_bias"])
    q, k, v = qkv.unflatten(-1, (3 * spec.n_heads, -1)).split((spec.n_heads,) * 3, dim=1)
    q, k = kernels.rotary(q.float(), k.float(), at.cos, at.sin)
    q, k = q.to(x.dtype), k.to(x.dtype)
    out = kernels.vision_attention(q, k, v, q.shape[-1] ** -0.5)
    return kernels.linear(out.flatten(1), layer["vision_o"], layer["vision_o_bias"])


def _mlp(kernels: Kernels, layer: Params, x: Tensor) -> Tensor:
    x = F.gelu(kernels.linear(x, layer["fc1"], layer["fc1_bias"]), approximate="tanh")
    return kernels.linear(x, layer["fc2"], layer["fc2_bias"])


def _norm(x: Tensor, params: Params, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], params[name], params[f"{name}_bias"], _NORM_EPS)


def _merged(spec: VisionSpec, x: Tensor) -> Tensor:
    """[P, D] -> [n_tokens, merge_size^2 * D]."""
    return x.reshape(-1, spec.merge_size**2 * spec.hidden_size)


def _project(kernels: Kernels, params: Params, name: str, x: Tensor) -> Tensor:
    """[n_tokens, merge_size^2 * D] -> [n_tokens, out_size]."""
    x = F.gelu(kernels.linear(x, params[f"{name}_fc1"], params[f"{name}_fc1_bias"]))
    return kernels.linear(x, params[f"{name}_fc2"], params[f"{name}_fc2_bias"])
