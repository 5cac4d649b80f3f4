"""Append-only histories and tables: the newest owner writes in place, every other owner keeps what it has."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nva.state.columns import Lookup, append_each, append_entries, empty_table, freeze, history, write, write_entries


def test_the_newest_owner_appends_in_place_and_an_older_one_copies() -> None:
    buffer = history([1, 2])
    (newer,) = append_each((buffer,), [0], [2], [3])
    assert newer is buffer
    (other,) = append_each((buffer,), [0], [2], [4])
    assert (list(newer), list(other)) == ([1, 2, 3], [1, 2, 4])


def test_forks_of_one_history_part_when_they_grow() -> None:
    shared = history([5])
    first, second = append_each((shared, shared), [0, 1], [1, 1], [6, 7])
    assert (list(first), list(second)) == ([5, 6], [5, 7])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9))))
def test_any_owner_may_grow_at_any_time(appends: list[tuple[int, int]]) -> None:
    """Owners in a tree, each continuing any earlier one: every history stays what a list would be."""
    owners, expected = [(history([0]), 1)], [[0]]
    for parent, token in appends:
        buffer, length = owners[parent % len(owners)]
        (grown,) = append_each((buffer,), [0], [length], [token])
        expected.append([*expected[parent % len(owners)], token])
        owners.append((grown, length + 1))
        assert [list(buffer[:length]) for buffer, length in owners] == expected


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2), st.integers(0, 9), st.booleans())))
def test_a_table_is_a_value_like_a_history(changes: list[tuple[int, int, int, bool]]) -> None:
    """Owners in a tree append an entry to a row, or rewrite a row's first entry, of any earlier table."""
    owners: list[tuple[Any, Any]] = [(empty_table(3, 32), np.zeros(3, np.int32))]
    expected: list[list[list[int]]] = [[[], [], []]]
    for parent, row, value, rewrites in changes:
        table, lengths = owners[parent % len(owners)]
        lists = [list(entries) for entries in expected[parent % len(owners)]]
        if rewrites and lists[row]:
            lists[row][0] = value
            owners.append((write_entries(table, lengths, (row, 0), value), lengths))
        elif len(lists[row]) < 32:
            lists[row].append(value)
            grown = append_entries(table, lengths, np.array([row]), [value])
            owners.append((grown, write(lengths, row, lengths[row] + 1)))
        else:
            continue
        expected.append(lists)
        found = [[table.ids[row, : lengths[row]].tolist() for row in range(3)] for table, lengths in owners]
        assert found == expected


@given(st.lists(st.tuples(st.integers(0, 30), st.dictionaries(st.integers(0, 5), st.none() | st.integers(0, 9)))))
def test_every_version_of_a_lookup_stays_what_it_was(updates: list[tuple[int, dict[int, int | None]]]) -> None:
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
        empty_table(1, 1).ids[0, 0] = 1
