"""Prefix caching: full blocks are found again by what they hold, and their computation is skipped
(a prefix tree of blocks, as RadixAttention, Zheng et al. 2024, has one of tokens).

The law: a block found under a key holds exactly the key's tokens after exactly the key's chain.
Keys are compared whole, so this rests on no hash but the SHA-256 of images. A block may be found in
the very step that writes it: each layer writes all its keys and values before it attends. Read
next: schedule.py, which matches when it admits and publishes what it plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nva.state.blocks import ROOT, Blocks, Found, Key
from nva.state.columns import Ids, Int, evolve, is_any
from nva.state.engine import EngineState
from nva.state.media import Media, content_between
from nva.state.rows import request_of, update
from nva.state.table import entries_of


def _key(chain: int, tokens: Int, media: Media | None, index: int, block_size: int) -> Key:
    """The key of block `index` of a sequence, after this chain."""
    start = index * block_size
    end = start + block_size
    return Key(chain, tokens[start:end].tobytes() + content_between(media, start, end))


def match(
    blocks: Blocks, tokens: Int, block_size: int, media: Media | None = None
) -> tuple[list[int], int]:
    """The cached blocks that a sequence begins with, and the chain of the last of them.

    The last token is never taken from the cache, since its logits are wanted."""
    ids: list[int] = []
    chain = ROOT
    for index in range((len(tokens) - 1) // block_size):
        found = blocks.index.get(_key(chain, tokens, media, index, block_size))
        if found is None:
            break
        ids.append(found.block)
        chain = found.chain
    return ids, chain


def publish(state: EngineState, row_ids: Ids) -> EngineState:
    """Add the rows' full blocks to the prefix index. Their keys and values are in the cache, or are
    written in the step being planned.

        [0, n_published)       blocks that have passed through here
        [n_published, n_full)  blocks full of computed tokens that the host knows: published now
        [n_full, n_blocks)     the open block, and blocks for tokens to come

    Where another block is found under the same key already, that one stays in the index, and the
    row's own remains private."""
    rows = state.rows
    n_full = np.minimum(rows.n_computed[row_ids], rows.n_known[row_ids])
    n_full //= state.limits.block_size
    is_due = n_full > rows.n_published[row_ids]
    if not state.limits.prefix_caching or not is_any(is_due):
        return state
    due = row_ids[is_due]
    ends = n_full[is_due].tolist()
    new: dict[Key, Found] = {}
    chains = [_keyed(state, row, n, new) for row, n in zip(due.tolist(), ends, strict=True)]
    blocks = evolve(
        state.blocks,
        index=state.blocks.index.updated(new),
        keys=state.blocks.keys.updated({found.block: key for key, found in new.items()}),
        n_chains=state.blocks.n_chains + len(new),
    )
    return evolve(state, blocks=blocks, rows=update(rows, due, n_published=ends, chain=chains))


def _keyed(state: EngineState, row: int, end: int, new: dict[Key, Found]) -> int:
    """Key a row's blocks [n_published, end): into `new` those whose key is found nowhere yet. The
    chain of the last of them."""
    rows = state.rows
    blocks = state.blocks
    size = state.limits.block_size
    start = int(rows.n_published[row])
    chain = int(rows.chain[row])
    media = request_of(rows, row).media
    tokens = entries_of(rows.histories, row, 0, end * size)
    table = entries_of(rows.block_tables, row, start, end).tolist()
    for index, block in enumerate(table, start):
        key = _key(chain, tokens, media, index, size)
        found = new.get(key) or blocks.index.get(key)
        if found is None:
            found = Found(block, blocks.n_chains + len(new) + 1)
            new[key] = found
        chain = found.chain
    return chain


def forget(blocks: Blocks, ids: Sequence[int]) -> Blocks:
    """Remove these blocks from the prefix index."""
    keyed = blocks.keys.among(ids)
    if not keyed:
        return blocks
    index = blocks.index.updated(dict.fromkeys(keyed.values()))
    keys = blocks.keys.updated(dict.fromkeys(keyed))
    return evolve(blocks, index=index, keys=keys)
