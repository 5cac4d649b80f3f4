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
from nva.state.rows import update
from nva.state.table import slices_of


def _key(chain: int, tokens: Int, media: Media | None, start: int) -> Key:
    """The key of a full block after this chain, whose tokens are at positions from `start` on."""
    content = tokens.tobytes()
    if media is not None:
        content += content_between(media, start, start + len(tokens))
    return Key(chain, content)


def match(
    blocks: Blocks, tokens: Int, block_size: int, media: Media | None = None
) -> tuple[list[int], int]:
    """The cached blocks that a sequence begins with, and the chain of the last of them.

    The last token is never taken from the cache, since its logits are wanted."""
    ids: list[int] = []
    chain = ROOT
    n_full = (len(tokens) - 1) // block_size
    for start in range(0, n_full * block_size, block_size):
        found = blocks.index.get(_key(chain, tokens[start : start + block_size], media, start))
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
    new, chains = _new_keys(state, due, ends)
    blocks = evolve(
        state.blocks,
        index=state.blocks.index.updated(new),
        keys=state.blocks.keys.updated({found.block: key for key, found in new.items()}),
        n_chains=state.blocks.n_chains + len(new),
    )
    rows = update(rows, due, n_published=ends, chain=chains)
    return evolve(state, blocks=blocks, rows=rows)


def _new_keys(
    state: EngineState, row_ids: Ids, ends: list[int]
) -> tuple[dict[Key, Found], list[int]]:
    """The keys of these rows' blocks [n_published, end) that are found nowhere yet, and the chain
    in which each row's blocks end."""
    rows = state.rows
    size = state.limits.block_size
    index = state.blocks.index
    n_chains = state.blocks.n_chains

    # 1. What these blocks are and hold, as slices of each row's table and history.
    firsts = rows.n_published[row_ids].tolist()
    starts = [first * size for first in firsts]
    tables = slices_of(rows.block_tables, row_ids, firsts, ends)
    tokens = slices_of(rows.histories, row_ids, starts, [end * size for end in ends])
    requests = rows.requests[row_ids].tolist()
    chains = rows.chain[row_ids].tolist()

    # 2. A key for each, in order, since it has the chain of the block before.
    new: dict[Key, Found] = {}
    for i, request in enumerate(requests):
        for number, block in enumerate(tables[i].tolist()):
            at = number * size
            own = tokens[i][at : at + size]
            key = _key(chains[i], own, request.media, starts[i] + at)
            found = new.get(key) or index.get(key)
            if found is None:
                n_chains += 1
                found = Found(block, n_chains)
                new[key] = found
            chains[i] = found.chain
    return new, chains


def forget(blocks: Blocks, ids: Sequence[int]) -> Blocks:
    """Remove these blocks from the prefix index."""
    keyed = blocks.keys.among(ids)
    if not keyed:
        return blocks
    index = blocks.index.updated(dict.fromkeys(keyed.values()))
    keys = blocks.keys.updated(dict.fromkeys(keyed))
    return evolve(blocks, index=index, keys=keys)
