"""The forward: what runs on the device in a step. `(params, kv, batch) -> (logits, kv)`.

The law: the cache is donated. A KV handle serves one forward, which writes into it and hands on a
new handle; a forward that raises has not used its handle up, and may be run again. Read next:
models/decoder.py for the computation, kernels/__init__.py for what a device brings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from nva.kernels import Device, Kernels, Layout
from nva.kernels.cpu.device import PLAIN
from nva.models.decoder import Cache, Inputs, decode, rope_axes, rope_tables
from nva.models.params import Params
from nva.models.spec import ModelSpec, VisionSpec
from nva.models.vision import encode_image
from nva.state.bounds import Bounds, check_batch
from nva.state.columns import Int
from nva.state.generation import COLD, check_generation
from nva.state.limits import Limits
from nva.state.plan import BATCH_ARRAYS, Batch


@attrs.define(eq=False)
class KV:
    """A single-use handle on the keys and values of all layers, as a donated buffer is in JAX."""

    _layers: tuple[Cache, ...] | None
    generation: bytes = COLD  # what was written to the caches, see state/generation.py

    @property
    def layers(self) -> tuple[Cache, ...]:
        """The caches, [n_ids, block_size, n_kv_heads, head_dim] each. Raises RuntimeError if the
        handle is used up."""
        if self._layers is None:
            raise RuntimeError(
                "this KV handle was already given to a forward, which has overwritten what it "
                "stood for; keep the handle that the forward returned: "
                "logits, kv = forward(params, kv, batch)"
            )
        return self._layers

    def renew(self, generation: bytes = COLD) -> KV:
        """The handle for the next forward, of this generation; this one is used up."""
        fresh = KV(self.layers, generation)
        self._layers = None
        return fresh


Forward = Callable[[Params, KV, Batch], "tuple[Tensor, KV]"]


def empty_kv(spec: ModelSpec, limits: Limits, dtype: torch.dtype, device: Device = PLAIN) -> KV:
    """Caches of zeros for all block ids, those of scratch included."""
    shape = cache_shape(spec, limits.block_size, limits.n_scratch + limits.n_blocks)
    caches = [device.empty_cache(shape, dtype, device.where) for _ in range(2 * spec.n_layers)]
    return KV(tuple(zip(caches[::2], caches[1::2], strict=True)))


def cache_shape(spec: ModelSpec, block_size: int, n_ids: int) -> tuple[int, int, int, int]:
    """The shape of the keys, or of the values, of one layer."""
    return n_ids, block_size, spec.n_kv_heads, spec.head_dim


def make_forward(
    spec: ModelSpec, limits: Limits, device: Device, enforce_eager: bool = False
) -> Forward:
    """The forward of a model: logits are [L, vocab_size] float32, one row per entry of
    batch.logit_index.

    It is compiled if the device gains by it, once per shape of the batch, unless enforce_eager
    forbids it. It raises ValueError, before it writes anything, for a batch that names tokens,
    positions or slots beyond the model or the cache."""
    kernels, where = device.kernels, device.where
    tables, axes = rope_tables(spec, limits.max_model_len, where), rope_axes(spec, where)
    n_scratch_slots = limits.n_scratch * limits.block_size
    spread = make_spread(spec.vision, kernels, where) if spec.vision else None
    compute = functools.partial(decode, spec, kernels)
    compute = compute if enforce_eager else device.compiled(compute)

    @torch.inference_mode()
    def forward(params: Params, kv: KV, batch: Batch) -> tuple[Tensor, KV]:
        caches = kv.layers
        check_caches(caches, spec, params)
        check_generation(batch.before, kv.generation)
        n_ids, block_size, _, _ = caches[0][0].shape
        bounds = Bounds(
            n_ids=n_ids,
            block_size=block_size,
            vocab_size=spec.vocab_size,
            max_model_len=limits.max_model_len,
            position_axes=3 if spec.rope_axes else 1,
        )
        check_batch(batch, bounds)
        on_host = {name: getattr(batch, name) for name in BATCH_ARRAYS}
        arrays = _to_device(batch.buffer, on_host, device)
        for cache in caches if len(batch.copies) else ():
            kernels.copy_blocks(*cache, arrays["copies"])
        inputs = Inputs(
            token_ids=arrays["token_ids"],
            positions=arrays["positions"] if spec.rope_axes else arrays["positions"][0],
            slots=arrays["slots"],
            logit_index=arrays["logit_index"],
            attention=kernels.attention_inputs(_layout(on_host), _layout(arrays), caches[0][0]),
            rope_tables=tables,
            rope_axes=axes,
            # Padding, and nothing else, is written to the scratch blocks.
            is_padding=arrays["slots"] < n_scratch_slots if any(spec.experts) else None,
        )
        # With buckets the forward is compiled. Steps without images then pass zeros for features,
        # so that both kinds share one graph.
        if spread and (batch.images or limits.token_buckets):
            features, is_image = spread(params["vision"], batch)
            inputs = attrs.evolve(inputs, features=features, is_image=is_image)
        logits = compute(params, caches, inputs)
        return logits, kv.renew(batch.after)

    return forward


def check_caches(caches: tuple[Cache, ...], spec: ModelSpec, params: Params) -> None:
    """Raise ValueError unless the caches are this model's, in the type of its parameters."""
    cache = caches[0][0]
    found = len(caches), *cache.shape[2:], cache.dtype
    wanted = spec.n_layers, spec.n_kv_heads, spec.head_dim, params["embed"].dtype
    if found != wanted:
        raise ValueError(
            "the cache has {} layers of {} KV heads of {} in {}".format(*found)
            + ", the model {} of {} of {} in {}; ".format(*wanted)
            + "make one with empty_kv(spec, limits, dtype, device)"
        )


