"""The vision tower: an image's patches in, one vector for each of its tokens out.

The law: an image is computed alone, so its features are the same whatever else is in a batch, and
may be kept. Read next: state/media.py for what an image is, decoder.py for where its features go.
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


@attrs.frozen(kw_only=True)
class Places:
    """Where an image's P patches lie, in the terms that the tower reads; the image's size alone
    decides it."""

    corners: Tensor  # [4, P] int64, the points of the learned grid around a patch
    shares: Tensor  # [4, P] float32, of each in it
    cos: Tensor  # [P, head_dim] float32
    sin: Tensor  # [P, head_dim] float32


def encode_image(
    spec: VisionSpec, kernels: Kernels, params: Params, image: Image, device: torch.device
) -> Tensor:
    """Features [1 + n_deepstack, n_tokens, out_size] for the input and the first layers of the
    decoder."""
    patches = torch.tensor(image.patches, dtype=params["grid"].dtype, device=device)
    return encode_patches(
        spec, kernels, params, patches, place_patches(spec, image.n_rows, image.n_columns, device)
    )


def place_patches(spec: VisionSpec, n_rows: int, n_columns: int, device: torch.device) -> Places:
    """The places of the patches of n_rows * n_columns features. A host works them out in integers
    and float32."""
    rows, columns = _patch_places(
        n_rows * spec.merge_size, n_columns * spec.merge_size, spec.merge_size
    )
    found = (*_corners(spec.grid_side, rows, columns), *_turns(spec, rows, columns))
    corners, shares, cos, sin = (each.to(device) for each in found)
    return Places(corners=corners, shares=shares, cos=cos, sin=sin)


def encode_patches(
    spec: VisionSpec, kernels: Kernels, params: Params, patches: Tensor, at: Places
) -> Tensor:
    """The same for patches [P, patch size] in the model's dtype. It traces with torch.compile, one
    graph for each P.

    A vision transformer (Dosovitskiy et al. 2020) with DeepStack (Meng et al. 2024), as in
    Qwen3-VL."""
    x = kernels.linear(patches, params["patch"], params["patch_bias"]) + _stretched(
        params["grid"], at
    )
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


def _patch_places(n_rows: int, n_columns: int, merge_size: int) -> tuple[Tensor, Tensor]:
    """The row and column [P] of each patch of n_rows * n_columns; the patches of one feature follow
    each other."""
    place = torch.arange(n_rows * n_columns).view(n_rows, n_columns)
    tiles = place.unflatten(1, (-1, merge_size)).unflatten(0, (-1, merge_size)).transpose(1, 2)
    return tiles.flatten() // n_columns, tiles.flatten() % n_columns


def _corners(side: int, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The points [4, P] of a grid of side^2 around each patch, and their shares [4, P]: the grid is
    stretched over the image, corner on corner, and read bilinearly."""
    around = [(row, column) for row in _between(rows, side) for column in _between(columns, side)]
    points = [row * side + column for (row, _), (column, _) in around]
    return torch.stack(points), torch.stack(
        [row_share * column_share for (_, row_share), (_, column_share) in around]
    )


def _stretched(grid: Tensor, at: Places) -> Tensor:
    """The learned grid [side^2, D] at the patches: [P, D], a mean taken in float32."""
    parts = (
        grid.index_select(0, points) * share[:, None]
        for points, share in zip(at.corners, at.shares, strict=True)
    )
    return functools.reduce(torch.add, parts).to(grid.dtype)


def _between(places: Tensor, side: int) -> list[tuple[Tensor, Tensor]]:
    """The two lines of the grid beside each place, and the share of each."""
    at = places * ((side - 1) / places.max().clamp(min=1))
    low = at.floor()
    return [(low.long(), 1 - (at - low)), ((low.long() + 1).clamp(max=side - 1), at - low)]


def _turns(spec: VisionSpec, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [P, head_dim] float32: a quarter of each head's numbers turn by row, a quarter by
    column, twice."""
    n = spec.hidden_size // spec.n_heads // 2
    frequencies = 1.0 / spec.rope_theta ** (torch.arange(0, n, 2, dtype=torch.float32) / n)
    angles = torch.cat([places[:, None] * frequencies for places in (rows, columns)] * 2, dim=-1)
    return angles.cos(), angles.sin()


def _attention(spec: VisionSpec, kernels: Kernels, layer: Params, x: Tensor, at: Places) -> Tensor:
    """x [P, D]: every patch sees all others. The rope is float32, as the tower was trained."""
    heads = kernels.linear(x, layer["vision_qkv"], layer["vision_qkv_bias"]).unflatten(
        -1, (3 * spec.n_heads, -1)
    )
    q, k, v = heads.split((spec.n_heads,) * 3, dim=1)
    turned = kernels.rotary(q.float(), k.float(), at.cos, at.sin)
    q, k = (each.to(x.dtype) for each in turned)
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
