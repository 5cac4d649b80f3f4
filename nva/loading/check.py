"""Before the first request, on a device that compiles: what it computes is compared with the
reference.

The law: a device that computes something wrong in silence doesn't serve. A tiny model with the
heads of the real one runs through the engine's one loop, by a forward that is two, the reference's
and the device's. Read next: load.py, which calls this; kernels/npu, the device that needs it."""

from __future__ import annotations

import functools
import math
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nva.forward import Forward, empty_kv, make_forward
from nva.kernels import Device
from nva.kernels.cpu.device import PLAIN
from nva.loop import Steps, step
from nva.models.params import Params, random_params
from nva.models.spec import ModelSpec, VisionSpec
from nva.models.vision import encode_image
from nva.state.engine import EngineState, empty, is_busy
from nva.state.errors import DeviceError
from nva.state.limits import Limits, blocks_for
from nva.state.media import Image, Media, Placed, image, media
from nva.state.plan import Batch
from nva.state.request import SamplingParams, request
from nva.steps.submit import submit

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Twice the deviation that rounding was seen to make, in standard deviations of the logits; wrong
operators make 1."""


def self_check(spec: ModelSpec, device: Device, dtype: torch.dtype) -> None:
    """Run a tiny model with this one's heads, ropes and windows on the device and on the reference.

    Raises DeviceError if their logits differ by more than rounding, or the device can't run it. A
    device that needs no check gets none."""
    if not device.is_checked:
        return
    tiny = _tiny(spec)
    limits = Limits(
        vocab_size=tiny.vocab_size,
        max_model_len=640,  # some stacks ignore a mask beyond 512
        n_blocks=3 * blocks_for(640, device.block_size),
        block_size=device.block_size,
        max_rows=3,
        max_batched_tokens=1024,
        position_axes=3 if tiny.rope_axes else 1,
        token_buckets=(16, 600, 1024),
        row_buckets=(4,),
    )
    try:
        found = _deviation_of_logits(tiny, limits, device, dtype)
        if tiny.vision:
            found = np.maximum(found, _deviation_of_features(tiny, device, dtype))
    except Exception as error:
        raise DeviceError(
            f"device {device.name} can't run a tiny model with {_heads(spec)} "
            f"({type(error).__name__}: {error}). {_ADVICE}"
        ) from error
    if not found < TOLERANCE[dtype]:
        raise DeviceError(
            f"device {device.name} computes something else than the reference: logits of a tiny "
            f"model with {_heads(spec)}, or what it makes of an image, are {found:.2g} standard "
            f"deviations off. {_ADVICE}"
        )


def _heads(spec: ModelSpec) -> str:
    return f"this model's heads ({spec.n_heads} and {spec.n_kv_heads} of {spec.head_dim})"


_ADVICE = (
    "Kernels of your own: write_kv, copy_blocks, attention_inputs and attention agree on how "
    "numbers lie in the cache, pack_linear, linear and moe on weights, and are replaced together; "
    "is_approximate=True says that a difference is meant. Else run `nva doctor`; try "
    "graph='eager'; see Troubleshooting in docs/npu.md"
)


def _tiny(spec: ModelSpec) -> ModelSpec:
    """One layer for each distinct rope, window and experts of a model; windows short enough to cut
    something off.

    All experts are active: which of two equally likely ones computes a token, rounding decides, and
    it would show."""
    windows = [None if window is None else min(window, 100) for window in spec.windows]
    few = {"n_experts": 8, "n_active": 8, "intermediate_size": 64}
    experts = [
        one and attrs.evolve(one, **few, shared_size=min(64, one.shared_size))
        for one in spec.experts
    ]
    kinds = list(dict.fromkeys(zip(spec.rope_ids, windows, experts, strict=True)))
    layers = dict(zip(("rope_ids", "windows", "experts"), zip(*kinds, strict=True), strict=True))
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    vision = spec.vision and _tiny_tower(spec.vision)
    return attrs.evolve(spec, **sizes, n_layers=len(kinds), vision=vision, **layers)


def _tiny_tower(spec: VisionSpec) -> VisionSpec:
    """One layer of two of a tower's heads, read by DeepStack if the tower has that."""
    width = 2 * spec.hidden_size // spec.n_heads
    sizes = {
        "n_layers": 1,
        "n_heads": 2,
        "hidden_size": width,
        "intermediate_size": 64,
        "out_size": 64,
    }
    return attrs.evolve(
        spec,
        **sizes,
        grid_side=min(spec.grid_side, 8),
        deepstack_layers=spec.deepstack_layers and (0,),
    )


