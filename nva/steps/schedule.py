"""Continuous batching: each step, the rows that decode compute one token each, and what is left of
the token budget goes to prompts, in chunks. Rows and blocks go by the policy's order; short of
blocks, the last in order are preempted, their blocks freed, and computed again later.

The law: a busy state always computes a token, and the number of steps is bounded: prompts never
preempt, since a row is admitted only when all its known tokens have blocks; only a token about to
be sampled may cost another row its place. Read next: pack.py, which turns the Plan into arrays."""

from __future__ import annotations

import attrs
import numpy as np

from nva.state.blocks import ROOT
from nva.state.columns import Column, Ids, Int, evolve, replace_entries
from nva.state.engine import EngineState, Waiting
from nva.state.limits import blocks_for
from nva.state.plan import Plan
from nva.state.request import Request, sampling_of
from nva.state.rows import NO_TOKEN, Rows, n_reserved, request_of, running, token_ids, update
from nva.steps.allocate import fork, grow, n_blocks_due, share, take, vacate
from nva.steps.prefix import match, publish
from nva.steps.submit import requeue

Preempted = tuple[tuple[int, int], ...]  # (arrival, sample)


@attrs.frozen(kw_only=True, slots=False)
class _Work:
    """What a step has given out so far: tokens to rows, out of two budgets."""

    tokens_left: int
    scores_left: int  # prompt tokens whose log-probabilities may still be asked this step
    rows: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    n_hit: int = 0


def schedule(state: EngineState) -> tuple[EngineState, Plan]:
    """Plan one step: who computes which tokens, in which blocks, and who samples. Lengths advance
    here.

    Raises ValueError if nothing waits or runs.
    """
    limits, order = state.limits, running(state.rows)
    n_due = state.rows.n_tokens[order] - state.rows.n_computed[order]
    state, decoding, preempted = _preempt_for(state, order[n_due == 1][: limits.max_batched_tokens])
    state, copies = grow(state, decoding)
    work = _Work(
        tokens_left=limits.max_batched_tokens - len(decoding), scores_left=limits.max_scored_tokens
    )
    work = _chunk(work, state.rows, order[n_due > 1])
    row_ids, counts = _packed(decoding, work)
    state, work = _admit(_advance(state, row_ids, counts), work)
    if len(work.rows) + len(decoding) > len(row_ids):
        row_ids, counts = _packed(decoding, work)
    if not len(row_ids):
        raise ValueError("nothing waits or runs; submit a request before the next step")
    starts = state.rows.n_computed[row_ids] - counts
    state, sample_rows, sample_sources = _start_samples(state, row_ids)
    return state, Plan(
        rows=row_ids,
        starts=starts,
        counts=counts,
        sample_rows=sample_rows,
        sample_sources=sample_sources,
        sample_arrivals=state.rows.arrival[sample_rows],
        copies=copies,
        preempted=preempted,
        n_hit=work.n_hit,
    )


def _packed(decoding: Ids, work: _Work) -> tuple[Ids, Int]:
    """The rows of a step, those that decode first, and how many tokens each computes."""
    ones = np.ones(len(decoding), np.int32)
    if not work.rows:
        return decoding, ones
    return np.concatenate([decoding, work.rows]), np.concatenate(
        [ones, np.array(work.counts, np.int32)]
    )


def is_scored(request: Request, n_known: int) -> bool:
    """Whether log-probabilities of the prompt are asked for and still due: they are before the
    first output token."""
    return request.params.prompt_logprobs is not None and n_known == len(request.prompt)


def _preempt_for(state: EngineState, decoding: Ids) -> tuple[EngineState, Ids, Preempted]:
    """Preempt running rows, last in order first, until the decoding rows that remain can each grow
    by a token.

    One row alone always can: submit() ends its growth where the pool ends.
    """
    preempted: list[tuple[int, int]] = []
    while (
        state.blocks.n_free < len(decoding) and n_blocks_due(state, decoding) > state.blocks.n_free
    ):
        victim = int(running(state.rows)[-1])
        preempted.append((int(state.rows.arrival[victim]), int(state.rows.sample[victim])))
        state = preempt(state, victim)
        decoding = decoding[decoding != victim]
    return state, decoding, tuple(preempted)


def preempt(state: EngineState, row: int) -> EngineState:
    """Send a running row back to wait; its blocks are freed, its tokens kept."""
    return evolve(
        vacate(state, [row]), waiting=requeue(state.waiting, _as_waiting(state.rows, row))
    )


def _as_waiting(rows: Rows, row: int) -> Waiting:
    return Waiting(
        request=request_of(rows, row),
        tokens=token_ids(rows, row).copy(),
        sample=int(rows.sample[row]),
        n_samples=int(rows.n_samples[row]),
        arrival=int(rows.arrival[row]),
        rank=float(rows.rank[row]),
        n_cached=int(rows.n_cached[row]),
    )


def _chunk(work: _Work, rows: Rows, row_ids: Ids) -> _Work:
    """Give each row in turn, if it still runs, as much of its uncomputed tokens as the budgets
    allow."""
    for row in row_ids.tolist():
        if not work.tokens_left:
            break
        if not rows.is_running[row]:
            continue
        n = min(int(rows.n_tokens[row] - rows.n_computed[row]), work.tokens_left)
        scored = is_scored(request_of(rows, row), int(rows.n_known[row]))
        n = min(n, work.scores_left) if scored else n
        if n:
            work = attrs.evolve(
                work,
                tokens_left=work.tokens_left - n,
                scores_left=work.scores_left - n * scored,
                rows=(*work.rows, row),
                counts=(*work.counts, n),
            )
    return work


