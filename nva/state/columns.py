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
    """An attrs field for a read-only array, compared by value."""
    field: Any = attrs.field(converter=freeze, eq=attrs.cmp_using(eq=np.array_equal))
    return field


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


def tokens_between(buffer: Tokens, start: int, end: int) -> Int:
    """Tokens `[start, end)` of a history, int32; a copy, since a buffer that is being viewed can't grow."""
    return np.frombuffer(buffer[start:end], dtype=np.int32)


def replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """The tuple with another value at one index."""
    return (*values[:index], value, *values[index + 1 :])
