"""Converters and validators of what users write, and help texts made of what a record's fields say.

The law: what a record takes is said once, by its fields; type checkers, help(), editors and the
command line read it there. A validator raises ValueError that says what was given and what is
allowed."""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar, cast

import attrs
import numpy as np

from nva.state.errors import check_names

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
Validator = Callable[[object, "attrs.Attribute[Any]", Any], None]


LARGEST_INT32 = 2**31 - 1
"""What a column of token counts, or a table of blocks and slots, can hold."""
LARGEST = 2**63 - 1
"""Upper bound of every integer field. A value that doesn't fit its int32 column is clamped there,
which means: no limit."""


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether it is a sequence of things, such as a list or tuple, and not text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def is_whole(value: object) -> bool:
    """Whether it is an int, of Python or of numpy; True and False are not."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def is_number(value: object) -> bool:
    """Whether it is a number, of Python or of numpy, that a float can hold; it may be infinite or
    NaN."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def as_python(value: Any) -> Any:
    """A number or truth value of numpy as Python's own, so that records print, compare and
    serialize alike; all else as it is."""
    return cast(Any, value).item() if isinstance(value, (np.number, np.bool_)) else value


def as_whole(value: Any) -> Any:
    """A float that is a whole number as an int, since JSON's writers may put 50.0 for 50; all else
    as as_python() has it."""
    value = as_python(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def number(low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> Validator:
    """A finite number in [low, high], or in (low, high] if it must be above."""

    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        is_finite = is_number(value) and math.isfinite(value)
        if not is_finite or not low <= value <= high or (above and value == low):
            left = "(" if above or math.isinf(low) else "["
            right = ")" if math.isinf(high) else "]"
            raise ValueError(
                f"{field.name} is {value!r:.80}; give a finite number in {left}{low:g}, "
                f"{high:g}{right}"
            )

    return check


def whole(low: int, high: int = LARGEST) -> Validator:
    """An int in [low, high]."""

    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        if not is_whole(value) or not low <= value <= high:
            bound = (
                f"of at least {low} and below 2**63" if high == LARGEST else f"in [{low}, {high}]"
            )
            raise ValueError(f"{field.name} is {value!r:.80}; give a whole number {bound}")

    return check


def flag(_: object, field: attrs.Attribute[Any], value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{field.name} is {value!r}; give True or False")


def knows_names(owner: str, elsewhere: Mapping[str, str]) -> Callable[[type[R]], type[R]]:
    """For an attrs record of keywords: a name that it doesn't have is a ValueError that suggests
    one, as check_names() does it. `owner` is what the error calls the record.

    inspect and help() show the fields, each with its own type where its converter takes Any."""

    def decorate(record: type[R]) -> type[R]:
        init = record.__init__
        fields = attrs.fields_dict(cast(Any, record))
        for name, field in fields.items():
            if init.__annotations__.get(name) in (None, Any, "Any"):
                init.__annotations__[name] = field.type

        @functools.wraps(init)
        def checked(self: R, **options: Any) -> None:
            check_names(owner, options, list(fields), elsewhere)
            init(self, **options)

        record.__init__ = checked
        return record

    return decorate


def described(record: type[R]) -> type[R]:
    """Append a line "name: meaning (default)." to a record's docstring for every field whose
    metadata has a "help" text, so that help(), editors and the command line all show that text."""
    lines = [inspect.cleandoc(record.__doc__ or ""), ""]
    for field in attrs.fields(cast(Any, record)):
        if "help" in field.metadata:
            is_shown = isinstance(field.default, (bool, int, float, str))
            note = f" ({field.default})" if is_shown else ""
            text = f"{field.name}: {field.metadata['help']}{note}."
            lines += textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent="        ")
    record.__doc__ = "\n".join(lines)
    return record


def takes_fields_of(record: type) -> Callable[[F], F]:
    """For a function that makes a record of its **options: inspect and help() show the record's
    fields in their place."""

    def decorate(function: F) -> F:
        shown = inspect.signature(function)
        own = [each for each in shown.parameters.values() if each.kind is not each.VAR_KEYWORD]
        fields = inspect.signature(record).parameters.values()
        cast(Any, function).__signature__ = shown.replace(parameters=[*own, *fields])
        return function

    return decorate
