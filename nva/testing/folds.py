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
from nva.state.rows import running, token_ids
from nva.steps.allocate import fork
from nva.steps.apply import abort, stop
from nva.steps.commit import commit
from nva.steps.pack import pack
from nva.steps.recover import withdraw
from nva.steps.schedule import schedule
from nva.steps.submit import submit
from nva.testing.actions import Abort, Arrive, Event, Fork, Step
from nva.testing.laws import check_keys, check_purity, check_step, snapshot
from nva.testing.toy import ToyKV, poison, toy_forward, toy_sample, toy_stop, toy_tokens


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
    is_poisoned: bool = True  # whether free blocks that nothing finds are spoiled after each event
    is_late: bool = False  # each step is committed after the next one is planned and computed
    computed: tuple[Plan, Sampled] | None = None  # the step that is not committed yet
    requests: list[Request] = attrs.field(factory=list)
    finished: list[Finished] = attrs.field(factory=list)
    scores: set[tuple[int | str, int, int]] = attrs.field(factory=set)  # id, position, likeliest
    forked: set[tuple[int | str, int]] = attrs.field(factory=set)
    plans: list[Plan] = attrs.field(factory=list)
    shapes: set[tuple[int, ...]] = attrs.field(factory=set)
    n_stopped: int = 0  # samples that a stop string ended
    n_on_device: int = 0  # tokens computed before the host knew them
    n_passed_over: int = 0  # tokens that nobody waited for any more
    n_refilled: int = 0  # those whose row another sequence had by then, or the same one once more

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
    is_late: bool = False,
) -> Run:
    """Run the events, then step until all is answered; check every law on the way. With `is_late`,
    each step is committed after the next one. Raises InvariantError."""
    run = Run(state=empty(limits, policy), kv=ToyKV.empty(limits), is_late=is_late)
    steps = steps or Steps()
    for event in events:
        state = run.state
        before = snapshot(state)
        apply(run, event, steps)
        check_purity(state, before)
    finish(run, steps)
    check_answers(run)
    if run.state.blocks.n_free != limits.n_blocks:
        raise InvariantError.unequal(
            "conservation: all blocks return", run.state.blocks.n_free, limits.n_blocks
        )
    return run


def finish(run: Run, steps: Steps) -> None:
    """Step until nothing waits or runs. Raises InvariantError if that takes too many steps."""
    lengths = [len(r.prompt) + (r.params.max_tokens or 0) for r in run.requests]
    samples = [r.params.n for r in run.requests]
    bound = 50 + 20 * sum(n * length for n, length in zip(samples, lengths, strict=True))
    while is_busy(run.state):
        apply(run, Step(), steps)
        if len(run.plans) > bound:
            raise InvariantError.unequal(
                "progress: the number of steps is bounded", len(run.plans), bound
            )


def apply(run: Run, event: Event, steps: Steps) -> None:
    """Run one event on `run`, in place."""
    if isinstance(event, Arrive):
        run.state = steps.submit(run.state, event.requests)
        run.requests += event.requests
    elif isinstance(event, Abort):
        if run.requests:
            request = run.requests[event.number % len(run.requests)]
            run.state, finished = abort(run.state, [request.id])
            run.finished += finished
    elif isinstance(event, Fork):
        _fork(run, event.number)
    elif is_busy(run.state):
        _step(run, steps) if isinstance(event, Step) else _fail(run, steps)
    check(run.state)
    check_keys(run.state, run.kv)
    if run.is_poisoned:
        poison(run.state, run.kv)


def _step(run: Run, steps: Steps) -> None:
    before = run.state
    run.state, plan = steps.schedule(before)
    computed = None
    if len(plan.rows):
        computed = plan, _compute(run, steps, before, plan)
    elif run.computed is None:
        raise InvariantError("progress: the plan is empty, and no step is left to commit")
    if run.is_late:
        run.computed, computed = computed, run.computed
    if computed is not None:
        _commit(run, steps, *computed)


def _compute(run: Run, steps: Steps, before: EngineState, plan: Plan) -> Sampled:
    """The device's part of a step. It knows what the step before sampled, if the host doesn't."""
    batch, draw = steps.pack(run.state, plan)
    on_device = run.computed[1].tokens if run.computed else None
    logits, run.kv = toy_forward(run.state.limits)(None, run.kv, batch, on_device)
    check_step(before, run.state, plan, batch, run.kv)
    run.plans.append(plan)
    run.shapes.add((len(batch.token_ids), len(batch.query_ends), len(batch.logit_index)))
    run.n_on_device += int((batch.token_source >= 0).sum())
    return toy_sample(logits, draw)


def _commit(run: Run, steps: Steps, plan: Plan, sampled: Sampled) -> None:
    """A step's tokens arrive, and samples whose text holds a stop string end."""
    rows = run.state.rows
    run.state, output = steps.commit(run.state, plan, sampled)
    run.finished += output.finished
    run.scores |= {(r.id, position, each.top[0][0]) for r, position, each in output.scores}
    run.n_passed_over += len(plan.sample_rows) - len(output.tokens)
    is_taken = rows.is_running[plan.sample_rows] & (rows.n_known[plan.sample_rows] > 0)
    run.n_refilled += int(is_taken.sum()) - len(output.tokens)
    for request, sample in zip(output.requests, output.samples.tolist(), strict=True):
        _stop(run, request, sample)