def make_spread(spec: VisionSpec, kernels: Kernels, where: torch.device) -> Any:
    """A function that gives the features of a batch's images at its tokens, 1 + n_deepstack of [T,
    H], and which those tokens are [T, 1]. It takes the vision tower's parameters and the batch."""
    encode = make_encode(spec, kernels, where)

    def spread(params: Params, batch: Batch) -> tuple[tuple[Tensor, ...], Tensor]:
        found = encode(params, batch)
        n_levels, n_tokens = 1 + len(spec.deepstack_layers), len(batch.token_ids)
        features = params["grid"].new_zeros(n_levels, n_tokens, spec.out_size)
        is_image = torch.zeros(n_tokens, 1, dtype=torch.bool, device=where)
        for span in batch.images:
            at = slice(span.packed, span.packed + span.count)
            features[:, at] = found[span.image.digest][:, span.first : span.first + span.count]
            is_image[at] = True
        return features.unbind(0), is_image

    return spread


def make_encode(spec: VisionSpec, kernels: Kernels, where: torch.device) -> Any:
    """A function that gives the features of a batch's images by their digests, [1 + n_deepstack,
    n_tokens, H] each.

    It keeps those of the last batch that had images, since a chunk that ends inside one is followed
    by another. The tower is never compiled: its shapes are the sizes of images, and each occurs a
    few times at most."""
    kept: tuple[Params, dict[bytes, Tensor]] = {}, {}

    def encode(params: Params, batch: Batch) -> dict[bytes, Tensor]:
        nonlocal kept
        known = kept[1] if kept[0] is params else {}
        images = {span.image.digest: span.image for span in batch.images}
        encode_one = functools.partial(encode_image, spec, kernels, params, device=where)
        found = {
            digest: known[digest] if digest in known else encode_one(image)
            for digest, image in images.items()
        }
        kept = (params, found) if found else kept
        return found

    return encode


_LAYOUT = tuple(attrs.fields_dict(Layout))


def _to_device(buffer: Int, arrays: Mapping[str, Int], device: Device) -> dict[str, Tensor]:
    """The arrays that follow each other in a buffer, as views of one tensor: copied at once."""
    staged = torch.empty(len(buffer), dtype=torch.int32, pin_memory=device.pins_memory)
    staged.numpy()[:] = buffer
    moved = staged.to(device.where, non_blocking=True)
    parts = moved.split([array.size for array in arrays.values()])
    return {
        name: part.view(array.shape)
        for part, (name, array) in zip(parts, arrays.items(), strict=True)
    }


def _layout(arrays: Mapping[str, Any]) -> Layout:
    return Layout(**{name: arrays[name] for name in _LAYOUT})
