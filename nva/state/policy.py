"""Scheduling policies: the order in which requests get rows and blocks, as values.

The law: a policy orders, it never starves the engine; every order gives a bounded number of steps.
Read next: steps/submit.py, which asks the policy, and steps/schedule.py, which follows its order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from nva.state.request import Request


@attrs.frozen(kw_only=True)
class Policy:
    """A pair of pure functions. `init()` is the policy's own state. `step(policy state, request,
    arrival)` gives the next policy state and the request's rank, once, when the request is
    submitted.

    Lower ranks run first and are preempted last; equal ranks go by arrival (0, 1, 2, ... in order
    of submission)."""

    name: str
    init: Callable[[], Any]
    step: Callable[[Any, Request, int], tuple[Any, float]]


def ranked_by(name: str, rank: Callable[[Request], float]) -> Policy:
    """A policy without state of its own."""
    return Policy(
        name=name, init=lambda: None, step=lambda state, request, arrival: (state, rank(request))
    )


first_come_first_served = ranked_by("fcfs", lambda request: 0.0)
by_priority = ranked_by("priority", lambda request: request.params.priority)
shortest_first = ranked_by(
    "shortest", lambda request: float(len(request.prompt) + (request.params.max_tokens or 0))
)

POLICIES = {
    policy.name: policy for policy in (first_come_first_served, by_priority, shortest_first)
}