def _deviation_of_logits(
    spec: ModelSpec, limits: Limits, device: Device, dtype: torch.dtype
) -> float:
    """The worst deviation over a prefill and steps that mix it with decoding."""
    sides = (PLAIN, device)
    forwards = [make_forward(spec, limits, side) for side in sides]
    params = tuple(_weights(spec, side, dtype) for side in sides)
    kv = tuple(empty_kv(spec, limits, dtype, side) for side in sides)
    seen: list[float] = []
    both = functools.partial(_both, *forwards, seen)
    state = _three_prompts(spec, limits)
    while is_busy(state):
        state, kv, _ = step(Steps(), both, params, state, kv)
    return float(np.max(seen))  # NaN if any is


def _both(
    expected: Forward, tested: Forward, seen: list[float], params: Any, kv: Any, batch: Batch
) -> tuple[Tensor, Any]:
    """Two forwards as one, whose parameters and caches are pairs. It answers what the first does,
    and notes how far the second is off."""
    logits, kv_expected = expected(params[0], kv[0], batch)
    other, kv_tested = tested(params[1], kv[1], batch)
    seen.append(_deviation(logits[: batch.n_logits], other[: batch.n_logits]))
    return logits, (kv_expected, kv_tested)


def _deviation(expected: Tensor, found: Tensor) -> float:
    """The largest difference, in standard deviations of what is expected."""
    return float((expected - found.cpu()).abs().max() / expected.std())


def _deviation_of_features(spec: ModelSpec, device: Device, dtype: torch.dtype) -> float:
    """The same of an image's features, since logits tell little of them."""
    expected, found = (
        encode_image(
            spec.vision,
            side.kernels,
            _weights(spec, side, dtype)["vision"],
            _picture(spec.vision),
            side.where,
        )
        for side in (PLAIN, device)
    )
    return _deviation(expected, found)


def _weights(spec: ModelSpec, side: Device, dtype: torch.dtype) -> Params:
    """The same random weights on every device."""
    generator = torch.Generator().manual_seed(0)
    params = random_params(spec, dtype, generator, side.kernels, std=0.2)
    # Packed weights hold sizes too, which lie nowhere.
    return tree_map_only(Tensor, lambda tensor: tensor.to(side.where), params)


def _three_prompts(spec: ModelSpec, limits: Limits) -> EngineState:
    """Requests of unequal lengths, the longest beyond 512 tokens, the last a step or two behind the
    first.

    The last sees an image if the model does, of more than 512 patches, which its first step cuts.
    """
    random = np.random.default_rng(0)
    greedy = SamplingParams(temperature=0, max_tokens=3)
    prompts = [random.integers(0, limits.vocab_size, length) for length in (560, 3, 600)]
    seen = [None, None, _one_image(spec.vision, 600) if spec.vision else None]
    requests = [
        request(i, prompt, greedy, media=each)
        for i, (prompt, each) in enumerate(zip(prompts, seen, strict=True))
    ]
    return submit(empty(limits), requests)


def _one_image(spec: VisionSpec, n_prompt: int) -> Media:
    """A picture in the last third of a prompt, or as near to that as it fits."""
    picture = _picture(spec)
    return media(
        [Placed(image=picture, start=min(2 * n_prompt // 3, n_prompt - picture.n_tokens))], n_prompt
    )


def _picture(spec: VisionSpec) -> Image:
    """Noise in 24 rows and columns of patches, so faint that what patches learn of each other
    shows."""
    side = -(-24 // spec.merge_size)
    shape = (side * spec.merge_size) ** 2, math.prod(spec.patch_shape)
    return image(np.random.default_rng(1).standard_normal(shape, np.float32) / 10, side, side)
