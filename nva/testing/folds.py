"""Run a list of events through step functions, and check the laws after each. The functions under
test are values: pass your own schedule, or a policy, in `Steps` and in the state, and the same laws
are checked of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from nva.state.engine import EngineState, check, empty, is_busy
from nva.state.errors import InvariantError
from nva.state.limits import Limits
from nva.state.plan import Batch, Draw, Output, Plan, Sampled
from nva.state.policy import Policy, first_come_first_served
from nva.state.request import Finished, Request
from nva.state.rows import running
from nva.steps.allocate import fork
from nva.steps.apply import abort
from nva.steps.commit import commit
from nva.steps.pack import pack
from nva.steps.recover import withdraw
from nva.steps.schedule import schedule
from nva.steps.submit import submit
from nva.testing.laws import check_keys, check_purity, check_step, snapshot
from nva.testing.strategies import Abort, Arrive, Event, Fork, Step
from nva.testing.toy import ToyKV, poison, toy_forward, toy_sample, toy_tokens


@attrs.frozen(kw_only=True)
class Steps:
    """The step functions that fold() runs."""

    submit: Callable[[EngineState, Any], EngineState] = submit
    schedule: Callable[[EngineState], tuple[EngineState, Plan]] = schedule
    pack: Callable[[EngineState, Plan], tuple[Batch, Draw]] = pack
    commit: Callable[[EngineState, Plan, Sampled], tuple[EngineState, Output]] = commit
    withdraw: Callable[[EngineState, Plan, Batch], EngineState] = withdraw


@attrs.define(kw_only=True)
class Run:
    """What happened: the events' answers, and how often each thing occurred that tests must have
    seen happen."""

    state: EngineState
    kv: ToyKV
    requests: list[Request] = attrs.field(factory=list)
    finished: list[Finished] = attrs.field(factory=list)
    forked: set[tuple[int | str, int]] = attrs.field(factory=set)
    plans: list[Plan] = attrs.field(factory=list)
    shapes: set[tuple[int, ...]] = attrs.field(factory=set)

    @property
    def n_preempted(self) -> int:
        return sum(len(plan.preempted) for plan in self.plans)

    @property
    def n_hit(self) -> int:
        return sum(plan.n_hit for plan in self.plans)

    @property
    def n_copied(self) -> int:
        return sum(len(plan.copies) for plan in self.plans)

    @property
    def n_chunked(self) -> int:
        return sum(int((plan.counts > 1).sum()) > len(plan.sample_rows) for plan in self.plans)


def fold(
    events: Iterable[Event],
    limits: Limits,
    policy: Policy = first_come_first_served,
    steps: Steps | None = None,
) -> Run:
    """Run the events, then step until all is answered; check every law on the way. Raises
    InvariantError."""
    run, steps = Run(state=empty(limits, policy), kv=ToyKV.empty(limits)), steps or Steps()
    for event in events:
        before = snapshot(state := run.state)
        apply(run, event, steps)
        check_purity(state, before)
    bound = 50 + 20 * sum(
        r.params.n * (len(r.prompt) + (r.params.max_tokens or 0)) for r in run.requests
    )
    while is_busy(run.state):
        apply(run, Step(), steps)
        if len(run.plans) > bound:
            raise InvariantError.unequal(
                "progress: the number of steps is bounded", len(run.plans), bound
            )
    check_answers(run)
    if run.state.blocks.n_free != limits.n_blocks:
        raise InvariantError.unequal(
            "conservation: all blocks return", run.state.blocks.n_free, limits.n_blocks
        )
    return run


def apply(run: Run, event: Event, steps: Steps) -> None:
    """Run one event on `run`, in place."""
    if isinstance(event, Arrive):
        run.state = steps.submit(run.state, event.requests)
        run.requests += event.requests
    elif isinstance(event, Abort):
        if run.requests:
            run.state, finished = abort(
                run.state, [run.requests[event.number % len(run.requests)].id]
            )
            run.finished += finished
    elif isinstance(event, Fork):
        _fork(run, event.number)
    elif is_busy(run.state):
        _step(run, steps) if isinstance(event, Step) else _fail(run, steps)
    check(run.state)
    check_keys(run.state, run.kv)
    poison(run.state, run.kv)


def _step(run: Run, steps: Steps) -> None:
    before = run.state
    state, plan = steps.schedule(before)
    batch, draw = steps.pack(state, plan)
    logits, run.kv = toy_forward(state.limits)(None, run.kv, batch)
    check_step(before, state, plan, batch, run.kv)
    run.state, output = steps.commit(state, plan, toy_sample(logits, draw))
    run.plans.append(plan)
    run.shapes.add((len(batch.token_ids), len(batch.query_ends), len(batch.logit_index)))
    run.finished += output.finished


def _fail(run: Run, steps: Steps) -> None:
    """The forward has written when it raises; the state before the step goes on, as in run.step."""
    state, plan = steps.schedule(run.state)
    batch, _ = steps.pack(state, plan)
    toy_forward(state.limits)(None, run.kv, batch)
    run.state = steps.withdraw(run.state, plan, batch)


def _fork(run: Run, number: int) -> None:
    rows = running(run.state.rows)
    if not len(rows):
        return
    row, first_sample = int(rows[number % len(rows)]), 100 + len(run.forked)
    try:
        run.state, (new,) = fork(run.state, row, 1, first_sample)
    except ValueError:
        return  # the row still computes its prompt, or no row is free
    request = run.state.rows.requests[new]
    run.forked.add((request.id, first_sample) if request else ("", 0))


def check_answers(run: Run) -> None:
    """Every sample of every request, and every fork, ended once; those not aborted with exactly the
    toy's tokens."""
    expected = {
        (request.id, sample) for request in run.requests for sample in range(request.params.n)
    } | run.forked
    ended = [(found.request.id, found.sample) for found in run.finished]
    if sorted(map(str, ended)) != sorted(map(str, expected)):
        raise InvariantError.unequal(
            "atomicity: each sample ends once", sorted(map(str, ended)), expected
        )
    for found in run.finished:
        check_tokens(found, run.state.limits)


def check_tokens(found: Finished, limits: Limits) -> None:
    """The sample's tokens are the toy's, up to where it had to end, and its reason says why it
    ended there."""
    request, params, n = found.request, found.request.params, len(found.token_ids)
    tokens = expected_tokens(request, limits)
    if found.reason == "abort":
        tokens = tokens[:n]
    if list(found.token_ids) != tokens:
        raise InvariantError.unequal(
            f"transparency: tokens of {request.id!r}", found.token_ids, tokens
        )
    is_stop = bool(tokens) and tokens[-1] in request.stop_ids and n > params.min_tokens
    if found.reason != "abort" and (found.reason == "stop") != is_stop:
        raise InvariantError.unequal(
            f"atomicity: reason of {request.id!r}", found.reason, "stop" if is_stop else "length"
        )


def expected_tokens(request: Request, limits: Limits) -> list[int]:
    """The request's whole output, as the toy model gives it alone."""
    longest = min(limits.max_model_len, limits.pool_len) - len(request.prompt)
    n = min(request.params.max_tokens or 0, longest)
    tokens: list[int] = []
    while len(tokens) < n:
        (token,) = toy_tokens([*request.prompt.tolist(), *tokens], 1, limits.vocab_size)
        if len(tokens) < request.params.min_tokens and token in request.stop_ids:
            token = next(
                other for other in range(limits.vocab_size) if other not in request.stop_ids
            )
        tokens.append(token)
        if token in request.stop_ids:
            break
    return tokens
