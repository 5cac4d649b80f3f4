"""Prefix caching: full blocks are found again by what they hold, and their computation is skipped.

The law: a block found under a key holds exactly the key's tokens after exactly the key's chain.
Keys are compared whole, so this rests on no hash but the SHA-256 of images. A block may be found in
the very step that writes it: each layer writes all its keys and values before it attends. Read
next: schedule.py, which matches when it admits and publishes what it plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nva.state.blocks import ROOT, Blocks, Found, Key
from nva.state.columns import Ids, Int, entries_of, evolve, is_any
from nva.state.engine import EngineState
from nva.state.media import Media, content_between
from nva.state.rows import request_of, update


def _key(chain: int, tokens: Int, media: Media | None, index: int, block_size: int) -> Key:
    start, end = index * block_size, (index + 1) * block_size
    return Key(chain, tokens[start:end].tobytes() + content_between(media, start, end))


def match(
    blocks: Blocks, tokens: Int, block_size: int, media: Media | None = None
) -> tuple[list[int], int]:
    """The cached blocks that a sequence begins with, and the chain of the last of them.

    The last token is never taken from the cache, since its logits are wanted.
    """
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
    """Let the blocks of these rows be found that are full of known tokens, whose values are
    computed or planned now.

    Where another block is already found under the same key, that one stays, and the row's own
    remains private."""
    rows, size = state.rows, state.limits.block_size
    n_full = np.minimum(rows.n_computed[row_ids], rows.n_known[row_ids]) // size
    is_due = n_full > rows.n_published[row_ids]
    if not state.limits.prefix_caching or not is_any(is_due):
        return state
    blocks, due, n_chains = state.blocks, row_ids[is_due], state.blocks.n_chains
    starts, ends, chains = (
        rows.n_published[due].tolist(),
        n_full[is_due].tolist(),
        rows.chain[due].tolist(),
    )
    new: dict[Key, Found] = {}
    for i, row in enumerate(due.tolist()):
        tokens, media = (
            entries_of(rows.histories, row, 0, ends[i] * size),
            request_of(rows, row).media,
        )
        for index, block in enumerate(
            entries_of(rows.block_tables, row, starts[i], ends[i]).tolist(), starts[i]
        ):
            key = _key(chains[i], tokens, media, index, size)
            found = new.get(key) or blocks.index.get(key)
            if found is None:
                n_chains += 1
                found = new[key] = Found(block, n_chains)
            chains[i] = found.chain
    index, keys = (
        blocks.index.updated(new),
        blocks.keys.updated({found.block: key for key, found in new.items()}),
    )
    blocks = evolve(blocks, index=index, keys=keys, n_chains=n_chains)
    return evolve(state, blocks=blocks, rows=update(rows, due, n_published=ends, chain=chains))


def forget(blocks: Blocks, ids: Sequence[int]) -> Blocks:
    """Let these blocks be found no more."""
    keyed = blocks.keys.among(ids)
    if not keyed:
        return blocks
    index, keys = (
        blocks.index.updated(dict.fromkeys(keyed.values())),
        blocks.keys.updated(dict.fromkeys(keyed)),
    )
    return evolve(blocks, index=index, keys=keys)
