"""Sampled tokens arrive: histories grow, samples that are done end, blocks return.

The law: every sample ends exactly once, with a reason.
Read next: run.py, where the loop over these steps is.
"""

from __future__ import annotations

from collections.abc import Sequence

from nva.state.columns import Bool, Ids, Int, append_entries, evolve, write
from nva.state.engine import EngineState
from nva.state.plan import Logprobs, Output, Plan, Sampled, TokenLogprobs
from nva.state.request import NO_LOGPROBS, Finished, FinishReason, Request
from nva.state.rows import Rows, request_of, token_ids
from nva.steps.allocate import vacate
from nva.steps.pack import scored_tokens


def commit(state: EngineState, plan: Plan, sampled: Sampled) -> tuple[EngineState, Output]:
    """Append the sampled tokens to their rows and end those that are done; also what users see of
    the step.

    A sample that ended since it was planned is passed over. A row whose logits were not finite ends
    with "abort"."""
    rows, scores = state.rows, _scores(state, plan, sampled)
    is_live = rows.is_running[plan.sample_rows] & (
        rows.arrival[plan.sample_rows] == plan.sample_arrivals
    )
    is_given = is_live & sampled.is_finite
    given, tokens = plan.sample_rows[is_given], sampled.tokens[is_given]
    requests = rows.requests[given].tolist()
    rows = _appended(rows, given, tokens)
    finished = _finished(rows, given, tokens)
    for row in plan.sample_rows[is_live != is_given].tolist():
        finished[row] = finished_row(rows, row, int(rows.sample[row]), "abort")
    output = Output(
        requests=requests,
        samples=rows.sample[given],
        tokens=tokens,
        logprobs=_logprobs(requests, sampled.logprobs, is_given, tokens),
        scores=scores,
        finished=list(finished.values()),
    )
    state = evolve(state, rows=rows)
    return (vacate(state, list(finished)) if finished else state), output


def _appended(rows: Rows, row_ids: Ids, tokens: Int) -> Rows:
    """The rows with one more known token each."""
    n_known = rows.n_known[row_ids]
    histories = append_entries(rows.histories, row_ids, n_known, tokens)
    return evolve(rows, n_known=write(rows.n_known, row_ids, n_known + 1), histories=histories)


def _finished(rows: Rows, row_ids: Ids, tokens: Int) -> dict[int, Finished]:
    """The rows that their newest token ends, by row id."""
    stopped = (rows.stop_ids[row_ids] == tokens[:, None]).nonzero()[0].tolist()
    long = (rows.n_known[row_ids] >= rows.max_len[row_ids]).nonzero()[0].tolist()
    finished: dict[int, Finished] = {}
    for j in sorted({*stopped, *long}):
        row = int(row_ids[j])
        reason, stopped_by = ("stop", int(tokens[j])) if j in stopped else ("length", None)
        finished[row] = finished_row(rows, row, int(rows.sample[row]), reason, stopped_by)
    return finished


def finished_row(
    rows: Rows, row: int, sample: int, reason: FinishReason, stopped_by: int | str | None = None
) -> Finished:
    """What is told of a sample that ends in a row."""
    return Finished(
        request=request_of(rows, row),
        sample=sample,
        reason=reason,
        stopped_by=stopped_by,
        token_ids=tuple(token_ids(rows, row)[rows.n_prompt[row] :].tolist()),
        n_cached=int(rows.n_cached[row]),
    )


def _logprobs(
    requests: Sequence[Request], logprobs: Logprobs | None, is_given: Bool, tokens: Int
) -> list[TokenLogprobs | None]:
    """For each token its log-probabilities, where its request asks for them."""
    if logprobs is None:
        return [None] * len(tokens)
    asked = [
        NO_LOGPROBS if request.params.logprobs is None else request.params.logprobs
        for request in requests
    ]
    return [
        None if n == NO_LOGPROBS else _token_logprobs(logprobs, entry, token, n)
        for n, entry, token in zip(
            asked, is_given.nonzero()[0].tolist(), tokens.tolist(), strict=True
        )
    ]


def _scores(
    state: EngineState, plan: Plan, sampled: Sampled
) -> list[tuple[Request, int, TokenLogprobs]]:
    if sampled.scores is None:
        return []
    scored = [
        (request_of(state.rows, row), position) for row, position, _ in scored_tokens(state, plan)
    ]
    tokens = [int(request.prompt[position]) for request, position in scored]
    return [
        (
            request,
            position,
            _token_logprobs(sampled.scores, i, tokens[i], request.params.prompt_logprobs or 0),
        )
        for i, (request, position) in enumerate(scored)
    ]


def _token_logprobs(logprobs: Logprobs, entry: int, token: int, n_top: int) -> TokenLogprobs:
    top = zip(
        logprobs.top_tokens[entry, :n_top].tolist(),
        logprobs.top[entry, :n_top].tolist(),
        strict=True,
    )
    return TokenLogprobs(
        token=token,
        logprob=float(logprobs.chosen[entry]),
        rank=int(logprobs.ranks[entry]),
        top=tuple(top),
    )
