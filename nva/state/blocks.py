"""The pool of KV blocks (PagedAttention, Kwon et al. 2023): who holds them, which are free and in
what order they are reused, what the prefix cache finds.

The law: every block of the pool is either held (its reference count says by how many block tables)
or in the free queue, never both. A free block may still be found by its key until it is taken for
something else. Read next: steps/allocate.py, which moves blocks, and steps/prefix.py, which keys
them."""

from __future__ import annotations

from typing import NamedTuple

import attrs
import numpy as np

from nva.state.columns import Int, Restored, column_field, freeze
from nva.state.limits import Limits
from nva.state.lookup import Lookup

ROOT = 0
"""The chain of a block that has no block before it."""


class Key(NamedTuple):
    """What a full block holds: exactly these tokens after exactly that chain. Keys are compared
    whole, so no hash decides what is found.

    Together they are a prefix tree, as in RadixAttention (Zheng et al. 2024): a chain is a path
    from the root, and `parent` numbers the path instead of spelling it out."""

    parent: int  # chain of the block before, ROOT for the first
    # int32 token ids, block_size of them, then the digests of images that reach into the block
    tokens: bytes


class Found(NamedTuple):
    """What the index has under a key."""

    block: int
    chain: int  # number of the chain that ends in this block; never given twice


@attrs.frozen(kw_only=True, slots=False)
class Blocks(Restored):
    """What is known of block ids: [0, n_scratch) is padding's, the rest is the pool.

    The free queue is a ring of ids through `after` and `before`, entered at the extra id `ring =
    len(ref_counts)`: blocks are taken at its front; unkeyed ones return to the front, keyed ones to
    the back, so that what the prefix cache may still find is reused last, least recently used
    first."""

    ref_counts: Int = column_field()  # [ids]: block tables that hold the block
    after: Lookup[int, int]  # next in the free queue; meaningless for held blocks
    before: Lookup[int, int]
    n_free: int
    n_chains: int  # chains numbered so far
    index: Lookup[Key, Found]
    keys: Lookup[int, Key]  # block -> the key it is found under

    @property
    def ring(self) -> int:
        return len(self.ref_counts)


def empty_blocks(limits: Limits) -> Blocks:
    """All blocks of the pool free, in ascending order."""
    n_ids = limits.n_scratch + limits.n_blocks
    ring = [n_ids, *range(limits.n_scratch, n_ids), n_ids]
    return Blocks(
        ref_counts=freeze(np.zeros(n_ids, np.int32)),
        after=Lookup(dict(zip(ring, ring[1:], strict=False))),
        before=Lookup(dict(zip(ring[1:], ring, strict=False))),
        n_free=limits.n_blocks,
        n_chains=ROOT,
        index=Lookup(),
        keys=Lookup(),
    )


def free_ids(blocks: Blocks) -> list[int]:
    """The free queue, front to back."""
    ids: list[int] = []
    block = blocks.after[blocks.ring]
    while block != blocks.ring and len(ids) <= blocks.ring:
        ids.append(block)
        block = blocks.after[block]
    return ids
