"""What states are made of: records with read-only columns.

The one law: a value that a state has shown never changes. Read next: table.py and lookup.py, the
two structures that keep this law without a copy; blocks.py and rows.py, which are built of all
three."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int32]
Long = NDArray[np.int64]
Float = NDArray[np.float64]
Bool = NDArray[np.bool_]
Column = NDArray[Any]
Ids = NDArray[np.intp]
"""Ids that index columns each step. With narrower ones numpy takes three times as long: it widens
them first."""

R = TypeVar("R")


def evolve(record: R, **changes: Any) -> R:
    """attrs.evolve in an eighth of its time, for records without slots, validators and
    converters."""
    evolved = object.__new__(type(record))
    fields = evolved.__dict__
    fields.update(record.__dict__, **changes)
    if len(fields) > len(record.__dict__):
        unknown = ", ".join(sorted(fields.keys() - record.__dict__.keys()))
        raise TypeError(f"{type(record).__name__} has no {unknown}")
    return evolved


def freeze(values: Column) -> Column:
    """Make an array read-only, in place, and return it."""
    values.setflags(write=False)
    return values


def column_field(**options: Any) -> Any:
    """An attrs field for a column, compared by value. write(), freeze() and freeze_columns() make
    it read-only; check() sees to it."""
    same = attrs.cmp_using(eq=np.array_equal)  # pyright: ignore[reportUnknownVariableType]
    return attrs.field(eq=same, **options)


def array_field() -> Any:
    """An attrs field for an array: made read-only, compared by value, and refused by its name if it
    is none."""
    # A validator, not a converter: only validators are told which field they are looking at.
    return column_field(validator=_freeze_field)


def _freeze_field(record: object, field: attrs.Attribute[Any], values: Any) -> None:
    if not isinstance(values, np.ndarray):
        _refuse(record, field.name, values)
    values.setflags(write=False)


def freeze_columns(record: Any, names: Iterable[str]) -> None:
    """Make these arrays of a record read-only, and refuse what is none. For the records of every
    step, which have no slots: a validator for each field takes twice the time."""
    fields = record.__dict__
    for name in names:
        if type(fields[name]) is not np.ndarray:
            _refuse(record, name, fields[name])
        fields[name].setflags(write=False)


def _refuse(record: object, name: str, value: Any) -> None:
    field = f"{type(record).__name__}.{name}"
    raise ValueError(f"{field} is {value!r:.80}; give a numpy array")


class Restored:
    """A record whose columns are read-only again after pickle, which forgets that they were."""

    def __setstate__(self, fields: Mapping[str, Any]) -> None:
        self.__dict__.update(fields)
        for value in fields.values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)


def is_any(mask: Bool) -> bool:
    """mask.any(), without the Python code that numpy has around it."""
    return len(mask.nonzero()[0]) > 0


def write(column: Column, index: Any, values: Any) -> Column:
    """A copy of the column in which `column[index] = values`."""
    copy = column.copy()
    copy[index] = values
    return freeze(copy)
