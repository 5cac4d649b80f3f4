"""Prefix caching: full blocks are found again by what they hold, and their computation is skipped.

The law: a block found under a key holds exactly the key's tokens after exactly the key's chain. Keys are compared
whole, so this doesn't rest on a hash. A block may be found in the very step that writes it: each layer writes all its
keys and values before it attends. Read next: schedule.py, which matches when it admits and publishes what it plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from nva.state.blocks import ROOT, Blocks, Key
from nva.state.columns import Int, Tokens, write
from nva.state.engine import EngineState
from nva.state.rows import history_of, update


def _key(chain: int, tokens: Tokens, index: int, block_size: int) -> Key:
    return Key(chain, tokens[index * block_size : (index + 1) * block_size].tobytes())


def match(blocks: Blocks, tokens: Tokens, n_known: int, block_size: int) -> tuple[list[int], int]:
    """The cached blocks that a sequence of n_known tokens begins with, and the chain of the last of them.

    The last token is never taken from the cache, since its logits are wanted.
    """
    found: list[int] = []
    chain = ROOT
    for index in range((n_known - 1) // block_size):
        block = blocks.index.get(_key(chain, tokens, index, block_size))
        if block is None:
            break
        found.append(block)
        chain = int(blocks.chains[block])
    return found, chain


def publish(state: EngineState, row_ids: Int) -> EngineState:
    """Let the blocks of these rows be found that are full of known tokens, whose values are computed or planned now.

    Where another block is already found under the same key, that one stays, and the row's own remains private.
    """
    rows, size = state.rows, state.limits.block_size
    n_full = np.minimum(rows.n_computed[row_ids], rows.n_known[row_ids]) // size
    is_due = n_full > rows.n_published[row_ids]
    if not state.limits.prefix_caching or not is_due.any():
        return state
    blocks = state.blocks
    index, keys, chains, n_chains = blocks.index, blocks.keys, blocks.chains.copy(), blocks.n_chains
    due, n_due = row_ids[is_due], n_full[is_due]
    ends: list[int] = []
    for row, n in zip(due.tolist(), n_due.tolist(), strict=True):
        chain = int(rows.chain[row])
        for i in range(int(rows.n_published[row]), n):
            key = _key(chain, history_of(rows, row), i, size)
            block = index.get(key)
            if block is None:
                block, n_chains = int(rows.block_tables[row, i]), n_chains + 1
                index, keys, chains[block] = index.insert(key, block), keys.insert(block, key), n_chains
            chain = int(chains[block])
        ends.append(chain)
    blocks = attrs.evolve(blocks, index=index, keys=keys, chains=chains, n_chains=n_chains)
    return attrs.evolve(state, blocks=blocks, rows=update(rows, due, n_published=n_due, chain=ends))


def forget(blocks: Blocks, ids: Sequence[int]) -> Blocks:
    """Let these blocks be found no more."""
    keyed = [block for block in ids if blocks.chains[block]]
    if not keyed:
        return blocks
    index, keys = blocks.index, blocks.keys
    for block in keyed:
        index, keys = index.remove(keys[block]), keys.remove(block)
    return attrs.evolve(blocks, index=index, keys=keys, chains=write(blocks.chains, keyed, ROOT))
