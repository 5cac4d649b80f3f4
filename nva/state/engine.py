"""The whole state of an engine, and the laws that hold for it after every step.

Nothing else is remembered between steps but the device's KV cache, which is not state: see
forward.py. Read next: steps/schedule.py."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from nva.state.blocks import ROOT, Blocks, empty_blocks, free_ids
from nva.state.columns import Column, Int, array_field
from nva.state.errors import InvariantError
from nva.state.limits import Limits, blocks_for
from nva.state.policy import Policy, first_come_first_served
from nva.state.request import Request
from nva.state.rows import COLUMNS, TABLES, Rows, block_table, empty_rows, n_reserved, running


@attrs.frozen(kw_only=True)
class Waiting:
    """A sequence that holds no row: a request that has not started, or a row that was preempted."""

    request: Request
    tokens: Int = array_field()  # prompt and output so far
    sample: int
    n_samples: int
    arrival: int
    rank: float
    n_cached: int | None = None  # None until first admitted

    @property
    def n_known(self) -> int:
        return len(self.tokens)

    @property
    def order(self) -> tuple[float, int, int]:
        return (self.rank, self.arrival, self.sample)


@attrs.frozen(kw_only=True, slots=False)
class EngineState:
    """Requests that wait, rows that run, and the blocks that these hold."""

    limits: Limits
    policy: Policy
    policy_state: Any
    seed: int  # of the requests that bring none
    n_arrived: int  # requests submitted so far
    waiting: tuple[Waiting, ...]  # ascending order
    rows: Rows
    blocks: Blocks
    sampler_state: Any = None  # what a loop.Sampler remembers, None before its first step


def empty(limits: Limits, policy: Policy = first_come_first_served, seed: int = 0) -> EngineState:
    """The state in which nothing was asked yet."""
    return EngineState(
        limits=limits,
        policy=policy,
        policy_state=policy.init(),
        seed=seed,
        n_arrived=0,
        waiting=(),
        rows=empty_rows(limits),
        blocks=empty_blocks(limits),
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
    orders = [entry.order for entry in state.waiting]
    _equal("waiting is in order", orders, sorted(orders))


def check_read_only(state: EngineState) -> None:
    """No column can be written in place."""
    columns: dict[str, Column] = {name: getattr(state.rows, name) for name in COLUMNS}
    columns |= {name: getattr(state.rows, name).lines for name in TABLES} | {
        "ref_counts": state.blocks.ref_counts
    }
    _equal(
        "columns are read-only",
        [name for name, column in columns.items() if column.flags.writeable],
        [],
    )


def check_conservation(state: EngineState) -> None:
    """Free and held blocks are the pool; a block's reference count is its occurrences in block
    tables."""
    blocks, rows, limits = state.blocks, state.rows, state.limits
    held = np.zeros(len(blocks.ref_counts), np.int64)
    for row in running(rows):
        np.add.at(held, block_table(rows, row), 1)
    free = free_ids(blocks)
    _equal(
        "reference counts are occurrences in block tables",
        blocks.ref_counts.tolist(),
        held.tolist(),
    )
    _equal("the free queue's length is n_free", len(free), blocks.n_free)
    pool = list(range(limits.n_scratch, limits.n_scratch + limits.n_blocks))
    _equal(
        "free and held blocks are the pool", sorted([*free, *np.flatnonzero(held).tolist()]), pool
    )


def check_index(blocks: Blocks) -> None:
    """The prefix index and the blocks' keys are each other's inverse, and every keyed block ends a
    chain of its own."""
    found = blocks.index.as_dict()
    _equal(
        "index and keys are inverse",
        {entry.block: key for key, entry in found.items()},
        blocks.keys.as_dict(),
    )
    chains = {entry.chain for entry in found.values()}
    _equal("chains are distinct and numbered", len(chains - {ROOT}), len(found))


def check_rows(state: EngineState) -> None:
    """Lengths are in order, blocks cover what is computed, and no more rows are promised than
    exist."""
    rows, limits = state.rows, state.limits
    for row in running(rows):
        lengths = [
            0,
            rows.n_computed[row],
            rows.n_tokens[row],
            rows.max_len[row],
            limits.max_model_len,
        ]
        _equal(
            f"row {row}: 0 <= computed <= tokens <= max_len <= max_model_len",
            lengths,
            sorted(lengths),
        )
        lengths = [
            1,
            rows.n_prompt[row],
            rows.n_known[row],
            rows.n_tokens[row],
            rows.n_known[row] + 1,
        ]
        _equal(f"row {row}: 1 <= prompt <= known <= tokens <= known + 1", lengths, sorted(lengths))
        covered = min(
            int(rows.n_blocks[row]), blocks_for(int(rows.n_computed[row]), limits.block_size)
        )
        _equal(
            f"row {row}: blocks cover the computed tokens",
            covered * limits.block_size >= rows.n_computed[row],
            True,
        )
        filled = [
            rows.histories.filled[row] >= rows.n_known[row],
            rows.block_tables.filled[row] >= rows.n_blocks[row],
        ]
        _equal(f"row {row}: the tables hold its tokens and blocks", filled, [True, True])
    promised = n_reserved(rows)
    _equal("promised rows fit", min(promised, limits.max_rows), promised)


def _equal(law: str, left: object, right: object) -> None:
    if left != right:
        raise InvariantError.unequal(law, left, right)
