"""What nva is tested with, for those who test their own scheduler, allocator or policy with it.

actions are what happens to an engine, strategies draws them and limits, laws states what must hold,
toy is a model whose tokens can be worked out by hand, fold runs events through the step functions
and checks the laws, reference is a second engine to compare with. Only strategies need
Hypothesis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nva.testing.actions import Abort, Arrive, Event, Fail, Fork, Step
from nva.testing.folds import Run, Steps, fold
from nva.testing.laws import LAWS, check_step
from nva.testing.toy import ToyKV, toy_forward, toy_sample, toy_tokens

if TYPE_CHECKING:
    from nva.testing.strategies import events, limits, policies

__all__ = [
    "LAWS",
    "Abort",
    "Arrive",
    "Event",
    "Fail",
    "Fork",
    "Run",
    "Step",
    "Steps",
    "ToyKV",
    "check_step",
    "events",
    "fold",
    "limits",
    "policies",
    "toy_forward",
    "toy_sample",
    "toy_tokens",
]


def __getattr__(name: str) -> Any:
    """The strategies, imported when first asked for."""
    if name not in ("events", "limits", "policies"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nva.testing import strategies

    return getattr(strategies, name)
