"""Block allocation: take, share and release blocks; grow, fork and vacate rows.

The law: a block that two tables hold is never written; whoever must write takes a block of its own
first (copy-on-write, as PagedAttention does it, Kwon et al. 2023). Read next: prefix.py, which lets
a block be found again, and schedule.py, which decides who gets blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nva.state.blocks import Blocks
from nva.state.columns import Bool, Ids, Int, evolve, freeze, is_any, write
from nva.state.engine import EngineState
from nva.state.errors import InvariantError
from nva.state.generation import digest
from nva.state.plan import no_copies
from nva.state.rows import (
    COLUMNS,
    NO_SOURCE,
    Rows,
    block_table,
    n_reserved,
    request_of,
    token_ids,
    update,
)
from nva.state.table import append_entries, entries_at, replace_entries
from nva.steps.prefix import forget


def take(blocks: Blocks, n: int) -> tuple[Blocks, list[int]]:
    """Hold n free blocks, from the front of the queue; what the prefix cache still found in them is
    gone. Raises InvariantError if fewer are free."""
    if n > blocks.n_free:
        raise InvariantError(
            f"{n} blocks taken of {blocks.n_free} free ones; compare with n_free before taking"
        )
    *ids, front = blocks.after.follow(blocks.ring, n + 1)
    counts = write(blocks.ref_counts, np.array(ids, np.intp), 1)
    n_free = blocks.n_free - n
    blocks = _linked(blocks, [blocks.ring, front], ref_counts=counts, n_free=n_free)
    return forget(blocks, ids), ids


def share(blocks: Blocks, ids: Sequence[int]) -> Blocks:
    """One more table holds each of these (distinct) blocks; the free ones among them leave the
    queue."""
    counts = blocks.ref_counts
    which = np.asarray(ids, np.intp)
    free = which[counts[which] == 0].tolist()
    for block in free:
        blocks = _linked(blocks, [blocks.before[block], blocks.after[block]])
    counts = write(counts, which, counts[which] + 1)
    return evolve(blocks, ref_counts=counts, n_free=blocks.n_free - len(free))


def release(blocks: Blocks, ids: Sequence[int]) -> Blocks:
    """One table fewer holds each of these blocks, once per occurrence; those that none holds join
    the free queue.

    `ids` are whole block tables, one after another. They are queued last block first, so that a
    chain of cached blocks is reused from its end and what remains of it can still be found."""
    counts = blocks.ref_counts.copy()
    np.subtract.at(counts, np.asarray(ids, np.intp), 1)
    freed = [block for block in dict.fromkeys(ids) if counts[block] == 0]
    blocks = evolve(blocks, ref_counts=freeze(counts), n_free=blocks.n_free + len(freed))
    return _queued(blocks, freed[::-1])


def _queued(blocks: Blocks, freed: list[int]) -> Blocks:
    """The blocks with these in the free queue: unkeyed ones at the front, to be taken next; keyed
    ones at the back, so that the least recently used of them is taken first."""
    keyed = [block for block in freed if block in blocks.keys]
    unkeyed = [block for block in freed if block not in blocks.keys]
    blocks = _linked(blocks, [blocks.ring, *unkeyed, blocks.after[blocks.ring]])
    return _linked(blocks, [blocks.before[blocks.ring], *keyed, blocks.ring])


def _linked(blocks: Blocks, ids: list[int], **changes: Any) -> Blocks:
    """The blocks with each of these ids the neighbour of the next in the free queue, and with other
    changes."""
    after = dict(zip(ids, ids[1:], strict=False))
    before = dict(zip(ids[1:], ids, strict=False))
    return evolve(
        blocks,
        after=blocks.after.updated(after),
        before=blocks.before.updated(before),
        **changes,
    )


def _slots_due(state: EngineState, row_ids: Ids) -> tuple[Bool, Bool]:
    """For rows about to compute one token, [n] each: who needs a new block, and who a copy of its
    open one, because others hold that too."""
    column = state.rows.n_computed[row_ids] // state.limits.block_size
    is_full = column >= state.rows.n_blocks[row_ids]
    open_block = entries_at(state.rows.block_tables, row_ids, column)  # anything where is_full
    is_shared = ~is_full & (state.blocks.ref_counts[open_block] > 1)
    if is_any(is_shared):
        is_shared[_keepers(state.blocks, open_block, is_shared)] = False
    return is_full, is_shared


def _keepers(blocks: Blocks, open_block: Int, is_shared: Bool) -> Ids:
    """Where all holders of a block are about to copy it, the first of them may keep it."""
    found = np.where(is_shared, open_block, -1)
    block, first, n_copies = np.unique(found, return_index=True, return_counts=True)
    return first[(block >= 0) & (n_copies == blocks.ref_counts[block])]


def n_blocks_due(state: EngineState, row_ids: Ids) -> int:
    """Blocks that these rows [n] take if each of them computes one more token."""
    is_full, is_shared = _slots_due(state, row_ids)
    return int(np.count_nonzero(is_full | is_shared))


def grow(state: EngineState, row_ids: Ids) -> tuple[EngineState, Int]:
    """Give each row [n] a slot of its own for its token at n_computed; also the block copies [C, 2]
    this needs. Raises InvariantError if too few blocks are free.

        [0, n_computed)   slots that hold keys and values
        n_computed        the slot to write: in the open block, or in a new one"""
    is_full, is_shared = _slots_due(state, row_ids)
    is_due = is_full | is_shared
    if not is_any(is_due):
        return state, no_copies()
    blocks, ids = take(state.blocks, int(np.count_nonzero(is_due)))
    state = evolve(state, blocks=blocks)
    new = np.array(ids, np.int32)
    state = _lengthened(state, row_ids[is_full], new[is_full[is_due]])
    return _unshared(state, row_ids[is_shared], new[is_shared[is_due]])


def _lengthened(state: EngineState, row_ids: Ids, new: Int) -> EngineState:
    """The state in which each of these rows, whose blocks are full, has one more."""
    if not len(row_ids):
        return state
    rows = state.rows
    lengths = rows.n_blocks[row_ids]
    tables = append_entries(rows.block_tables, row_ids, lengths, new)
    n_blocks = write(rows.n_blocks, row_ids, lengths + 1)
    return evolve(state, rows=evolve(rows, block_tables=tables, n_blocks=n_blocks))


def _unshared(state: EngineState, row_ids: Ids, new: Int) -> tuple[EngineState, Int]:
    """The state in which each of these rows has a new block in the place of its open one; also the
    copies [n, 2] that fill it."""
    if not len(row_ids):
        return state, no_copies()
    rows = state.rows
    column = rows.n_computed[row_ids] // state.limits.block_size
    held = entries_at(rows.block_tables, row_ids, slice(None))
    at = np.arange(len(row_ids)), column
    old = held[at]
    held[at] = new
    tables = replace_entries(rows.block_tables, row_ids, held, rows.n_blocks[row_ids])
    blocks = release(state.blocks, old.tolist())
    state = evolve(state, rows=evolve(rows, block_tables=tables), blocks=blocks)
    return state, np.stack([old, new], axis=1)


def fork(
    state: EngineState, row: int, n: int = 1, first_sample: int | None = None
) -> tuple[EngineState, list[int]]:
    """Start n more rows that continue the tokens of `row` that the host knows, sharing its blocks;
    nothing is copied until one of them writes.

    The new rows are the samples from `first_sample` on, by default numbers that no sample of the
    request has. Raises ValueError if the row isn't running, still has prompt to compute, or fewer
    than n rows are free."""
    state, forks = duplicate(state, row, n, first_sample)
    # A token that is still being sampled is the row's own. A fork computes the last token before it
    # once more, and samples for itself.
    n_known = state.rows.n_known[forks]
    n_computed = np.minimum(state.rows.n_computed[forks], n_known - 1)
    rows = update(state.rows, forks, n_computed=n_computed, n_tokens=n_known, source=NO_SOURCE)
    return evolve(state, rows=rows), forks


def duplicate(
    state: EngineState, row: int, n: int = 1, first_sample: int | None = None
) -> tuple[EngineState, list[int]]:
    """fork() within a step, between schedule() and commit(): if `row` waits for a token, so do the
    new rows, and the plan must give each of them a sample."""
    check_can_fork(state, row, n)
    first = _next_sample(state, row) if first_sample is None else first_sample
    forks = np.flatnonzero(~state.rows.is_running)[:n]
    samples = first + np.arange(n)
    table = block_table(state.rows, row)
    state = evolve(
        state,
        rows=_copied(state.rows, row, forks, samples),
        blocks=_held_more(state.blocks, table, n),
        history=digest(state.history, np.array([row, n, first]).tobytes()),
    )
    return state, forks.tolist()


def check_can_fork(state: EngineState, row: int, n: int) -> None:
    """Raise ValueError if the row doesn't decode, or fewer than n rows are free."""
    rows = state.rows
    is_computed = rows.n_samples[row] == 1 and rows.n_computed[row] >= rows.n_known[row] - 1
    if not (rows.is_running[row] and is_computed):
        raise ValueError(
            f"row {row} is not running, or its prompt is not computed; fork rows that decode"
        )
    n_free = state.limits.max_rows - n_reserved(rows)
    if n > n_free:
        raise ValueError(
            f"{n} forks asked, {n_free} rows free; raise max_rows or end other rows first"
        )


