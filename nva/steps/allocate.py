"""Block allocation: take, share and release blocks; grow, fork and vacate rows.

The law: a block that two tables hold is never written; whoever must write takes a block of its own
first. Read next: prefix.py, which lets a block be found again, and schedule.py, which decides who
gets blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nva.state.blocks import Blocks
from nva.state.columns import (
    Bool,
    Ids,
    Int,
    append_entries,
    entries_at,
    evolve,
    freeze,
    is_any,
    replace_entries,
    write,
)
from nva.state.engine import EngineState
from nva.state.errors import InvariantError
from nva.state.plan import no_copies
from nva.state.rows import COLUMNS, block_table, n_reserved, request_of, token_ids, update
from nva.steps.prefix import forget


def take(blocks: Blocks, n: int) -> tuple[Blocks, list[int]]:
    """Hold n free blocks, from the front of the queue; what the prefix cache still found in them is
    gone."""
    if n > blocks.n_free:
        raise InvariantError(
            f"{n} blocks taken of {blocks.n_free} free ones; compare with n_free before taking"
        )
    ids: list[int] = []
    after, front = blocks.after, blocks.after[blocks.ring]
    for _ in range(n):
        ids.append(front)
        front = after[front]
    counts = write(blocks.ref_counts, np.array(ids, np.intp), 1)
    return forget(
        _linked(blocks, [blocks.ring, front], ref_counts=counts, n_free=blocks.n_free - n), ids
    ), ids


def share(blocks: Blocks, ids: Sequence[int]) -> Blocks:
    """One more table holds each of these (distinct) blocks; the free ones among them leave the
    queue."""
    counts, which = blocks.ref_counts, np.asarray(ids, np.intp)
    free = which[counts[which] == 0].tolist()
    for block in free:
        blocks = _linked(blocks, [blocks.before[block], blocks.after[block]])
    return evolve(
        blocks, ref_counts=write(counts, which, counts[which] + 1), n_free=blocks.n_free - len(free)
    )


def release(blocks: Blocks, ids: Sequence[int]) -> Blocks:
    """One table fewer holds each of these blocks, once per occurrence; those that none holds join
    the free queue.

    `ids` are whole block tables, one after another. They are queued last block first, so that a
    chain of cached blocks is reused from its end and what remains of it can still be found."""
    counts = blocks.ref_counts.copy()
    np.subtract.at(counts, np.asarray(ids, np.intp), 1)
    freed = [block for block in dict.fromkeys(ids) if counts[block] == 0][::-1]
    keyed = [block for block in freed if block in blocks.keys]
    unkeyed = [block for block in freed if block not in blocks.keys]
    blocks = _linked(blocks, [blocks.ring, *unkeyed, blocks.after[blocks.ring]])
    blocks = _linked(blocks, [blocks.before[blocks.ring], *keyed, blocks.ring])
    return evolve(blocks, ref_counts=freeze(counts), n_free=blocks.n_free + len(freed))


def _linked(blocks: Blocks, ids: list[int], **changes: Any) -> Blocks:
    """The blocks with each of these ids the neighbour of the next in the free queue, and with other
    changes."""
    after, before = dict(zip(ids, ids[1:], strict=False)), dict(zip(ids[1:], ids, strict=False))
    return evolve(
        blocks, after=blocks.after.updated(after), before=blocks.before.updated(before), **changes
    )


def _slots_due(state: EngineState, row_ids: Ids) -> tuple[Bool, Bool]:
    """For rows about to compute one token: who needs a new block, and who a copy of its shared open
    one."""
    rows, counts = state.rows, state.blocks.ref_counts
    column = rows.n_computed[row_ids] // state.limits.block_size
    is_full = column >= rows.n_blocks[row_ids]
    open_block = entries_at(rows.block_tables, row_ids, column)  # anything where is_full
    is_shared = ~is_full & (counts[open_block] > 1)
    if is_any(is_shared):  # where all of a block's holders would copy it, the first may keep it
        block, first, n_copies = np.unique(
            np.where(is_shared, open_block, -1), return_index=True, return_counts=True
        )
        is_shared[first[(block >= 0) & (n_copies == counts[block])]] = False
    return is_full, is_shared


def n_blocks_due(state: EngineState, row_ids: Ids) -> int:
    """Blocks that these rows take if each of them computes one more token."""
    is_full, is_shared = _slots_due(state, row_ids)
    return int(np.count_nonzero(is_full | is_shared))


def grow(state: EngineState, row_ids: Ids) -> tuple[EngineState, Int]:
    """Give each row a slot of its own for one more token; also the block copies [C, 2] this needs
    (copy-on-write)."""
    is_full, is_shared = _slots_due(state, row_ids)
    due = is_full | is_shared
    if not is_any(due):
        return state, no_copies()
    blocks, ids = take(state.blocks, int(np.count_nonzero(due)))
    rows, new = state.rows, np.array(ids, np.int32)
    full, tables, lengths = row_ids[is_full], rows.block_tables, rows.n_blocks
    if len(full):
        tables = append_entries(tables, full, lengths[full], new[is_full[due]])
        lengths = write(lengths, full, lengths[full] + 1)
    copies = no_copies()
    if is_any(is_shared):
        shared = row_ids[is_shared]
        held, column = (
            entries_at(tables, shared, slice(None)),
            rows.n_computed[shared] // state.limits.block_size,
        )
        copies = np.stack([held[range(len(shared)), column], new[is_shared[due]]], axis=1)
        held[range(len(shared)), column] = copies[:, 1]
        tables, blocks = (
            replace_entries(tables, shared, held, lengths[shared]),
            release(blocks, copies[:, 0].tolist()),
        )
    return evolve(
        state, rows=evolve(rows, block_tables=tables, n_blocks=lengths), blocks=blocks
    ), copies


def fork(
    state: EngineState, row: int, n: int = 1, first_sample: int | None = None
) -> tuple[EngineState, list[int]]:
    """Start n more rows that continue as `row` does, sharing its blocks; nothing is copied until
    one of them writes.

    The new rows are the samples from `first_sample` on, by default numbers that no sample of the
    request has. Raises ValueError if the row isn't running, still has prompt to compute, or fewer
    than n rows are free."""
    rows = state.rows
    is_decoding = (
        rows.is_running[row]
        and rows.n_samples[row] == 1
        and rows.n_computed[row] >= rows.n_known[row] - 1
    )
    if not is_decoding:
        raise ValueError(
            f"row {row} is not running, or its prompt is not computed; fork rows that decode"
        )
    n_free = state.limits.max_rows - n_reserved(rows)
    if n > n_free:
        raise ValueError(
            f"{n} forks asked, {n_free} rows free; raise max_rows or end other rows first"
        )
    free = np.flatnonzero(~rows.is_running)[:n]
    first = _next_sample(state, row) if first_sample is None else first_sample
    table, columns = block_table(rows, row), {name: getattr(rows, name)[row] for name in COLUMNS}
    rows = update(rows, free, **columns | {"sample": first + np.arange(n)})
    tokens, counts = token_ids(rows, row), state.blocks.ref_counts
    rows = evolve(
        rows,
        histories=replace_entries(rows.histories, free, tokens, len(tokens)),
        block_tables=replace_entries(rows.block_tables, free, table, len(table)),
    )
    blocks = evolve(state.blocks, ref_counts=write(counts, table, counts[table] + n))
    return evolve(state, rows=rows, blocks=blocks), free.tolist()


def _next_sample(state: EngineState, row: int) -> int:
    rows, arrival = state.rows, state.rows.arrival[row]
    running = rows.sample[rows.is_running & (rows.arrival == arrival)].tolist()
    waiting = [entry.sample for entry in state.waiting if entry.arrival == arrival]
    return max(request_of(rows, row).params.n, 1 + max(running + waiting))


def vacate(state: EngineState, row_ids: Sequence[int]) -> EngineState:
    """Free these rows and release their blocks."""
    tables = [block for row in row_ids for block in block_table(state.rows, row).tolist()]
    rows = update(state.rows, list(row_ids), is_running=False, requests=None)
    return evolve(state, rows=rows, blocks=release(state.blocks, tables))
