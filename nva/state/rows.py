"""The running sequences, one row each, as columns: a step reads and writes whole columns, never a
row at a time.

Lengths of a row, all in tokens and never out of this order: [0, n_computed) has its keys and values
in the cache, [0, n_known) has known token ids, [0, n_tokens) is the sequence, its newest tokens
perhaps still being sampled, and at max_len it ends. Read next: engine.py."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from nva.state.columns import (
    Bool,
    Column,
    Float,
    Ids,
    Int,
    Long,
    Table,
    column_field,
    empty_table,
    entries_of,
    evolve,
    freeze,
    write,
)
from nva.state.limits import Limits
from nva.state.request import SAMPLING, Request


@attrs.frozen(kw_only=True, slots=False)
class Rows:
    """Columns of max_rows entries. Where `is_running` is False the other columns hold leftovers
    that nothing reads."""

    is_running: Bool = column_field()
    requests: Column = column_field()  # of Request, None where no row runs
    stop_ids: Int = column_field()  # [rows, most stop ids of a request], filled up with NO_TOKEN
    histories: Table = attrs.field(
        eq=False
    )  # [rows, max_model_len]; the first n_known token ids are this state's
    arrival: Long = column_field()  # order in which requests were submitted
    rank: Float = column_field()  # the policy's order, lower first; arrival and sample break ties
    sample: Int = (
        column_field()
    )  # which of the request's n samples this row is, the first of its n_samples
    n_samples: Int = (
        column_field()
    )  # samples that start here: n until the prompt is computed, 1 once forked
    n_prompt: Int = column_field()
    n_computed: Int = column_field()
    n_known: Int = column_field()
    n_tokens: Int = column_field()
    max_len: Int = column_field()
    n_cached: Int = column_field()  # prompt tokens taken from the prefix cache at first admission
    n_blocks: Int = column_field()  # entries of the block table in use
    block_tables: Table = attrs.field(
        eq=False
    )  # [rows, table_width]; the first n_blocks ids of each are this state's
    n_published: Int = column_field()  # leading blocks that have passed through the prefix index
    chain: Long = column_field()  # chain of the last of them
    sampling: Column = column_field()  # SAMPLING


TABLES = ("histories", "block_tables")
COLUMNS = tuple(name for name in attrs.fields_dict(Rows) if name not in TABLES)
"""The fields of Rows that are plain columns."""

NO_TOKEN = -1


def empty_rows(limits: Limits) -> Rows:
    """No row running."""
    n = limits.max_rows
    ints = (
        "sample",
        "n_samples",
        "n_prompt",
        "n_computed",
        "n_known",
        "n_tokens",
        "max_len",
        "n_cached",
    )
    return Rows(
        is_running=freeze(np.zeros(n, np.bool_)),
        requests=freeze(np.full(n, None)),
        stop_ids=freeze(np.zeros((n, 0), np.int32)),
        histories=empty_table(n, limits.max_model_len),
        arrival=freeze(np.zeros(n, np.int64)),
        rank=freeze(np.zeros(n, np.float64)),
        block_tables=empty_table(n, limits.table_width),
        chain=freeze(np.zeros(n, np.int64)),
        sampling=freeze(np.zeros(n, SAMPLING)),
        **{name: freeze(np.zeros(n, np.int32)) for name in (*ints, "n_blocks", "n_published")},
    )


def running(rows: Rows) -> Ids:
    """Ids of the running rows, best rank first."""
    (ids,) = rows.is_running.nonzero()
    return ids[np.lexsort((rows.sample[ids], rows.arrival[ids], rows.rank[ids]))]


def n_reserved(rows: Rows) -> int:
    """Rows in use, with those that running prompts will fork into."""
    return int(rows.n_samples[rows.is_running].sum())


def token_ids(rows: Rows, row: int) -> Int:
    """The known tokens of a row, prompt and output, int32."""
    return entries_of(rows.histories, row, 0, rows.n_known[row])


def block_table(rows: Rows, row: int) -> Int:
    """The block ids of a row, in order of position."""
    return entries_of(rows.block_tables, row, 0, rows.n_blocks[row])


def request_of(rows: Rows, row: int) -> Request:
    """The request of a running row."""
    found = rows.requests[row]
    assert found is not None, f"row {row} is not running"
    return found


def update(rows: Rows, which: Any, **values: Any) -> Rows:
    """The rows with `column[which] = value` for each column named; one copy of each."""
    return evolve(
        rows, **{name: write(getattr(rows, name), which, value) for name, value in values.items()}
    )
