"""Whether a batch stays within the model's tables and within the cache it is computed on.

The law: what passes here makes a device read and write nothing but its own tables and caches. An
index out of range is a crash there, or another request's data. Read next: forward.py, which asks
before it touches memory."""

from __future__ import annotations

import attrs
import numpy as np

from nva.state.columns import Bool, Int
from nva.state.plan import Batch

_ADVICE = "give a batch the cache that its state's limits describe: empty_kv(spec, limits, ...)"


@attrs.frozen(kw_only=True)
class Bounds:
    """What a batch may name, each [0, n)."""

    n_ids: int
    """Blocks of the cache, those of scratch included."""

    block_size: int
    vocab_size: int
    max_model_len: int
    position_axes: int


def check_batch(batch: Batch, bounds: Bounds) -> None:
    """Raise ValueError for a batch that goes beyond the bounds, or whose rows don't lay out its
    tokens. That slots are distinct is not looked at."""
    _check_shapes(batch, bounds)

    # 1. Every index is in range.
    n_slots = bounds.n_ids * bounds.block_size
    of_cache = f"a cache of {bounds.n_ids} blocks of {bounds.block_size} tokens; {_ADVICE}"
    _check_range("token_ids", batch.token_ids, bounds.vocab_size, "the model's vocabulary")
    _check_range("positions", batch.positions, bounds.max_model_len, "max_model_len")
    _check_range("slots", batch.slots, n_slots, of_cache)
    _check_range("logit_index", batch.logit_index, len(batch.token_ids), "the batch's own tokens")
    _check_range("copies", batch.copies, bounds.n_ids, of_cache)

    if batch.token_source.max() >= 0:
        raise ValueError(
            "this batch has tokens that only the device knows (token_source), which this forward "
            "doesn't look up; give limits.lookahead = 0"
        )

    # 2. Rows cover the tokens, and a row's context holds its queries.
    ends, lens = batch.query_ends, batch.context_lens
    n_queries = ends.copy()
    n_queries[1:] -= ends[:-1]
    if n_queries.min() < 0 or ends[-1] != len(batch.token_ids):
        raise ValueError(
            f"query_ends are {ends.tolist()}; they ascend, and end at the batch's "
            f"{len(batch.token_ids)} tokens"
        )
    if (lens < np.maximum(n_queries, 1)).any():
        raise ValueError(
            f"context_lens are {lens.tolist()} for rows of {n_queries.tolist()} queries; a context "
            "is at least 1 and holds the row's queries"
        )

    # 3. Contexts fit the tables, and the blocks that they reach are in the cache. Other entries of
    #    a table are arbitrary, but mostly in the cache too, so the whole table is looked at first.
    width = batch.block_tables.shape[1]
    of_tables = f"tables of {width} blocks of {bounds.block_size} tokens; {_ADVICE}"
    _check_range("context_lens", lens, width * bounds.block_size + 1, of_tables)
    if batch.block_tables.view(np.uint32).max() >= bounds.n_ids:
        n_blocks = (lens + (bounds.block_size - 1)) // bounds.block_size
        columns = np.arange(width, dtype=np.int32)
        is_used: Bool = columns < n_blocks[:, None]
        _check_range("block_tables", batch.block_tables[is_used], bounds.n_ids, of_cache)


def _check_shapes(batch: Batch, bounds: Bounds) -> None:
    """Every array is int32 and has the length that the others make it have."""
    n_tokens, n_rows = len(batch.token_ids), len(batch.query_ends)
    shapes = {
        "positions": (bounds.position_axes, n_tokens),
        "slots": (n_tokens,),
        "context_lens": (n_rows,),
        "block_tables": (n_rows, batch.block_tables.shape[-1]),
        "copies": (len(batch.copies), 2),
    }
    for name, shape in shapes.items():
        found = getattr(batch, name).shape
        if found != shape:
            raise ValueError(
                f"{name} is {found}, not {shape}: the batch has {n_tokens} tokens in {n_rows} rows"
            )
    if not n_tokens or not n_rows:
        raise ValueError("the batch has no tokens; a step computes at least one")
    for span in batch.images:
        if not (0 <= span.packed <= span.packed + span.count <= n_tokens):
            raise ValueError(
                f"an image is shown at tokens [{span.packed}, {span.packed + span.count}) of the "
                f"batch's {n_tokens}"
            )


def _check_range(name: str, values: Int, end: int, whose: str) -> None:
    """One look: as unsigned numbers, those below 0 are beyond every end."""
    if values.size and values.view(np.uint32).max() >= end:
        raise ValueError(
            f"{name} are in [{values.min()}, {values.max()}], outside [0, {end}) of {whose}"
        )
