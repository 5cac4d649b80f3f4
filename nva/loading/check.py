"""Before the first request, on a device that compiles: it is checked, its memory measured, every
shape compiled.

The law: a step that serves a request meets nothing for the first time. A device that computes
something wrong in silence is found here, by running a tiny model with the heads of the real one
beside the reference. Read next: load.py, which calls these; kernels/npu, the device that needs
them."""

from __future__ import annotations

import math
from typing import cast

import attrs
import numpy as np
import torch

from nva.forward import empty_kv, make_forward
from nva.kernels import Kernels, backend, reference
from nva.models.params import Params, random_params
from nva.models.spec import ModelSpec, VisionSpec
from nva.models.vision import encode_image
from nva.state.engine import EngineState, empty, is_busy
from nva.state.limits import Limits, blocks_for
from nva.state.media import Image, Media, Placed, image, media
from nva.state.request import SamplingParams, request
from nva.steps.commit import commit
from nva.steps.pack import pack
from nva.steps.sample import sample
from nva.steps.schedule import schedule
from nva.steps.submit import submit

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Twice the deviation that rounding was seen to make, in standard deviations of the logits; wrong
operators make 1."""


def self_check(spec: ModelSpec, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
    """Run a tiny model with this one's heads, ropes and windows on the device and on the reference.

    Raises RuntimeError if their logits differ by more than rounding. The reference and the CPU's
    kernels need no check."""
    if kernels is backend("cpu") or kernels is reference:
        return
    tiny = _tiny(spec)
    limits = Limits(
        vocab_size=tiny.vocab_size,
        max_model_len=640,  # some stacks ignore a mask beyond 512
        n_blocks=3 * blocks_for(640, kernels.block_size),
        block_size=kernels.block_size,
        max_rows=3,
        max_batched_tokens=1024,
        position_axes=3 if tiny.rope_axes else 1,
        token_buckets=(16, 600, 1024),
        row_buckets=(4,),
    )
    deviation = _deviation(tiny, limits, kernels, dtype, device)
    if tiny.vision:
        deviation = np.maximum(deviation, _tower_deviation(tiny, kernels, dtype, device))
    if not deviation < TOLERANCE[dtype]:
        raise RuntimeError(
            "the device computes something else than the reference: logits of a tiny model with "
            "this model's heads "
            f"({spec.n_heads} and {spec.n_kv_heads} of {spec.head_dim}), or what it makes of an "
            "image, are "
            f"{deviation:.2g} standard deviations off. "
            "Run `nva doctor`; try graph='eager'; see Troubleshooting in docs/npu.md"
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


def _deviation(
    spec: ModelSpec, limits: Limits, kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> float:
    """The worst deviation of logits, in standard deviations, over a prefill and steps that mix it
    with decoding."""
    sides = _sides(kernels, device)
    forwards = [make_forward(spec, limits, each, where) for each, where in sides]
    kvs = [empty_kv(spec, limits, dtype, where) for _, where in sides]
    weights = [_weights(spec, each, dtype, where) for each, where in sides]
    state, worst = _three_prompts(spec, limits), 0.0
    while is_busy(state):
        state, plan = schedule(state)
        batch, draw = pack(state, plan)
        results = [
            forward(*each, batch) for forward, *each in zip(forwards, weights, kvs, strict=True)
        ]
        kvs = [kv for _, kv in results]
        logits, other = (found.cpu()[: batch.n_logits] for found, _ in results)
        worst = np.maximum(
            worst, float((logits - other).abs().max() / logits.std())
        )  # unlike max(), keeps a NaN
        state, _ = commit(state, plan, sample(results[0][0], draw))
    return float(worst)


def _tower_deviation(
    spec: ModelSpec, kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> float:
    """The same of an image's features, since logits tell little of them."""
    features, other = (
        encode_image(
            spec.vision,
            each,
            _weights(spec, each, dtype, where)["vision"],
            _picture(spec.vision),
            where,
        )
        for each, where in _sides(kernels, device)
    )
    return float((features - other.cpu()).abs().max() / features.std())


def _sides(kernels: Kernels, device: torch.device) -> list[tuple[Kernels, torch.device]]:
    """What is compared: the reference on the CPU, and the device."""
    return [(cast(Kernels, reference), torch.device("cpu")), (kernels, device)]


def _weights(spec: ModelSpec, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> Params:
    """The same random weights on every device."""
    params = random_params(spec, dtype, torch.Generator().manual_seed(0), kernels, std=0.2)
    return torch.utils._pytree.tree_map(lambda tensor: tensor.to(device), params)


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
