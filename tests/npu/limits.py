"""What it takes to be strict: the error of a call outside an operator's documented limits, and
types they share."""

from __future__ import annotations

import torch

HALVES = {torch.bfloat16, torch.float16}
FLOATS = {*HALVES, torch.float32}


class LimitError(ValueError):
    """An operator was called outside the limits that its documentation states."""


def limit(holds: bool, text: str) -> None:
    """Raise LimitError with the documented limit, unless it holds."""
    if not holds:
        raise LimitError(text)
