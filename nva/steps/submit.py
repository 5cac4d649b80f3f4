"""Requests enter a state: checked against its limits, ranked by its policy, queued.

The law: all of the requests given enter, or none does. Read next: schedule.py, which admits them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from nva.state.columns import evolve
from nva.state.engine import EngineState
from nva.state.generation import digest
from nva.state.limits import Limits
from nva.state.policy import ranked
from nva.state.request import Request
from nva.state.rows import request_of, running
from nva.state.waiting import Waiting, queued


def submit(state: EngineState, requests: Sequence[Request]) -> EngineState:
    """The state in which these requests wait.

    Raises ValueError for a request that no step could ever serve, or whose id is in flight, before
    anything is queued."""
    # 1. All are checked before any is ranked.
    for request in requests:
        check_fits(request, state.limits)
    check_ids_are_free(state, [request.id for request in requests])

    # 2. The policy gives each its rank, in order of arrival.
    policy_state = state.policy_state
    entries: list[Waiting] = []
    for arrival, request in enumerate(requests, state.n_arrived):
        policy_state, rank = ranked(state.policy, policy_state, request, arrival)
        entries.append(_waiting(request, arrival, rank))

    # 3. They are queued, and become part of the state's history.
    return evolve(
        state,
        waiting=queued(state.waiting, entries),
        n_arrived=state.n_arrived + len(requests),
        policy_state=policy_state,
        history=digest(state.history, *map(content_of, requests)),
    )


def check_fits(request: Request, limits: Limits) -> None:
    """Raise ValueError if the request exceeds what the limits can ever serve."""
    n = len(request.prompt)
    params = request.params
    longest = min(limits.max_model_len, limits.pool_len) - 1
    if n > longest:
        raise ValueError(
            f"request {request.id!r}: the prompt has {n} tokens; at most {longest} leave room for "
            f"an answer (max_model_len {limits.max_model_len}, {limits.n_blocks} blocks of "
            f"{limits.block_size} tokens); shorten it, or raise max_model_len or n_blocks"
        )
    if params.n > limits.max_rows:
        raise ValueError(
            f"request {request.id!r}: n is {params.n}; at most max_rows, {limits.max_rows}, run "
            "together"
        )
    prompt = (int(request.prompt.min()), int(request.prompt.max()))
    _check_vocabulary(request, "the prompt", prompt, limits)
    _check_vocabulary(request, "stop_token_ids", params.stop_token_ids, limits)
    _check_vocabulary(request, "stop_ids", request.stop_ids, limits)
    _check_vocabulary(request, "logit_bias", params.logit_bias.keys(), limits)


def _check_vocabulary(request: Request, name: str, ids: Collection[int], limits: Limits) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < limits.vocab_size):
        return
    beyond = next(token for token in ids if not 0 <= token < limits.vocab_size)
    raise ValueError(
        f"request {request.id!r}: {name} has token id {beyond}; the vocabulary is [0, "
        f"{limits.vocab_size})"
    )


def check_ids_are_free(state: EngineState, ids: Iterable[int | str]) -> None:
    """Raise ValueError if one of these request ids is in flight, or given twice."""
    taken = {request_of(state.rows, row).id for row in running(state.rows)}
    for id_ in ids:
        if id_ in taken or id_ in state.waiting.orders:
            raise ValueError(
                f"request id {id_!r} is in flight already; give each request an id of its own"
            )
        taken.add(id_)


def content_of(request: Request) -> bytes:
    """What the request will write to the cache: its prompt, and its images where they stand."""
    content = [len(request.prompt).to_bytes(8, "little"), request.prompt.tobytes()]
    for each in request.media.placed if request.media else ():
        content += [each.start.to_bytes(8, "little"), each.image.digest]
    return b"".join(content)


def _waiting(request: Request, arrival: int, rank: float) -> Waiting:
    return Waiting(
        request=request,
        tokens=request.prompt,
        sample=0,
        n_samples=request.params.n,
        arrival=arrival,
        rank=rank,
    )