def _copied(rows: Rows, row: int, forks: Ids, samples: Ids) -> Rows:
    """The rows with copies of a row in other rows, which are these samples of its request."""
    columns = {name: getattr(rows, name)[row] for name in COLUMNS}
    columns["sample"] = samples
    tokens = token_ids(rows, row)
    table = block_table(rows, row)
    rows = update(rows, forks, **columns)
    return evolve(
        rows,
        histories=replace_entries(rows.histories, forks, tokens, len(tokens)),
        block_tables=replace_entries(rows.block_tables, forks, table, len(table)),
    )


def _held_more(blocks: Blocks, table: Int, n: int) -> Blocks:
    """The blocks, n more tables holding each of these."""
    counts = blocks.ref_counts
    return evolve(blocks, ref_counts=write(counts, table, counts[table] + n))


def _next_sample(state: EngineState, row: int) -> int:
    """The first number that no sample of the row's request has, running or waiting."""
    rows = state.rows
    request = request_of(rows, row)
    is_same = rows.is_running & (rows.arrival == rows.arrival[row])
    taken = rows.sample[is_same].tolist()
    taken += [sample for _, _, sample in state.waiting.orders.get(request.id) or ()]
    return max(request.params.n, 1 + max(taken))


def vacate(state: EngineState, row_ids: Sequence[int]) -> EngineState:
    """Free these rows and release their blocks."""
    if not row_ids:
        return state
    held = np.concatenate([block_table(state.rows, row) for row in row_ids]).tolist()
    rows = update(state.rows, list(row_ids), is_running=False, requests=None, biases=None)
    history = digest(state.history, np.array(row_ids).tobytes())
    return evolve(state, rows=rows, blocks=release(state.blocks, held), history=history)
