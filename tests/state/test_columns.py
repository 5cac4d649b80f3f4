"""Append-only tables and lookups: the newest owner writes in place, every other owner keeps what it
has."""

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nva.state.blocks import empty_blocks
from nva.state.columns import evolve, freeze, write
from nva.state.limits import Limits
from nva.state.lookup import Lookup
from nva.state.table import (
    append_entries,
    empty_table,
    entries_at,
    entries_of,
    replace_entries,
)


def test_the_newest_owner_appends_in_place_and_an_older_one_moves() -> None:
    row, none, one = np.array([0]), np.array([0]), np.array([1])
    table = append_entries(empty_table(1, 4), row, none, [5])
    newer = append_entries(table, row, one, [6])
    assert newer is table
    other = append_entries(table, row, one, [7])
    assert (entries_of(newer, 0, 0, 2).tolist(), entries_of(other, 0, 0, 2).tolist()) == (
        [5, 6],
        [5, 7],
    )


Change = tuple[int, int, int, str]
changes = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 2), st.integers(0, 9), st.sampled_from("aaart"))
)


@given(changes)
def test_every_table_stays_what_it_was(given_changes: list[Change]) -> None:
    """Owners in a tree append an entry to a row of any earlier table, replace a row, or copy
    another one into it."""
    owners: list[tuple[Any, Any]] = [(empty_table(3, 32), np.zeros(3, np.int32))]
    expected: list[list[list[int]]] = [[[], [], []]]
    for parent, row, value, kind in given_changes:
        table, lengths = owners[parent % len(owners)]
        lists, at = [list(entries) for entries in expected[parent % len(owners)]], np.array([row])
        if kind == "a" and len(lists[row]) < 32:
            lists[row].append(value)
            table = append_entries(table, at, lengths[at], [value])
        else:
            source = value % 3
            lists[row] = [value] * row if kind == "r" else list(lists[source])
            entries = (
                np.array(lists[row], np.int32)
                if kind == "r"
                else entries_of(table, source, 0, lengths[source])
            )
            table = replace_entries(table, at, entries, len(lists[row]))
        owners.append((table, write(lengths, row, len(lists[row]))))
        expected.append(lists)
        found = [
            [entries_of(table, row, 0, lengths[row]).tolist() for row in range(3)]
            for table, lengths in owners
        ]
        assert found == expected


def test_several_rows_grow_at_once_those_that_an_older_owner_extends_apart() -> None:
    rows, lengths = np.array([2, 0]), np.array([0, 0])
    first = append_entries(empty_table(3, 4), rows, lengths, [1, 2])
    second = append_entries(first, rows[:1], lengths[:1], [3])
    both = append_entries(first, rows, np.array([1, 1]), [4, 5])
    assert entries_at(first, rows, slice(1)).tolist() == [[1], [2]]
    assert entries_of(second, 2, 0, 1).tolist() == [3]
    assert entries_at(both, rows, slice(2)).tolist() == [[1, 4], [2, 5]]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30), st.dictionaries(st.integers(0, 5), st.none() | st.integers(0, 9))
        )
    )
)
def test_every_version_of_a_lookup_stays_what_it_was(
    updates: list[tuple[int, dict[int, int | None]]],
) -> None:
    """Versions in a tree, each made of any earlier one, and read in any order."""
    versions, expected = [Lookup[int, int]()], [dict[int, int]()]
    for parent, changes in updates:
        versions.append(versions[parent % len(versions)].updated(changes))
        merged = {**expected[parent % len(expected)], **changes}
        expected.append({key: value for key, value in merged.items() if value is not None})
        assert [version.as_dict() for version in versions] == expected
        assert [version.as_dict() for version in reversed(versions)] == expected[::-1]
        assert [[version.get(key) for key in range(6)] for version in versions[-2:]] == [
            [content.get(key) for key in range(6)] for content in expected[-2:]
        ]


def test_columns_are_read_only_and_written_by_copy() -> None:
    column = freeze(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="read-only"):
        column[0] = 1
    changed = write(column, [0, 2], [1, 2])
    assert (column.tolist(), changed.tolist()) == ([0, 0, 0], [1, 0, 2])
    assert not changed.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        entries_of(empty_table(1, 1), 0, 0, 1)[0] = 1


def test_an_evolved_record_shares_nothing_that_can_change() -> None:
    blocks = empty_blocks(Limits(vocab_size=2, max_model_len=2, n_blocks=2))
    assert (evolve(blocks, n_free=1).n_free, blocks.n_free) == (1, 2)
    with pytest.raises(TypeError, match="Blocks has no n_freed"):
        evolve(blocks, n_freed=1)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        blocks.n_free = 1  # pyright: ignore[reportAttributeAccessIssue]
