"""The running sequences, one row each, as columns: a step reads and writes whole columns, never a
row at a time.

Lengths of a row, all in tokens and never out of this order: [0, n_computed) has its keys and values
in the cache, or will once the steps planned so far have run; [0, n_known) has token ids on the
host; [0, n_tokens) is the sequence, whose newest tokens may still be being sampled; at max_len it
ends. Read next: waiting.py and engine.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
import numpy as np

from nva.state.columns import (
    Bool,
    Column,
    Float,
    Ids,
    Int,
    Long,
    Restored,
    column_field,
    evolve,
    freeze,
    write,
)
from nva.state.limits import Limits
from nva.state.request import ROW_PARAMS, Request
from nva.state.table import Table, empty_table, entries_of

NO_TOKEN = -1
NO_SOURCE = -1


class SampleId(NamedTuple):
    """Which sequence: the arrival of its request, and which of the request's samples it is.

    It stays the same while the sequence moves between the queue and rows; a row does not."""

    arrival: int
    sample: int


@attrs.frozen(kw_only=True)
class Bias:
    """What a request adds to logits, its logit_bias as arrays."""

    tokens: Int  # [k] distinct token ids
    values: Float  # [k]


@attrs.frozen(kw_only=True, slots=False)
class Rows(Restored):
    """Columns of max_rows entries. Where `is_running` is False the other columns hold leftovers
    that nothing reads."""

    is_running: Bool = column_field()
    requests: Column = column_field()  # of Request, None where no row runs
    arrival: Long = column_field()  # order in which requests were submitted
    # The policy's order, lower first; arrival and sample break ties.
    rank: Float = column_field()
    # Which of the request's samples this row is. Until its prompt is computed, the row stands for
    # n_samples of them, from this one on; then it forks, and n_samples is 1.
    sample: Int = column_field()
    n_samples: Int = column_field()
    # Lengths, see above.
    n_prompt: Int = column_field()
    n_computed: Int = column_field()
    n_known: Int = column_field()
    n_tokens: Int = column_field()
    max_len: Int = column_field()
    # Where the newest token is only on the device: its index among the samples of the newest plan,
    # else NO_SOURCE. Written only where limits.lookahead allows planning with such tokens.
    source: Int = column_field()
    # [rows, max_model_len]; the first n_known token ids are this state's.
    histories: Table = attrs.field(eq=False)
    # [rows, table_width]; the first n_blocks block ids are this state's.
    block_tables: Table = attrs.field(eq=False)
    n_blocks: Int = column_field()
    n_published: Int = column_field()  # leading blocks that have passed through the prefix index
    chain: Long = column_field()  # chain of the last of them
    n_cached: Int = column_field()  # prompt tokens taken from the prefix cache at first admission
    sampling: Column = column_field()  # ROW_PARAMS
    stop_ids: Int = column_field()  # [rows, most stop ids of a request], filled up with NO_TOKEN
    biases: Column = column_field()  # of Bias, None where the request has none


TABLES = ("histories", "block_tables")
COLUMNS = tuple(name for name in attrs.fields_dict(Rows) if name not in TABLES)
"""The fields of Rows that are plain columns."""


def empty_rows(limits: Limits) -> Rows:
    """No row running."""
    n = limits.max_rows
    dtypes = {"is_running": np.bool_, "rank": np.float64, "sampling": ROW_PARAMS}
    dtypes |= dict.fromkeys(("arrival", "chain"), np.int64)
    columns = {name: freeze(np.zeros(n, dtypes.get(name, np.int32))) for name in COLUMNS}
    columns |= {
        "requests": freeze(np.full(n, None)),
        "biases": freeze(np.full(n, None)),
        "stop_ids": freeze(np.zeros((n, 0), np.int32)),
    }
    return Rows(
        histories=empty_table(n, limits.max_model_len),
        block_tables=empty_table(n, limits.table_width),
        **columns,
    )


def running(rows: Rows) -> Ids:
    """Ids of the running rows, best rank first."""
    (ids,) = rows.is_running.nonzero()
    return ids[np.lexsort((rows.sample[ids], rows.arrival[ids], rows.rank[ids]))]


def n_reserved(rows: Rows) -> int:
    """Rows in use, with those that running prompts will fork into."""
    return int(rows.n_samples[rows.is_running].sum())


def sample_id(rows: Rows, row: int) -> SampleId:
    """Which sequence a running row holds."""
    return SampleId(int(rows.arrival[row]), int(rows.sample[row]))


def token_ids(rows: Rows, row: int) -> Int:
    """The tokens of a row that the host knows, prompt and output, int32."""
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
    """The rows with `column[which] = value` for each column named; one copy of each column.
    `which` is whatever numpy indexes one axis with: a row, ids [n], or a mask [rows]."""
    columns = {name: write(getattr(rows, name), which, value) for name, value in values.items()}
    return evolve(rows, **columns)
