"""Before the first request, on a device that compiles: its memory measured, every shape compiled.

The law: a step that serves a request meets nothing for the first time.
Read next: load.py, which calls these.
"""

from __future__ import annotations

import itertools
import sys

import attrs
import numpy as np
import torch
from tqdm import tqdm

from nva.forward import KV, Forward, empty_kv, make_forward
from nva.kernels import Device
from nva.models.params import Params
from nva.models.spec import ModelSpec
from nva.state.limits import Limits, blocks_for
from nva.state.media import Image
from nva.state.plan import Batch, ImageSpan, batch_of, no_copies
from nva.state.rows import NO_SOURCE


def filled_batch(limits: Limits, n_tokens: int, n_rows: int) -> Batch:
    """A batch of this shape that asks as much of the device as any: every row's context is as long
    as can be.

    What it reads is meaningless, and it writes the first n_tokens slots, so no request may be in
    flight."""
    counts = n_tokens // n_rows + (np.arange(n_rows) < n_tokens % n_rows)
    ends, length = np.cumsum(counts), limits.max_model_len
    n_ids = min(limits.n_scratch + limits.n_blocks, limits.table_width)
    arrays = {
        "token_ids": np.zeros(n_tokens),
        "token_source": np.full(n_tokens, NO_SOURCE),
        "positions": np.tile(
            np.arange(n_tokens) - np.repeat(ends, counts) + length, (limits.position_axes, 1)
        ),
        "slots": np.arange(n_tokens),
        "block_tables": np.arange(limits.table_width) % n_ids + np.zeros((n_rows, 1)),
        "query_ends": ends,
        "context_lens": np.full(n_rows, length),
        "logit_index": np.maximum(ends - 1, 0),
        "copies": no_copies(),
    }
    return batch_of(arrays, n_tokens=n_tokens, n_rows=n_rows, n_logits=n_rows)


def shapes(limits: Limits) -> list[tuple[int, int]]:
    """The (tokens, rows) that padded batches can have: a step has no more tokens than the pool has
    slots, no more rows than tokens, and in no row more tokens than max_model_len."""
    n_slots = limits.n_blocks * limits.block_size
    # What a bucket holds is more than the bucket before it.
    tokens = [
        n_tokens
        for fewer, n_tokens in itertools.pairwise((0, *limits.token_buckets))
        if fewer < n_slots
    ]
    rows = itertools.pairwise((0, *limits.row_buckets))
    return [
        (n_tokens, n_rows)
        for n_tokens, (fewer, n_rows) in itertools.product(tokens, rows)
        if fewer < n_tokens + 1 and n_tokens <= n_rows * limits.max_model_len
    ]


def warm_up(forward: Forward, params: Params, kv: KV, limits: Limits) -> KV:
    """Run every shape once, largest first, behind a progress bar, so that none is compiled while a
    request waits.

    Without buckets there is nothing to compile.
    """
    found = sorted(shapes(limits), reverse=True)
    bar = tqdm(found, desc="compiling", unit="shape", disable=not found or not sys.stderr.isatty())
    for n_tokens, n_rows in bar:
        bar.set_postfix_str(f"{n_tokens} tokens, {n_rows} rows", refresh=False)
        _, kv = forward(params, kv, filled_batch(limits, n_tokens, n_rows))
    return kv


def run_largest(
    spec: ModelSpec,
    limits: Limits,
    device: Device,
    params: Params,
    dtype: torch.dtype,
    largest: Image | None = None,
) -> None:
    """Run the largest step, with the largest image if the model sees, operator by operator, and a
    cache just large enough, so that memory free afterwards is free for the cache."""
    n_tokens = limits.max_batched_tokens
    n_rows = min(limits.max_rows, n_tokens)
    limits = attrs.evolve(limits, n_blocks=blocks_for(n_tokens, limits.block_size))
    device = attrs.evolve(device, kernels=device.measured_with or device.kernels)
    forward = make_forward(spec, limits, device, enforce_eager=True)
    batch = filled_batch(limits, n_tokens, n_rows)
    if largest:
        span = ImageSpan(image=largest, first=0, packed=0, count=min(n_tokens, largest.n_tokens))
        batch = attrs.evolve(batch, images=(span,))
    forward(params, empty_kv(spec, limits, dtype, device), batch)
