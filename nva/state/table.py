"""Append-only rows of int32 as a value: token histories and block tables.

They grow every step, so copying them every step is out of the question: [256, 4096] is 4 MB. The
law: entries that a table has shown never change. Read next: rows.py, which has two tables."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike

from nva.state.columns import Column, Ids, Int, Restored, freeze, is_any, write


@attrs.define(eq=False)
class _Lines:
    """The buffer behind tables. A line is given to one row of one table, and never again."""

    entries: Int  # [lines, width]
    filled: Int  # [lines] entries that the newest owner has
    n_given: int


@attrs.frozen(eq=False, slots=False)
class Table(Restored):
    """Append-only rows of int32, as a value. Its owner keeps the length of each row.

    Tables that were made of each other share lines. The newest owner of a row appends in place,
    beyond what others read:

        line      [ 7 3 9 4 . . . ]
        older     [0, 3)             its own length is 3, so it never reads the 4
        newest    [0, 4)             filled is 4: the next entry goes here

    An older owner that extends its row finds it filled beyond its own length, and moves to a fresh
    line first (copy-on-write)."""

    lines: Ids  # [rows]
    shared: _Lines

    @property
    def filled(self) -> Int:
        """[rows] Entries that the newest owner of each row has."""
        return self.shared.filled[self.lines]


def empty_table(n_rows: int, width: int) -> Table:
    """No row has an entry."""
    n_lines = 2 * n_rows
    entries = np.zeros((n_lines, width), np.int32)
    shared = _Lines(entries=entries, filled=np.zeros(n_lines, np.int32), n_given=n_rows)
    return Table(freeze(np.arange(n_rows)), shared)


def entries_of(table: Table, row: int, start: int, end: int) -> Int:
    """Entries [start, end) of a row, read-only."""
    return freeze(table.shared.entries[table.lines[row], start:end])


def slices_of(table: Table, rows: Ids, starts: list[int], ends: list[int]) -> list[Int]:
    """Entries [start, end) of each of these rows, read-only."""
    entries = freeze(table.shared.entries.view())
    lines = table.lines[rows].tolist()
    spans = zip(lines, starts, ends, strict=True)
    return [entries[line, start:end] for line, start, end in spans]


def entries_at(table: Table, rows: Ids, columns: Any) -> Int:
    """What numpy's indexing gives for these rows and columns, a copy."""
    return table.shared.entries[table.lines[rows], columns]


def append_entries(table: Table, rows: Ids, lengths: Int, values: ArrayLike) -> Table:
    """One more entry for each of these (distinct) rows, whose owner has the first `lengths` of
    each."""
    lines = table.lines[rows]
    is_older = table.shared.filled[lines] != lengths
    if is_any(is_older):
        moving = rows[is_older]
        kept = lengths[is_older]
        own = entries_at(table, moving, slice(kept.max()))
        table = replace_entries(table, moving, own, kept)
        lines = table.lines[rows]
    table.shared.entries[lines, lengths] = values
    table.shared.filled[lines] = lengths + 1
    return table


def replace_entries(table: Table, rows: Any, entries: Column, lengths: ArrayLike) -> Table:
    """The table with other entries [rows, any width] in these rows, the first `lengths` of which
    are the owner's."""
    n_rows = np.size(rows)
    if table.shared.n_given + n_rows > len(table.shared.entries):
        table = _moved(table)
    shared = table.shared
    start = shared.n_given
    end = start + n_rows
    shared.n_given = end
    shared.entries[start:end, : entries.shape[-1]] = entries
    shared.filled[start:end] = lengths
    return Table(write(table.lines, rows, np.arange(start, end)), shared)


def _moved(table: Table) -> Table:
    """The same table over a buffer of its own, half of whose lines are still to be given. Each line
    given pays for the copy of about one."""
    n_rows = len(table.lines)
    moved = empty_table(n_rows, table.shared.entries.shape[1])
    width = table.filled.max()
    moved.shared.entries[:n_rows, :width] = table.shared.entries[table.lines, :width]
    moved.shared.filled[:n_rows] = table.filled
    return moved
