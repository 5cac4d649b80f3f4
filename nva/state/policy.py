"""Scheduling policies: the order in which requests get rows and blocks, as values.

The law: a policy orders, it never starves the engine; every order gives a bounded number of steps.
Read next: steps/submit.py, which asks the policy, and steps/schedule.py, which follows its order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
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
    return Policy(name=name, init=_no_state, step=partial(_ranked, rank))


def ranked(policy: Policy, state: Any, request: Request, arrival: int) -> tuple[Any, float]:
    """The policy's next state and the request's rank. Raises ValueError if the policy's step gives
    anything else."""
    result: Any = policy.step(state, request, arrival)
    after: Any = None
    rank = math.nan
    try:
        after, given = result
        rank = float(given)
    except (TypeError, ValueError):
        pass  # said below, as a rank that is not a number is
    if math.isnan(rank):
        raise ValueError(
            f"policy {policy.name!r}: step gave {result!r:.80}; give a pair, the policy's next "
            "state and the request's rank, a number"
        )
    return after, rank


# Named functions, not lambdas, so that a state with its policy can be pickled.


def _no_state() -> None:
    return None


def _ranked(rank: Callable[[Request], float], _: None, request: Request, __: int) -> Any:
    return None, rank(request)


def _all_equal(_: Request) -> float:
    return 0.0


def _priority(request: Request) -> float:
    return request.params.priority


def _longest_total(request: Request) -> float:
    return float(len(request.prompt) + (request.params.max_tokens or 0))


first_come_first_served = ranked_by("fcfs", _all_equal)
by_priority = ranked_by("priority", _priority)
shortest_first = ranked_by("shortest", _longest_total)

POLICIES = {
    policy.name: policy for policy in (first_come_first_served, by_priority, shortest_first)
}
