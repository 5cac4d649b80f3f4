"""What nva is tested with, for those who test their own scheduler, allocator or policy with it.

strategies draws limits and events, laws states what must hold, toy is a model whose tokens can be
worked out by hand, fold runs events through the step functions and checks the laws, reference is a
second engine to compare with."""

from nva.testing.folds import Run, Steps, fold
from nva.testing.laws import LAWS, check_step
from nva.testing.strategies import Abort, Arrive, Event, Fail, Fork, Step, events, limits, policies
from nva.testing.toy import ToyKV, toy_forward, toy_sample, toy_tokens

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
