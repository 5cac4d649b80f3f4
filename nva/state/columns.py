"""What states are made of: records with read-only columns, append-only tables, and a lookup table
that is a value.

The one law here: a value that a state has shown never changes. This is the only file that knows how
a copy is made, or how the newest owner may do without one. Read next: blocks.py and rows.py, which
are built of these columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

Int = NDArray[np.int32]
Long = NDArray[np.int64]
Float = NDArray[np.float64]
Bool = NDArray[np.bool_]
Column = NDArray[Any]
Ids = NDArray[np.intp]
"""Ids that columns are indexed with each step: numpy takes three times as long where it must widen
them first."""

R = TypeVar("R")


def evolve(record: R, **changes: Any) -> R:
    """attrs.evolve in an eighth of its time, for records without slots, validators and
    converters."""
    fields, evolved = record.__dict__, object.__new__(type(record))
    if not changes.keys() <= fields.keys():
        raise TypeError(
            f"{type(record).__name__} has no {', '.join(sorted(changes.keys() - fields.keys()))}"
        )
    evolved.__dict__.update(fields, **changes)
    return evolved


def freeze(values: Column) -> Column:
    """Make an array read-only, in place, and return it."""
    values.setflags(write=False)
    return values


def column_field() -> Any:
    """An attrs field for a column, compared by value; write() and freeze() make it read-only,
    check() sees to it."""
    return attrs.field(eq=attrs.cmp_using(eq=np.array_equal))  # pyright: ignore[reportUnknownVariableType]


def array_field() -> Any:
    """An attrs field for an array of a record that is built once a step: made read-only, compared
    by value."""
    return attrs.field(converter=freeze, eq=attrs.cmp_using(eq=np.array_equal))  # pyright: ignore[reportUnknownVariableType]


def is_any(mask: Bool) -> bool:
    """mask.any(), without the Python code that numpy has around it."""
    return len(mask.nonzero()[0]) > 0


def write(column: Column, index: Any, values: Any) -> Column:
    """A copy of the column in which `column[index] = values`."""
    copy = column.copy()
    copy[index] = values
    return freeze(copy)


@attrs.define(eq=False)
class _Lines:
    """Where the rows of tables lie. A line is given to one row of one table, and never again."""

    entries: Int  # [lines, width]
    filled: Int  # [lines], entries that the newest owner has
    n_given: int


@attrs.frozen(eq=False)
class Table:
    """Append-only rows of int32, as a value. Its owner knows how many entries of each row are its
    own.

    Tables that were made of each other share lines: the newest owner of a row appends in place,
    beyond what others read. A row that an older owner extends, or that gets other entries, moves to
    a line that nobody has read."""

    lines: Ids  # [rows]
    shared: _Lines

    @property
    def filled(self) -> Int:
        """[rows] Entries that the newest owner of each row has."""
        return self.shared.filled[self.lines]


def empty_table(n_rows: int, width: int) -> Table:
    """No row has an entry."""
    lines = _Lines(np.zeros((2 * n_rows, width), np.int32), np.zeros(2 * n_rows, np.int32), n_rows)
    return Table(freeze(np.arange(n_rows)), lines)


def entries_of(table: Table, row: int, start: int, end: int) -> Int:
    """Entries [start, end) of a row, read-only."""
    return freeze(table.shared.entries[table.lines[row], start:end])


def entries_at(table: Table, rows: Ids, columns: Any) -> Int:
    """What numpy's indexing gives for these rows and columns, a copy."""
    return table.shared.entries[table.lines[rows], columns]


def append_entries(table: Table, rows: Ids, lengths: Int, values: ArrayLike) -> Table:
    """One more entry for each of these (distinct) rows, whose owner has the first `lengths` of
    each."""
    lines = table.lines[rows]
    is_older = table.shared.filled[lines] != lengths
    if is_any(is_older):
        moving, kept = rows[is_older], lengths[is_older]
        table = replace_entries(table, moving, entries_at(table, moving, slice(kept.max())), kept)
        lines = table.lines[rows]
    table.shared.entries[lines, lengths] = values
    table.shared.filled[lines] = lengths + 1
    return table


def replace_entries(table: Table, rows: Any, entries: Column, lengths: ArrayLike) -> Table:
    """The table with other entries [rows, any width] in these rows, the first `lengths` of which
    are the owner's."""
    if table.shared.n_given + np.size(rows) > len(table.shared.entries):
        table = _moved(table)
    shared, n = table.shared, table.shared.n_given
    shared.n_given += np.size(rows)
    shared.entries[n : shared.n_given, : entries.shape[-1]] = entries
    shared.filled[n : shared.n_given] = lengths
    return Table(write(table.lines, rows, np.arange(n, shared.n_given)), shared)


def _moved(table: Table) -> Table:
    """The same table in lines of its own, as many again to give. Each line given pays for the copy
    of about one."""
    moved, filled = empty_table(len(table.lines), table.shared.entries.shape[1]), table.filled
    width = filled.max()
    moved.shared.entries[: len(filled), :width] = table.shared.entries[table.lines, :width]
    moved.shared.filled[: len(filled)] = filled
    return moved


K = TypeVar("K")
V = TypeVar("V")


class Lookup(Generic[K, V]):
    """A dict as a value. One dict serves all versions: the newest holds it, every older one what
    must be undone to get there (Baker 1978, Shallow Binding). So the newest version costs what a
    dict costs, and any other one can still be read or changed: it takes the dict over, at the price
    of the changes between."""

    __slots__ = ("_items", "_newer", "_undo")

    def __init__(self, items: dict[K, V] | None = None) -> None:
        self._items: dict[K, V] | None = items if items is not None else {}
        self._newer: Lookup[K, V] | None = None
        self._undo: dict[K, V | None] = {}

    def get(self, key: K) -> V | None:
        """The value under the key, None if there is none."""
        return self._taken_over().get(key)

    def __getitem__(self, key: K) -> V:
        return self._taken_over()[key]

    def among(self, keys: Iterable[K]) -> dict[K, V]:
        """What is there of these keys."""
        items = self._taken_over()
        return {key: items[key] for key in keys if key in items}

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
        """Make the dict the other version's, which differs from this one by the changes.

        All is said before the dict changes, so that an interrupt leaves this version as it was.
        """
        items = self._taken_over()
        undo = {key: items.get(key) for key in changes}
        present = {key: value for key, value in changes.items() if value is not None}
        other._items, other._newer, other._undo = items, None, {}
        self._items, self._newer, self._undo = None, other, undo
        items.update(present)
        for key in changes.keys() - present.keys():
            items.pop(key, None)

    def _taken_over(self) -> dict[K, V]:
        """The dict with this version's content: taken from the newest version, through all
        between."""
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
