"""The whole state of an engine, and the laws that hold for it after every step.

Nothing else is remembered between steps but the device's KV cache, which is not state: see
forward.py. Read next: steps/schedule.py."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from nva.state.blocks import ROOT, Blocks, empty_blocks, free_ids
from nva.state.columns import Column
from nva.state.errors import InvariantError
from nva.state.generation import COLD
from nva.state.limits import Limits, blocks_for
from nva.state.policy import Policy, first_come_first_served
from nva.state.rows import COLUMNS, TABLES, Rows, block_table, empty_rows, n_reserved, running
from nva.state.waiting import Queue


@attrs.frozen(kw_only=True, slots=False)
class EngineState:
    """Requests that wait, rows that run, and the blocks that these hold."""

    limits: Limits
    policy: Policy
    policy_state: Any
    seed: int  # of the requests that bring none
    n_arrived: int  # requests submitted so far
    waiting: Queue
    rows: Rows
    blocks: Blocks
    # The generation of the cache that this state's steps have written, and what came in since it
    # was made: digests of prompts, sampled tokens. See generation.py.
    generation: bytes
    history: bytes
    sampler_state: Any = None  # what a loop.Sampler remembers, None before its first step


def empty(limits: Limits, policy: Policy = first_come_first_served, seed: int = 0) -> EngineState:
    """The state in which nothing was asked yet. It fits any cache, since it expects nothing of
    one."""
    return EngineState(
        limits=limits,
        policy=policy,
        policy_state=policy.init(),
        seed=seed,
        n_arrived=0,
        waiting=Queue(),
        rows=empty_rows(limits),
        blocks=empty_blocks(limits),
        generation=COLD,
        history=b"",
    )


def is_busy(state: EngineState) -> bool:
    """Whether anything waits or runs."""
    return bool(state.waiting) or bool(state.rows.is_running.any())


def check(state: EngineState) -> None:
    """Raise InvariantError if a law of the state is broken. Run by tests, and after every step
    where NVA_CHECK=1."""
    check_read_only(state)
    check_conservation(state)
    check_index(state.blocks)
    check_rows(state)
    check_waiting(state)


def check_read_only(state: EngineState) -> None:
    """No column can be written in place."""
    columns: dict[str, Column] = {name: getattr(state.rows, name) for name in COLUMNS}
    columns |= {name: getattr(state.rows, name).lines for name in TABLES}
    columns["ref_counts"] = state.blocks.ref_counts
    writeable = [name for name, column in columns.items() if column.flags.writeable]
    _equal("columns are read-only", writeable, [])


def check_conservation(state: EngineState) -> None:
    """Free and held blocks are the pool; a block's reference count is its occurrences in block
    tables."""
    blocks = state.blocks
    counts = blocks.ref_counts.tolist()
    held = np.zeros(len(counts), np.int64)
    for row in running(state.rows):
        np.add.at(held, block_table(state.rows, row), 1)
    free = free_ids(blocks)
    first = state.limits.n_scratch
    pool = list(range(first, first + state.limits.n_blocks))
    _equal("reference counts are occurrences in block tables", counts, held.tolist())
    _equal("the free queue's length is n_free", len(free), blocks.n_free)
    _equal("free and held blocks are the pool", sorted([*free, *held.nonzero()[0].tolist()]), pool)


def check_index(blocks: Blocks) -> None:
    """The prefix index and the blocks' keys are each other's inverse, and every keyed block ends a
    chain of its own."""
    found = blocks.index.as_dict()
    inverse = {entry.block: key for key, entry in found.items()}
    chains = {entry.chain for entry in found.values()}
    _equal("index and keys are inverse", inverse, blocks.keys.as_dict())
    _equal("chains are distinct and numbered", len(chains - {ROOT}), len(found))


def check_rows(state: EngineState) -> None:
    """Lengths are in order, blocks cover what is computed, and no more rows are promised than
    exist."""
    for row in running(state.rows):
        check_row(state, int(row))
    promised = n_reserved(state.rows)
    _equal("promised rows fit", min(promised, state.limits.max_rows), promised)


def check_row(state: EngineState, row: int) -> None:
    """The laws of one running row."""
    rows = state.rows
    limits = state.limits
    n_computed = int(rows.n_computed[row])
    n_known = int(rows.n_known[row])
    n_tokens = int(rows.n_tokens[row])
    n_blocks = int(rows.n_blocks[row])
    ends = [0, n_computed, n_tokens, int(rows.max_len[row]), limits.max_model_len]
    _ascending(f"row {row}: 0 <= computed <= tokens <= max_len <= max_model_len", ends)
    ends = [1, int(rows.n_prompt[row]), n_known, n_tokens, n_known + 1 + limits.lookahead]
    _ascending(f"row {row}: 1 <= prompt <= known <= tokens <= known + 1 + lookahead", ends)
    needed = blocks_for(n_computed, limits.block_size)
    _ascending(f"row {row}: blocks cover the computed tokens", [needed, n_blocks])
    _ascending(f"row {row}: the table holds its tokens", [n_known, rows.histories.filled[row]])
    _ascending(f"row {row}: the table holds its blocks", [n_blocks, rows.block_tables.filled[row]])


def check_waiting(state: EngineState) -> None:
    """The queue is in order, counts its entries, and finds them by their requests."""
    orders = [entry.order for entry in state.waiting]
    _equal("waiting is in order", orders, sorted(orders))
    _equal("waiting is counted", len(state.waiting), len(orders))
    indexed = [order for each in state.waiting.orders.as_dict().values() for order in each]
    _equal("waiting is found by request", sorted(indexed), sorted(orders))


def _ascending(law: str, values: list[int]) -> None:
    _equal(law, values, sorted(values))


def _equal(law: str, left: object, right: object) -> None:
    if left != right:
        raise InvariantError.unequal(law, left, right)
