"""Requests enter a state: checked against its limits, ranked by its policy, queued.

The law: all of the requests given enter, or none does. Read next: schedule.py, which admits them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from nva.state.columns import evolve
from nva.state.engine import EngineState, Waiting
from nva.state.limits import Limits
from nva.state.request import Request
from nva.state.rows import request_of, running


def submit(state: EngineState, requests: Sequence[Request]) -> EngineState:
    """The state in which these requests wait.

    Raises ValueError for a request that no step could ever serve, or whose id is in flight, before
    anything is queued."""
    taken = {entry.request.id for entry in state.waiting}
    taken |= {request_of(state.rows, row).id for row in running(state.rows)}
    for request in requests:
        check_fits(request, state.limits)
        if request.id in taken:
            raise ValueError(
                f"request id {request.id!r} is in flight already; give each request an id of its "
                "own"
            )
        taken.add(request.id)
    policy_state, entries = state.policy_state, list[Waiting]()
    for arrival, request in enumerate(requests, state.n_arrived):
        policy_state, rank = state.policy.step(policy_state, request, arrival)
        entries.append(_waiting(request, arrival, float(rank)))
    waiting = tuple(sorted([*state.waiting, *entries], key=lambda entry: entry.order))
    n_arrived = state.n_arrived + len(requests)
    return evolve(state, waiting=waiting, n_arrived=n_arrived, policy_state=policy_state)


def check_fits(request: Request, limits: Limits) -> None:
    """Raise ValueError if the request exceeds what the limits can ever serve."""
    n, params = len(request.prompt), request.params
    longest = min(limits.max_model_len, limits.pool_len) - 1
    if n > longest:
        raise ValueError(
            f"request {request.id!r}: the prompt has {n} tokens; at most {longest} leave room for "
            "an answer "
            f"(max_model_len {limits.max_model_len}, {limits.n_blocks} blocks of "
            f"{limits.block_size} tokens); "
            "shorten it, or raise max_model_len or n_blocks"
        )
    if params.n > limits.max_rows:
        raise ValueError(
            f"request {request.id!r}: n is {params.n}; at most max_rows, {limits.max_rows}, run "
            "together"
        )
    for name, ids in {
        "the prompt": request.prompt.tolist(),
        "stop_token_ids": params.stop_token_ids,
        "stop_ids": request.stop_ids,
        "logit_bias": params.logit_bias,
    }.items():
        beyond = [token for token in ids if not 0 <= token < limits.vocab_size]
        if beyond:
            raise ValueError(
                f"request {request.id!r}: {name} has token id {beyond[0]}; the vocabulary is [0, "
                f"{limits.vocab_size})"
            )


def _waiting(request: Request, arrival: int, rank: float) -> Waiting:
    return Waiting(
        request=request,
        tokens=request.prompt,
        sample=0,
        n_samples=request.params.n,
        arrival=arrival,
        rank=rank,
    )


def requeue(waiting: tuple[Waiting, ...], entry: Waiting) -> tuple[Waiting, ...]:
    """The queue with one more entry, at its place in the order."""
    at = bisect.bisect(waiting, entry.order, key=lambda other: other.order)
    return (*waiting[:at], entry, *waiting[at:])
