"""What states are made of: read-only columns, append-only histories and tables, and a lookup table that is a value.

The one law here: a value that a state has shown never changes. This is the only file that knows how a copy is made,
or how the newest owner may do without one.
Read next: blocks.py and rows.py, which are built of these columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

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


K = TypeVar("K")
V = TypeVar("V")


class Lookup(Generic[K, V]):
    """A dict as a value. One dict serves all versions: the newest holds it, every older one what must be undone to
    get there (Baker 1978, Shallow Binding). So the newest version costs what a dict costs, and any other one can
    still be read or changed: it takes the dict over, at the price of the changes between.
    """

    __slots__ = ("_items", "_newer", "_undo")

    def __init__(self, items: dict[K, V] | None = None) -> None:
        self._items: dict[K, V] | None = items if items is not None else {}
        self._newer: Lookup[K, V] | None = None
        self._undo: dict[K, V | None] = {}

    def get(self, key: K) -> V | None:
        """The value under the key, None if there is none."""
        return self._taken_over().get(key)

    def as_dict(self) -> dict[K, V]:
        """All of it, copied."""
        return dict(self._taken_over())

    def __contains__(self, key: K) -> bool:
        return key in self._taken_over()

    def __len__(self) -> int:
        return len(self._taken_over())

    def updated(self, changes: Mapping[K, V | None]) -> Lookup[K, V]:
        """The version with these values set; None removes a key."""
        newer = Lookup(self._taken_over())
        self._hand_over(newer, changes)
        return newer

    def _hand_over(self, other: Lookup[K, V], changes: Mapping[K, V | None]) -> None:
        """Make the dict the other version's, which differs from this one by the changes."""
        items = self._taken_over()
        undo = {key: items.get(key) for key in changes}
        for key, value in changes.items():
            if value is None:
                items.pop(key, None)
            else:
                items[key] = value
        other._items, other._newer, other._undo = items, None, {}
        self._items, self._newer, self._undo = None, other, undo

    def _taken_over(self) -> dict[K, V]:
        """The dict with this version's content: taken from the newest version, through all between."""
        path: list[Lookup[K, V]] = []
        version = self
        while version._newer is not None:
            path.append(version)
            version = version._newer
        for older in reversed(path):
            version._hand_over(older, older._undo)
            version = older
        assert self._items is not None
        return self._items
