"""Validators of what users write: each raises ValueError saying what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

Validator = Callable[[object, "attrs.Attribute[Any]", Any], None]


def number(low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> Validator:
    """A finite number in [low, high], or in (low, high] if it must be above."""

    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (above and value == low):
            left = "(" if above or math.isinf(low) else "["
            right = ")" if math.isinf(high) else "]"
            raise ValueError(f"{field.name} is {value!r}; give a finite number in {left}{low:g}, {high:g}{right}")

    return check


def whole(low: int, high: int | None = None) -> Validator:
    """An int in [low, high]."""

    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            bound = f"of at least {low}" if high is None else f"in [{low}, {high}]"
            raise ValueError(f"{field.name} is {value!r}; give a whole number {bound}")

    return check


def flag(_: object, field: attrs.Attribute[Any], value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{field.name} is {value!r}; give True or False")
