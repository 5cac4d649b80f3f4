"""What happens to an engine under test, as values. A fold runs a list of them.

The law: an event says what happens, never to which row or block; so any list of events can be run
against any engine, and shrunk. Read next: folds.py, which runs them; strategies.py, which draws
them."""

from __future__ import annotations

import attrs

from nva.state.request import Request


@attrs.frozen
class Arrive:
    """Requests are submitted together."""

    requests: tuple[Request, ...]


@attrs.frozen
class Step:
    """The engine runs one step, if it has anything to do."""


@attrs.frozen
class Abort:
    """The request of this number (modulo those that have arrived) is aborted."""

    number: int


@attrs.frozen
class Fork:
    """The running row of this number (modulo those that run) is forked, if that is allowed."""

    number: int


@attrs.frozen
class Fail:
    """The engine runs a step whose forward writes to the cache and then raises."""


Event = Arrive | Step | Abort | Fork | Fail