def _stop(run: Run, request: Request, sample: int) -> None:
    rows = run.state.rows
    for row in running(rows).tolist():
        if rows.requests[row] is request and rows.sample[row] == sample:
            output = token_ids(rows, row)[rows.n_prompt[row] :].tolist()
            found = toy_stop(output, request.params.stop)
            if found is not None:
                run.state, finished = stop(run.state, request.id, sample, found)
                run.finished += [finished] if finished else []
                run.n_stopped += 1


def _fail(run: Run, steps: Steps) -> None:
    """The forward has written when it raises; the state before the step goes on, as in
    engine.step."""
    state, plan = steps.schedule(run.state)
    if len(plan.rows):
        batch, _ = steps.pack(state, plan)
        on_device = run.computed[1].tokens if run.computed else None
        toy_forward(state.limits)(None, run.kv, batch, on_device)
        run.state = steps.withdraw(run.state, plan, batch)
        run.kv = attrs.evolve(run.kv, generation=run.state.generation)


def _fork(run: Run, number: int) -> None:
    rows = running(run.state.rows)
    if not len(rows):
        return
    row = int(rows[number % len(rows)])
    first_sample = 100 + len(run.forked)
    try:
        run.state, (new,) = fork(run.state, row, 1, first_sample)
    except ValueError:
        return  # the row still computes its prompt, or no row is free
    run.forked.add((run.state.rows.requests[new].id, first_sample))


def check_answers(run: Run) -> None:
    """Every sample of every request, and every fork, ended once; those not aborted with exactly the
    toy's tokens."""
    expected = {(request.id, i) for request in run.requests for i in range(request.params.n)}
    expected |= run.forked
    ended = [(found.request.id, found.sample) for found in run.finished]
    if sorted(map(str, ended)) != sorted(map(str, expected)):
        raise InvariantError.unequal(
            "atomicity: each sample ends once", sorted(map(str, ended)), expected
        )
    for found in run.finished:
        check_tokens(found, run.state.limits)
    for request in run.requests:
        check_scores(run, request)


def check_tokens(found: Finished, limits: Limits) -> None:
    """The sample's tokens are the toy's, up to where it had to end, and its reason says why it
    ended there."""
    request = found.request
    tokens = expected_tokens(request, limits)
    if found.reason == "abort":
        tokens = tokens[: len(found.token_ids)]
    if list(found.token_ids) != tokens:
        raise InvariantError.unequal(
            f"transparency: tokens of {request.id!r}", found.token_ids, tokens
        )
    reason = expected_reason(request, tokens, limits)
    if found.reason not in ("abort", reason):
        raise InvariantError.unequal(f"atomicity: reason of {request.id!r}", found.reason, reason)


def check_scores(run: Run, request: Request) -> None:
    """Log-probabilities are of the request's own prompt, and all there if a sample ran to its
    end."""
    found = {(position, token) for id_, position, token in run.scores if id_ == request.id}
    prompt = request.prompt.tolist()
    vocab_size = run.state.limits.vocab_size
    positions = range(1, len(prompt)) if request.params.prompt_logprobs is not None else ()
    expected = {(i, toy_tokens(prompt[:i], 1, vocab_size)[0]) for i in positions}
    reasons = {end.reason for end in run.finished if end.request.id == request.id}
    is_complete = reasons and reasons != {"abort"}
    if found - expected or (is_complete and found != expected):
        raise InvariantError.unequal(f"scores of {request.id!r}", found, expected)


def longest_output(request: Request, limits: Limits) -> int:
    """Tokens after which a sample of the request ends at the latest."""
    longest = min(limits.max_model_len, limits.pool_len) - len(request.prompt)
    return min(request.params.max_tokens or 0, longest)


def expected_tokens(request: Request, limits: Limits) -> list[int]:
    """The request's whole output, as the toy model gives it alone."""
    tokens: list[int] = []
    while len(tokens) < longest_output(request, limits):
        (token,) = toy_tokens([*request.prompt.tolist(), *tokens], 1, limits.vocab_size)
        if len(tokens) < request.params.min_tokens and token in request.stop_ids:
            allowed = (id_ for id_ in range(limits.vocab_size) if id_ not in request.stop_ids)
            token = next(allowed)
        tokens.append(token)
        if token in request.stop_ids or toy_stop(tokens, request.params.stop) is not None:
            break
    return tokens


def expected_reason(request: Request, tokens: list[int], limits: Limits) -> str:
    """Why a sample with these tokens ended. A stop string counts only where nothing else ended it
    first."""
    if tokens and tokens[-1] in request.stop_ids and len(tokens) > request.params.min_tokens:
        return "stop"
    return "length" if len(tokens) == longest_output(request, limits) else "stop"
