"""Read-only numpy columns and append-only token histories.

The one law here: a value that a state has shown never changes. This is the only file that knows how a copy is made.
Read next: blocks.py and rows.py, which are built of these columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

Int = NDArray[np.int32]
Long = NDArray[np.int64]
Float = NDArray[np.float64]
Bool = NDArray[np.bool_]
Column = NDArray[Any]

Tokens: TypeAlias = "array[int]"  # of type code "i"; grows at its end, in amortized constant time
"""A token history's buffer. A record that holds one also holds how many of its first entries are its own."""


def freeze(values: Column) -> Column:
    """Make an array read-only, in place, and return it."""
    values.flags.writeable = False
    return values


def column_field() -> Any:
    """An attrs field for a column, compared by value; write() and freeze() make it read-only, check() sees to it."""
    return attrs.field(eq=attrs.cmp_using(eq=np.array_equal))  # pyright: ignore[reportUnknownVariableType]


def array_field() -> Any:
    """An attrs field for an array of a record that is built once a step: made read-only, compared by value."""
    return attrs.field(converter=freeze, eq=attrs.cmp_using(eq=np.array_equal))  # pyright: ignore[reportUnknownVariableType]


def write(column: Column, index: Any, values: ArrayLike) -> Column:
    """A copy of the column in which `column[index] = values`."""
    copy = column.copy()
    copy[index] = values
    return freeze(copy)


def history(token_ids: Iterable[int]) -> Tokens:
    """A buffer that begins with these tokens."""
    return array("i", token_ids)


def append_each(
    buffers: tuple[Tokens, ...], which: Sequence[int], lengths: Sequence[int], tokens: Sequence[int]
) -> tuple[Tokens, ...]:
    """Add `tokens[i]` to the history `buffers[which[i]][: lengths[i]]`, for each i; give back all buffers.

    The newest owner of a buffer writes past its own length, where no older owner reads. Any other owner finds the
    buffer longer than its length, and copies first.
    """
    copied: dict[int, Tokens] = {}
    for index, length, token in zip(which, lengths, tokens, strict=True):
        buffer = buffers[index]
        if len(buffer) != length:
            buffer = copied[index] = buffer[:length]
        buffer.append(token)
    return tuple(copied.get(i, buffer) for i, buffer in enumerate(buffers)) if copied else buffers


@attrs.frozen(eq=False)
class Table:
    """Append-only rows of ids in one array, [rows, width], on the terms of a token history: an owner knows how many
    entries of each row are its own, and the newest owner appends in place."""

    ids: Int  # read-only view
    buffer: Int  # for append_entries and write_entries only, like the next
    filled: Int  # [rows], entries that the newest owner has


def empty_table(n_rows: int, width: int) -> Table:
    """No row has an entry."""
    return _table(np.zeros((n_rows, width), np.int32), np.zeros(n_rows, np.int32))


def _table(buffer: Int, filled: Int) -> Table:
    return Table(freeze(buffer.view()), buffer, filled)


def append_entries(table: Table, lengths: Int, rows: Int, values: ArrayLike) -> Table:
    """One more entry for each of these (distinct) rows, whose owner has the first `lengths` [all rows] of each."""
    if (table.filled[rows] != lengths[rows]).any():
        table = _table(table.buffer.copy(), lengths.copy())
    table.buffer[rows, lengths[rows]] = values
    table.filled[rows] += 1
    return table


def write_entries(table: Table, lengths: Int, index: Any, values: ArrayLike) -> Table:
    """A copy of the table in which `ids[index] = values`, whose owner then has `lengths` [all rows] entries."""
    buffer = table.buffer.copy()
    buffer[index] = values
    return _table(buffer, lengths.copy())


def tokens_between(buffer: Tokens, start: int, end: int) -> Int:
    """Tokens `[start, end)` of a history, int32; a copy, since a buffer that is being viewed can't grow."""
    return np.frombuffer(buffer[start:end], dtype=np.int32)


def replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """The tuple with another value at one index."""
    return (*values[:index], value, *values[index + 1 :])
