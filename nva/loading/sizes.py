"""How large everything is: the limits of a model on a device, and the blocks that its memory
holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nva.forward import KV, cache_shape, empty_kv
from nva.kernels import Device
from nva.models.spec import ModelSpec
from nva.state.checks import LARGEST_INT32
from nva.state.engine import EngineState, empty
from nva.state.limits import Limits, blocks_for

if TYPE_CHECKING:
    pass
from nva.loading.options import Options, policy_of


def limits_of(spec: ModelSpec, options: Options, device: Device) -> Limits:
    """The limits, the number of blocks being 1 if it is still to be found."""
    max_model_len = options.max_model_len or spec.max_position
    if max_model_len > spec.reach:
        raise ValueError(
            f"max_model_len is {max_model_len}; the model's positions reach {spec.reach}; set rope "
            "scaling in its "
            "config.json to go further"
        )
    max_batched_tokens = min(options.max_batched_tokens, options.max_rows * max_model_len)
    token_buckets, row_buckets = device.buckets(max_batched_tokens, options.max_rows, max_model_len)
    return Limits(
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        n_blocks=options.n_blocks or 1,
        block_size=options.block_size or device.block_size,
        max_rows=options.max_rows,
        max_batched_tokens=max_batched_tokens,
        position_axes=3 if spec.rope_axes else 1,
        prefix_caching=options.prefix_caching,
        token_buckets=token_buckets,
        row_buckets=row_buckets,
    )


def empty_engine(
    spec: ModelSpec, limits: Limits, dtype: torch.dtype, device: Device, options: Options
) -> tuple[KV, EngineState]:
    """The cache and a state without requests. Raises ValueError if there is no memory for them, or
    no number."""
    advice = "lower max_rows, max_model_len, or n_blocks and cache_memory"
    if (limits.n_scratch + limits.n_blocks) * limits.block_size > LARGEST_INT32:
        raise ValueError(
            f"the cache has {limits.n_blocks} blocks of {limits.block_size} tokens, more than "
            "slots can be numbered; "
            f"{advice}"
        )
    try:
        return empty_kv(spec, limits, dtype, device), empty(
            limits, policy_of(options), options.seed
        )
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ValueError(
            f"{limits.max_rows} rows of up to {limits.max_model_len} tokens and a cache of "
            f"{limits.n_blocks} blocks "
            f"don't fit into memory ({error}); {advice}"
        ) from error


def n_blocks_of(
    spec: ModelSpec,
    options: Options,
    limits: Limits,
    dtype: torch.dtype,
    device: Device,
    memory: int,
) -> int:
    """Blocks that so much memory holds, scratch blocks not counted: all if it was asked for, else
    those needed."""
    block = cache_shape(spec, limits.block_size, n_ids=1)
    block_bytes = 2 * spec.n_layers * device.cache_bytes(block, dtype)
    needed = options.max_rows * blocks_for(limits.max_model_len, limits.block_size)
    n_blocks = memory // block_bytes if options.cache_memory else min(needed, memory // block_bytes)
    if n_blocks < 1:
        raise ValueError(
            f"the cache's memory holds no block of {block_bytes} bytes; raise cache_memory"
        )
    return n_blocks
