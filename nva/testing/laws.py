"""The laws of the engine, each a function that raises InvariantError where it is broken.

LAWS names them with one line each; check_step runs all that can be seen in a single step. What only
a whole run shows (transparency, bounded steps, nothing lost) is checked by folds.py."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from nva.state.blocks import ROOT, free_ids
from nva.state.engine import EngineState, check
from nva.state.errors import InvariantError
from nva.state.limits import Limits, blocks_for
from nva.state.plan import Batch, Plan
from nva.state.rows import block_table, running, sample_id, token_ids
from nva.testing.toy import ToyKV

LAWS = {
    "conservation": (
        "free and held blocks are the pool; reference counts are occurrences in block tables"
    ),
    "progress": "each step computes a token; the number of steps is bounded under every policy",
    "write exclusivity": "every slot is written once, in a block that no other row held before "
    "this step",
    "key identity": "a block found under a key holds exactly that chain of tokens",
    "transparency": "a request's tokens depend on its prompt, parameters and seed alone",
    "budgets": "what is packed stays within max_batched_tokens and max_rows",
    "atomicity": "a submission is queued whole or not at all; each sample ends once, with a reason",
    "shapes": "the number of packed shapes is bounded by the buckets",
    "poison": "what a freed block holds never reaches an output",
    "purity": (
        "a step leaves the state before it untouched; replaying the events gives the same states"
    ),
}


def check_step(
    before: EngineState, after: EngineState, plan: Plan, batch: Batch, kv: ToyKV | None = None
) -> None:
    """Check every law that one schedule() and pack() can break, and the cache's content if a toy
    cache is given."""
    check(after)
    check_progress(plan)
    check_budgets(after.limits, plan, batch)
    check_writes(before, after, plan, batch)
    check_padding(after.limits, batch)
    if kv is not None:
        check_keys(after, kv)


def check_progress(plan: Plan) -> None:
    """A planned step computes a token in every planned row."""
    _require(
        "progress",
        plan.n_tokens >= 1 and bool((plan.counts >= 1).all()),
        plan.counts.tolist(),
        "at least 1 each",
    )


def check_budgets(limits: Limits, plan: Plan, batch: Batch) -> None:
    """Tokens and rows are counted as they are packed."""
    _require(
        "budgets",
        plan.n_tokens <= limits.max_batched_tokens,
        plan.n_tokens,
        limits.max_batched_tokens,
    )
    _require("budgets", len(plan.rows) <= limits.max_rows, len(plan.rows), limits.max_rows)
    _require("budgets", batch.n_tokens == plan.n_tokens, batch.n_tokens, plan.n_tokens)
    _require(
        "budgets",
        len(set(plan.rows.tolist())) == len(plan.rows),
        plan.rows.tolist(),
        "distinct rows",
    )
    _require(
        "budgets",
        int(batch.query_ends[-1]) == len(batch.token_ids),
        batch.query_ends.tolist(),
        "T at the end",
    )


def check_writes(before: EngineState, after: EngineState, plan: Plan, batch: Batch) -> None:
    """Each row writes to blocks of its own table. If another row holds such a block too, it has
    found it or forked it in this very step, and held something else before."""
    size = after.limits.block_size
    slots = batch.slots.tolist()
    _require("write exclusivity", len(set(slots)) == len(slots), slots, "distinct")
    expected: list[int] = []
    spans = zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True)
    for row, start, count in spans:
        table = block_table(after.rows, row).tolist()
        expected += [table[p // size] * size + p % size for p in range(start, start + count)]
        for block in table[start // size : blocks_for(start + count, size)]:
            check_write(before, after, plan, row, block)
    _require("write exclusivity", slots[: batch.n_tokens] == expected, slots, expected)


def check_write(before: EngineState, after: EngineState, plan: Plan, row: int, block: int) -> None:
    """A row may write this block."""
    is_pool = block >= after.limits.n_scratch
    _require("write exclusivity", is_pool, f"row {row}", f"scratch block {block}")
    if after.blocks.ref_counts[block] == 1:
        return
    for other in set(running(after.rows).tolist()) - {row}:
        held = block in _table_before(before, after, plan, other)
        is_old = held and block in block_table(after.rows, other)
        _require(
            "write exclusivity",
            not is_old,
            f"row {row} writes block {block}",
            f"row {other} holds it",
        )


def _table_before(before: EngineState, after: EngineState, plan: Plan, row: int) -> list[int]:
    """What the row's sequence held before the step; nothing if it was preempted and placed again in
    between."""
    id_ = sample_id(after.rows, row)
    is_same = before.rows.is_running[row] and sample_id(before.rows, row) == id_
    is_kept = is_same and id_ not in plan.preempted
    return block_table(before.rows, row).tolist() if is_kept else []


def check_padding(limits: Limits, batch: Batch) -> None:
    """Padding writes to and reads from scratch blocks only."""
    padding = batch.slots[batch.n_tokens :] // limits.block_size
    _require(
        "write exclusivity",
        bool((padding < limits.n_scratch).all()),
        padding.tolist(),
        "scratch blocks",
    )
    for row in range(batch.n_rows, len(batch.query_ends)):
        read = batch.block_tables[
            row, : blocks_for(int(batch.context_lens[row]), limits.block_size)
        ]
        _require(
            "write exclusivity",
            bool((read < limits.n_scratch).all()),
            read.tolist(),
            "scratch blocks",
        )


def check_keys(state: EngineState, kv: ToyKV) -> None:
    """A keyed block holds its key's tokens, and its key continues the chain of the block before it
    in every table."""
    for block, key in state.blocks.keys.as_dict().items():
        held = kv.tokens[block].astype(np.int32).tobytes()
        _require(
            "key identity",
            held == key.tokens,
            kv.tokens[block].tolist(),
            np.frombuffer(key.tokens, np.int32),
        )
    for row in running(state.rows).tolist():
        parent, tokens = ROOT, token_ids(state.rows, row)
        for i in range(int(state.rows.n_published[row])):
            block = int(block_table(state.rows, row)[i])
            key = state.blocks.keys.get(block)
            own = tokens[i * state.limits.block_size : (i + 1) * state.limits.block_size].tobytes()
            if key is None:
                break  # another block was found under its key first
            _require("key identity", key.tokens == own and key.parent == parent, key, (parent, own))
            found = state.blocks.index.get(key)
            parent = found.chain if found else ROOT


def snapshot(state: EngineState) -> Any:
    """The state's whole value, copied out, to compare with later."""
    columns = {
        name: value.tobytes()
        for part in (state.rows, state.blocks)
        for name, value in attrs.asdict(part, recurse=False).items()
        if isinstance(value, np.ndarray)
    }
    rows = running(state.rows).tolist()
    tokens = {
        row: (token_ids(state.rows, row).tobytes(), block_table(state.rows, row).tobytes())
        for row in rows
    }
    waiting = [(entry.order, entry.tokens.tobytes()) for entry in state.waiting]
    index = sorted(state.blocks.index.as_dict().items())
    free = free_ids(state.blocks)
    numbers = state.n_arrived, state.policy_state, state.history, state.generation
    return columns, tokens, waiting, index, free, numbers


def check_purity(state: EngineState, then: Any) -> None:
    """The state's value is what snapshot() found earlier."""
    _require("purity", snapshot(state) == then, "the state now", "the state then")


def _require(law: str, holds: bool, left: object, right: object) -> None:
    if not holds:
        raise InvariantError.unequal(law, left, right)