def _advance(state: EngineState, row_ids: Ids, counts: Int) -> EngineState:
    """Count these tokens as computed, and one more for each row that has no other left: the token
    that is now sampled. The blocks that are filled can be found from here on."""
    rows = state.rows
    n_computed, n_tokens = rows.n_computed[row_ids] + counts, rows.n_tokens[row_ids]
    rows = update(
        rows, row_ids, n_computed=n_computed, n_tokens=n_tokens + (n_computed == n_tokens)
    )
    return publish(evolve(state, rows=rows), row_ids)


def _admit(state: EngineState, work: _Work) -> tuple[EngineState, _Work]:
    """Give waiting sequences rows, strictly in order, until rows, blocks or budget end.

    Each is advanced before the next is matched, so that requests with one prefix that arrive
    together share it."""
    while state.waiting and work.tokens_left:
        placed = _place(state, state.waiting[0])
        if placed is None:
            break
        after, row, n_hit = placed
        given = _chunk(work, after.rows, np.array([row]))
        if given is work:
            break  # it asks for scores, and this step has no more of them
        state = _advance(after, np.array([row]), np.array(given.counts[-1:], np.int32))
        work = attrs.evolve(given, n_hit=work.n_hit + n_hit)
    return state, work


def _place(state: EngineState, entry: Waiting) -> tuple[EngineState, int, int] | None:
    """Take the first waiting sequence into a row; also the row and its tokens found in the cache.
    None if it can't be.

    Blocks are taken for all its known tokens, and one is left for each running row to grow into.
    """
    limits, rows, blocks = state.limits, state.rows, state.blocks
    if n_reserved(rows) + entry.n_samples > limits.max_rows:
        return None
    is_cacheable = limits.prefix_caching and not is_scored(entry.request, entry.n_known)
    known = entry.tokens, limits.block_size, entry.request.media
    hits, chain = match(blocks, *known) if is_cacheable else ([], ROOT)
    n_new = blocks_for(entry.n_known, limits.block_size) - len(hits)
    n_revived = int((blocks.ref_counts[hits] == 0).sum())
    if n_new + n_revived + int(rows.is_running.sum()) > blocks.n_free:
        return None
    blocks, new = take(share(blocks, hits), n_new)
    row, n_hit = int(np.argmin(rows.is_running)), len(hits) * limits.block_size
    rows = _filled(rows, row, entry, [*hits, *new], n_hit, state)
    rows = update(rows, row, n_published=len(hits), chain=chain)
    return evolve(state, rows=rows, blocks=blocks, waiting=state.waiting[1:]), row, n_hit


def _filled(
    rows: Rows, row: int, entry: Waiting, table: list[int], n_hit: int, state: EngineState
) -> Rows:
    request, limits, at = entry.request, state.limits, np.array([row])
    n_prompt = len(request.prompt)
    seed = (
        state.seed * 0x9E3779B97F4A7C15 + entry.arrival + 1
    ) % 2**64  # one of its own for each unseeded request
    stop_ids = _widened(rows.stop_ids, len(request.stop_ids))
    rows = evolve(
        rows,
        stop_ids=stop_ids,
        histories=replace_entries(rows.histories, at, entry.tokens, entry.n_known),
        block_tables=replace_entries(rows.block_tables, at, np.array(table), len(table)),
    )
    return update(
        rows,
        row,
        is_running=True,
        requests=request,
        stop_ids=[*request.stop_ids, *[NO_TOKEN] * (stop_ids.shape[1] - len(request.stop_ids))],
        arrival=entry.arrival,
        rank=entry.rank,
        sample=entry.sample,
        n_samples=entry.n_samples,
        n_prompt=n_prompt,
        n_computed=n_hit,
        n_known=entry.n_known,
        n_tokens=entry.n_known,
        max_len=min(
            n_prompt + (request.params.max_tokens or 0), limits.max_model_len, limits.pool_len
        ),
        n_cached=n_hit if entry.n_cached is None else entry.n_cached,
        n_blocks=len(table),
        sampling=sampling_of(request, seed),
    )


def _widened(stop_ids: Column, width: int) -> Column:
    """The column with room for that many ids in each row."""
    missing = max(0, width - stop_ids.shape[1])
    return (
        np.pad(stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN) if missing else stop_ids
    )


def _start_samples(state: EngineState, row_ids: Ids) -> tuple[EngineState, Ids, Ids]:
    """Which rows sample now, and from which planned row's logits: fresh prompts fork into their
    samples."""
    rows = state.rows
    (sources,) = (rows.n_tokens[row_ids] > rows.n_known[row_ids]).nonzero()
    sample_rows = row_ids[sources]
    for source in sources[rows.n_samples[sample_rows] > 1].tolist():
        row = int(row_ids[source])
        state = evolve(state, rows=update(state.rows, row, n_samples=1))
        state, forks = fork(state, row, int(rows.n_samples[row]) - 1, int(rows.sample[row]) + 1)
        sample_rows, sources = (
            np.array([*sample_rows, *forks]),
            np.array([*sources, *[source] * len(forks)]),
        )
    return state, sample_rows, sources
