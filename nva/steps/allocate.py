"""Block allocation: take, share and release blocks; grow, fork and vacate rows.

The law: a block that two tables hold is never written; whoever must write takes a block of its own first.
Read next: prefix.py, which lets a block be found again, and schedule.py, which decides who gets blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from nva.state.blocks import Blocks
from nva.state.columns import Bool, Column, Int, append_entries, freeze, history, replaced, write, write_entries
from nva.state.engine import EngineState
from nva.state.errors import InvariantError
from nva.state.plan import no_copies
from nva.state.rows import COLUMNS, block_table, n_reserved, request_of, update
from nva.steps.prefix import forget


def take(blocks: Blocks, n: int) -> tuple[Blocks, list[int]]:
    """Hold n free blocks, from the front of the queue; what the prefix cache still found in them is gone."""
    if n > blocks.n_free:
        raise InvariantError(f"{n} blocks taken of {blocks.n_free} free ones; compare with n_free before taking")
    ids: list[int] = []
    front = int(blocks.after[blocks.ring])
    for _ in range(n):
        ids.append(front)
        front = int(blocks.after[front])
    after, before = write(blocks.after, blocks.ring, front), write(blocks.before, front, blocks.ring)
    held = write(blocks.ref_counts, ids, 1)
    return forget(attrs.evolve(blocks, ref_counts=held, after=after, before=before, n_free=blocks.n_free - n), ids), ids


def share(blocks: Blocks, ids: Sequence[int]) -> Blocks:
    """One more table holds each of these (distinct) blocks; the free ones among them leave the queue."""
    counts, after, before = blocks.ref_counts.copy(), blocks.after.copy(), blocks.before.copy()
    free = [block for block in ids if counts[block] == 0]
    for block in free:
        after[before[block]], before[after[block]] = after[block], before[block]
    counts[np.asarray(ids, np.int32)] += 1
    return _with_queue(blocks, counts, after, before, blocks.n_free - len(free))


def release(blocks: Blocks, ids: Sequence[int]) -> Blocks:
    """One table fewer holds each of these blocks, once per occurrence; those that none holds join the free queue.

    `ids` are whole block tables, one after another. They are queued last block first, so that a chain of cached
    blocks is reused from its end and what remains of it can still be found.
    """
    counts = blocks.ref_counts.copy()
    np.subtract.at(counts, np.asarray(ids, np.int32), 1)
    freed = [block for block in dict.fromkeys(ids) if counts[block] == 0][::-1]
    keyed = [block for block in freed if block in blocks.keys]
    unkeyed = [block for block in freed if block not in blocks.keys]
    after, before, ring = blocks.after.copy(), blocks.before.copy(), blocks.ring
    _link(after, before, [ring, *unkeyed, int(after[ring])])
    _link(after, before, [int(before[ring]), *keyed, ring])
    return _with_queue(blocks, counts, after, before, blocks.n_free + len(freed))


def _with_queue(blocks: Blocks, counts: Int, after: Int, before: Int, n_free: int) -> Blocks:
    return attrs.evolve(blocks, ref_counts=freeze(counts), after=freeze(after), before=freeze(before), n_free=n_free)


def _link(after: Column, before: Column, ids: list[int]) -> None:
    """Make each id the neighbour of the next, in place."""
    after[ids[:-1]], before[ids[1:]] = ids[1:], ids[:-1]


def _slots_due(state: EngineState, row_ids: Int) -> tuple[Bool, Bool]:
    """For rows about to compute one token: who needs a new block, and who a copy of its shared open one."""
    rows, counts = state.rows, state.blocks.ref_counts
    column = rows.n_computed[row_ids] // state.limits.block_size
    is_full = column >= rows.n_blocks[row_ids]
    open_block = rows.block_tables.ids[row_ids, np.where(is_full, 0, column)]
    is_shared = ~is_full & (counts[open_block] > 1)
    if is_shared.any():  # where all of a block's holders would copy it, the first may keep it
        block, first, n_copies = np.unique(np.where(is_shared, open_block, -1), return_index=True, return_counts=True)
        is_shared[first[(block >= 0) & (n_copies == counts[block])]] = False
    return is_full, is_shared


def n_blocks_due(state: EngineState, row_ids: Int) -> int:
    """Blocks that these rows take if each of them computes one more token."""
    is_full, is_shared = _slots_due(state, row_ids)
    return int(is_full.sum() + is_shared.sum())


def grow(state: EngineState, row_ids: Int) -> tuple[EngineState, Int]:
    """Give each row a slot of its own for one more token; also the block copies [C, 2] this needs (copy-on-write)."""
    is_full, is_shared = _slots_due(state, row_ids)
    due = is_full | is_shared
    if not due.any():
        return state, no_copies()
    blocks, ids = take(state.blocks, int(due.sum()))
    rows, new = state.rows, np.array(ids, np.int32)
    full, tables, lengths = row_ids[is_full], rows.block_tables, rows.n_blocks
    if is_full.any():
        tables = append_entries(tables, lengths, full, new[is_full[due]])
        lengths = write(lengths, full, lengths[full] + 1)
    copies = no_copies()
    if is_shared.any():
        place = (row_ids[is_shared], rows.n_computed[row_ids[is_shared]] // state.limits.block_size)
        copies = np.stack([tables.ids[place], new[is_shared[due]]], axis=1)
        tables, blocks = write_entries(tables, lengths, place, copies[:, 1]), release(blocks, copies[:, 0].tolist())
    return attrs.evolve(state, rows=attrs.evolve(rows, block_tables=tables, n_blocks=lengths), blocks=blocks), copies


def fork(state: EngineState, row: int, n: int = 1, first_sample: int | None = None) -> tuple[EngineState, list[int]]:
    """Start n more rows that continue as `row` does, sharing its blocks; nothing is copied until one of them writes.

    The new rows are the samples from `first_sample` on, by default numbers that no sample of the request has. Raises
    ValueError if the row isn't running, still has prompt to compute, or fewer than n rows are free.
    """
    rows = state.rows
    is_decoding = rows.is_running[row] and rows.n_samples[row] == 1 and rows.n_computed[row] >= rows.n_known[row] - 1
    if not is_decoding:
        raise ValueError(f"row {row} is not running, or its prompt is not computed; fork rows that decode")
    n_free = state.limits.max_rows - n_reserved(rows)
    if n > n_free:
        raise ValueError(f"{n} forks asked, {n_free} rows free; raise max_rows or end other rows first")
    free = np.flatnonzero(~rows.is_running)[:n]
    first = _next_sample(state, row) if first_sample is None else first_sample
    table, columns = block_table(rows, row), {name: getattr(rows, name)[row] for name in COLUMNS}
    rows = update(rows, free, **columns | {"sample": first + np.arange(n)})
    tables = write_entries(rows.block_tables, rows.n_blocks, free, rows.block_tables.ids[row])
    rows = attrs.evolve(rows, block_tables=tables)
    for index in free.tolist():
        requests = replaced(rows.requests, index, rows.requests[row])
        rows = attrs.evolve(rows, requests=requests, histories=replaced(rows.histories, index, rows.histories[row]))
    blocks = state.blocks
    counts = write(blocks.ref_counts, table, blocks.ref_counts[table] + n)
    return attrs.evolve(state, rows=rows, blocks=attrs.evolve(blocks, ref_counts=counts)), free.tolist()


def _next_sample(state: EngineState, row: int) -> int:
    rows, arrival = state.rows, state.rows.arrival[row]
    running = rows.sample[rows.is_running & (rows.arrival == arrival)].tolist()
    waiting = [entry.sample for entry in state.waiting if entry.arrival == arrival]
    return max(request_of(rows, row).params.n, 1 + max(running + waiting))


def vacate(state: EngineState, row_ids: Sequence[int]) -> EngineState:
    """Free these rows and release their blocks."""
    rows = state.rows
    tables = [block for row in row_ids for block in block_table(rows, row).tolist()]
    requests, histories = list(rows.requests), list(rows.histories)
    for row in row_ids:
        requests[row], histories[row] = None, history(())
    rows = attrs.evolve(
        rows,
        is_running=write(rows.is_running, list(row_ids), False),
        requests=tuple(requests),
        histories=tuple(histories),
    )
    return attrs.evolve(state, rows=rows, blocks=release(state.blocks, tables))
