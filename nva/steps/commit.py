"""Sampled tokens arrive: histories grow, samples that are done end, blocks return.

The law: every sample ends exactly once, with a reason, and a token is taken only by the sequence
that waits for exactly this one. So a plan may be committed after the next one was made, whatever
has happened to its rows since. Read next: loop.py, where these steps are one; run.py."""

from __future__ import annotations

from collections.abc import Sequence

from nva.state.columns import Bool, Ids, Int, evolve, write
from nva.state.engine import EngineState
from nva.state.plan import Logprobs, Output, Plan, Sampled, Score, TokenLogprobs
from nva.state.request import Finished, FinishReason, Request
from nva.state.rows import Rows, request_of, token_ids
from nva.state.table import append_entries
from nva.steps.allocate import vacate


def commit(state: EngineState, plan: Plan, sampled: Sampled) -> tuple[EngineState, Output]:
    """Append the sampled tokens to their rows and end those that are done; also what users see of
    the step.

    A sample that nobody waits for any more is passed over. A row whose logits were not finite ends
    with "abort". Raises ValueError if the sampler gave other than one token for each sample."""
    check_sampled(plan, sampled)
    rows = state.rows
    scores = _scores(rows, plan.scores, sampled.scores)

    # 1. Rows that still wait for their token get it, if it is one.
    is_waiting = _is_waiting(rows, plan)
    is_given = is_waiting & sampled.is_finite
    given = plan.sample_rows[is_given]
    tokens = sampled.tokens[is_given]
    requests = rows.requests[given].tolist()
    rows = _appended(rows, given, tokens)

    # 2. Some end with that token, and some because there is none.
    finished = _finished(rows, given, tokens)
    for row in plan.sample_rows[is_waiting != is_given].tolist():
        finished[row] = finished_row(rows, row, int(rows.sample[row]), "abort")
    output = Output(
        requests=requests,
        samples=rows.sample[given],
        tokens=tokens,
        logprobs=_logprobs(requests, sampled.logprobs, is_given, tokens),
        scores=scores,
        finished=list(finished.values()),
    )

    # 3. The blocks of those that ended return.
    history = state.history + is_given.tobytes() + tokens.tobytes()
    state = evolve(state, rows=rows, history=history)
    if finished:
        state = vacate(state, list(finished))
    return state, output


def check_sampled(plan: Plan, sampled: Sampled) -> None:
    """Raise ValueError if the sampler gave other than one token for each sample."""
    if not len(sampled.tokens) == len(sampled.is_finite) == len(plan.sample_rows):
        raise ValueError(
            f"Sampled.tokens has {len(sampled.tokens)} entries and Sampled.is_finite "
            f"{len(sampled.is_finite)}; the plan has {len(plan.sample_rows)} samples; give one of "
            "each for each"
        )


def _is_waiting(rows: Rows, plan: Plan) -> Bool:
    """[S] Whether each sample's row still waits for it: the same sample of the same request, whose
    next token is at this position and has been planned.

    The position matters: a row may have been preempted and placed again, and sample the same token
    a second time."""
    row_ids = plan.sample_rows
    return (
        rows.is_running.take(row_ids)
        & (rows.arrival.take(row_ids) == plan.sample_arrivals)
        & (rows.sample.take(row_ids) == plan.sample_numbers)
        & (rows.n_known.take(row_ids) == plan.sample_positions)
        & (rows.n_tokens.take(row_ids) > plan.sample_positions)
    )


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
        sample = int(rows.sample[row])
        if j in stopped:
            finished[row] = finished_row(rows, row, sample, "stop", int(tokens[j]))
        else:
            finished[row] = finished_row(rows, row, sample, "length")
    return finished


def finished_row(
    rows: Rows, row: int, sample: int, reason: FinishReason, stopped_by: int | str | None = None
) -> Finished:
    """What is told of a sample that ends in a row."""
    output = token_ids(rows, row)[rows.n_prompt[row] :]
    return Finished(
        request=request_of(rows, row),
        sample=sample,
        reason=reason,
        stopped_by=stopped_by,
        token_ids=tuple(output.tolist()),
        n_cached=int(rows.n_cached[row]),
    )


def _logprobs(
    requests: Sequence[Request], logprobs: Logprobs | None, is_given: Bool, tokens: Int
) -> list[TokenLogprobs | None]:
    """For each token its log-probabilities, where its request asks for them."""
    if logprobs is None:
        return [None] * len(tokens)
    found: list[TokenLogprobs | None] = []
    entries = is_given.nonzero()[0].tolist()
    for request, entry, token in zip(requests, entries, tokens.tolist(), strict=True):
        n = request.params.logprobs
        found.append(None if n is None else _token_logprobs(logprobs, entry, token, n))
    return found


def _scores(
    rows: Rows, planned: Sequence[Score], logprobs: Logprobs | None
) -> list[tuple[Request, int, TokenLogprobs]]:
    """The log-probabilities of prompt tokens, of requests that still run in the planned row. One
    that was preempted since is scored again, one that was aborted has nobody who reads them."""
    if logprobs is None:
        return []
    found: list[tuple[Request, int, TokenLogprobs]] = []
    for entry, score in enumerate(planned):
        if rows.is_running[score.row] and rows.arrival[score.row] == score.arrival:
            request = request_of(rows, score.row)
            token = int(request.prompt[score.position])
            n = request.params.prompt_logprobs or 0
            token_logprobs = _token_logprobs(logprobs, entry, token, n)
            found.append((request, score.position, token_logprobs))
    return found


def _token_logprobs(logprobs: Logprobs, entry: int, token: int, n_top: int) -> TokenLogprobs:
    top_tokens = logprobs.top_tokens[entry, :n_top].tolist()
    top = logprobs.top[entry, :n_top].tolist()
    return TokenLogprobs(
        token=token,
        logprob=float(logprobs.chosen[entry]),
        rank=int(logprobs.ranks[entry]),
        top=tuple(zip(top_tokens, top, strict=True)),
    )
