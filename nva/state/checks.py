"""Validators of what users write: each raises ValueError saying what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, cast

import attrs
import numpy as np

Validator = Callable[[object, "attrs.Attribute[Any]", Any], None]


LARGEST = 2**63 - 1
"""The largest whole number that a field takes; where a column is narrower, more than fits there is no limit at all."""


def is_whole(value: object) -> bool:
    """Whether it is an int, of Python or of numpy; True and False are not."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def is_number(value: object) -> bool:
    """Whether it is a number, of Python or of numpy, that a float can hold; it may be infinite or NaN."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def as_python(value: Any) -> Any:
    """A number of numpy as Python's own, so that records print, compare and serialize alike; all else as it is."""
    return cast(Any, value).item() if isinstance(value, np.number) else value


def number(low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> Validator:
    """A finite number in [low, high], or in (low, high] if it must be above."""

    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        is_finite = is_number(value) and math.isfinite(value)
        if not is_finite or not low <= value <= high or (above and value == low):
            left = "(" if above or math.isinf(low) else "["
            right = ")" if math.isinf(high) else "]"
            raise ValueError(f"{field.name} is {value!r:.80}; give a finite number in {left}{low:g}, {high:g}{right}")

    return check


def whole(low: int, high: int = LARGEST) -> Validator:
    """An int in [low, high]."""

    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        if not is_whole(value) or not low <= value <= high:
            bound = f"of at least {low} and below 2**63" if high == LARGEST else f"in [{low}, {high}]"
            raise ValueError(f"{field.name} is {value!r:.80}; give a whole number {bound}")

    return check


def flag(_: object, field: attrs.Attribute[Any], value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{field.name} is {value!r}; give True or False")
