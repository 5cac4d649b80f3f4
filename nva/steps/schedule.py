"""Continuous batching (Orca, Yu et al. 2022) with chunked prefill (Sarathi, Agrawal et al. 2023):
each step, the rows that decode compute one token each, and what is left of the token budget goes to
prompts, in chunks. Rows and blocks go by the policy's order. Short of blocks, the last rows in
order are preempted: their blocks are freed, and computed again later.

The law: a busy state always computes a token, and the number of steps is bounded. Prompts never
preempt, since a row is admitted only when all its known tokens have blocks; only a token about to
be sampled may cost another row its place (docs/design/0003). Read next: allocate.py, which moves
blocks; pack.py, which turns the Plan into arrays."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from nva.state.blocks import ROOT, Blocks
from nva.state.columns import Ids, Int, evolve, freeze
from nva.state.engine import EngineState
from nva.state.generation import digest
from nva.state.limits import Limits, blocks_for
from nva.state.plan import Plan, Score, no_copies
from nva.state.request import Request, sampling_of
from nva.state.rows import (
    NO_SOURCE,
    NO_TOKEN,
    Bias,
    Rows,
    SampleId,
    n_reserved,
    request_of,
    running,
    sample_id,
    token_ids,
    update,
)
from nva.state.table import replace_entries
from nva.state.waiting import Waiting, first, queued, without_first
from nva.steps.allocate import duplicate, grow, n_blocks_due, share, take, vacate
from nva.steps.prefix import match, publish


@attrs.frozen(kw_only=True, slots=False)
class Given:
    """What a step has given out so far: tokens to rows, out of two budgets."""

    decoding: Ids  # rows that compute one token each
    rows: tuple[int, ...] = ()  # rows that compute a chunk each
    counts: tuple[int, ...] = ()  # tokens of their chunks
    tokens_left: int
    scores_left: int  # tokens whose log-probabilities may still be asked in this step
    n_hit: int = 0  # tokens found in the prefix cache


def schedule(state: EngineState) -> tuple[EngineState, Plan]:
    """Plan one step: who computes which tokens, in which blocks, and who samples. Lengths advance
    here, commit() only brings values; so the next step can be planned while this one is computed.

    The plan is empty if all rows wait for tokens that are being sampled: commit a step first.
    Raises ValueError if nothing waits or runs."""
    limits = state.limits
    before = state
    order = running(state.rows)  # best rank first
    n_due = _n_due(state, order)
    # One token to compute, and then the row samples. The last token of a prompt counts as decoding
    # too: only how many tokens are due matters, not whose they are.
    decoding = order[n_due == 1]
    prefilling = order[n_due > 1]

    # 1. Every decoding row gets its token. Short of blocks, the last rows in order wait again.
    decoding = decoding[: limits.max_batched_tokens]
    state, decoding, preempted = _make_room(state, decoding)
    state, copies = grow(state, decoding)
    given = Given(
        decoding=decoding,
        tokens_left=limits.max_batched_tokens - len(decoding),
        scores_left=limits.max_scored_tokens,
    )

    # 2. Prompts that run already share what is left of the budget, in chunks.
    given = _chunk(given, state.rows, prefilling)
    row_ids, counts = _rows_and_counts(given)
    state = _advance(state, row_ids, counts)  # their full blocks can be found from here on

    # 3. Waiting sequences enter, strictly in order, while rows, blocks and budget last.
    n_given = len(given.rows)
    state, given = _admit(state, given)
    if len(given.rows) > n_given:
        row_ids, counts = _rows_and_counts(given)
    if not len(row_ids):
        return before, _empty_plan(before)

    # 4. Rows with nothing left to compute sample; a fresh prompt forks into its n samples.
    starts = state.rows.n_computed[row_ids] - counts
    is_decoding = len(row_ids) == len(order) and not given.rows
    state, sample_rows, sample_sources = _start_samples(state, row_ids)
    plan = Plan(
        rows=row_ids,
        starts=starts,
        counts=counts,
        token_sources=_token_sources(state, row_ids, starts),
        sample_rows=sample_rows,
        sample_sources=sample_sources,
        sample_arrivals=state.rows.arrival.take(sample_rows),
        sample_numbers=state.rows.sample.take(sample_rows),
        sample_positions=state.rows.n_computed.take(sample_rows),
        copies=copies,
        preempted=preempted,
        scores=_scores(state.rows, given),
        n_hit=given.n_hit,
        before=before.generation,
        after=_next_generation(state, row_ids, starts, counts, is_decoding),
    )
    if limits.lookahead:
        state = evolve(state, rows=evolve(state.rows, source=_sources(state, sample_rows)))
    return evolve(state, generation=plan.after, history=b""), plan


def _n_due(state: EngineState, row_ids: Ids) -> Int:
    """[n] Tokens that each running row may compute now.

    [n_computed, n_known)    the host knows them
    [n_known, n_tokens)      still being sampled; with lookahead, one that the step before this
                             one samples may be computed: the device has it when it is needed
    max_len - 1              the last token, which is never computed"""
    rows = state.rows
    lookahead = state.limits.lookahead
    n_known = rows.n_known[row_ids]
    n_due = n_known - rows.n_computed[row_ids]
    if lookahead == 0:
        return n_due
    n_tokens = rows.n_tokens[row_ids]
    may_run_ahead = (
        (rows.source[row_ids] != NO_SOURCE)
        & (n_tokens - n_known <= lookahead)
        & (n_tokens < rows.max_len[row_ids])
        # Penalties are computed on the host, from every token so far.
        & ~rows.sampling["is_penalized"][row_ids]
    )
    return np.where(n_due > 0, n_due, may_run_ahead)


def _token_sources(state: EngineState, row_ids: Ids, starts: Int) -> Int | None:
    """[B] For each planned row: which of the samples of the step before is its token, where the
    host doesn't know it yet. None where it knows all."""
    if state.limits.lookahead == 0:
        return None
    is_known = starts < state.rows.n_known[row_ids]
    return np.where(is_known, NO_SOURCE, state.rows.source[row_ids])


def _make_room(state: EngineState, decoding: Ids) -> tuple[EngineState, Ids, tuple[SampleId, ...]]:
    """Preempt running rows, last in order first, until the decoding rows that remain can each grow
    by a token.

    One row alone always can: submit() ends its growth where the pool ends."""
    preempted: list[SampleId] = []
    while _is_short(state, decoding):
        victim = int(running(state.rows)[-1])
        preempted.append(sample_id(state.rows, victim))
        state = preempt(state, victim)
        decoding = decoding[decoding != victim]
    return state, decoding, tuple(preempted)


def _is_short(state: EngineState, decoding: Ids) -> bool:
    """Whether these rows need more blocks than are free. A row needs one at most, so that mostly
    there is nothing to count."""
    n_free = state.blocks.n_free
    return n_free < len(decoding) and n_free < n_blocks_due(state, decoding)


def preempt(state: EngineState, row: int) -> EngineState:
    """Send a running row back to wait; its blocks are freed, its known tokens kept."""
    entry = _as_waiting(state.rows, row)
    return evolve(vacate(state, [row]), waiting=queued(state.waiting, [entry]))


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


def is_scored(request: Request, n_known: int) -> bool:
    """Whether log-probabilities of the prompt are asked for and still due: they are before the
    first output token."""
    return request.params.prompt_logprobs is not None and n_known == len(request.prompt)


def _chunk(given: Given, rows: Rows, row_ids: Ids) -> Given:
    """Give each row in turn as many of its uncomputed tokens as the budgets allow."""
    for row in row_ids.tolist():
        # A row that ran when the step began may have been preempted since.
        if not rows.is_running[row] or not given.tokens_left:
            continue
        n = min(int(rows.n_tokens[row] - rows.n_computed[row]), given.tokens_left)
        n_scores = 0
        if is_scored(request_of(rows, row), int(rows.n_known[row])):
            n = min(n, given.scores_left)
            n_scores = n
        if n > 0:
            given = evolve(
                given,
                rows=(*given.rows, row),
                counts=(*given.counts, n),
                tokens_left=given.tokens_left - n,
                scores_left=given.scores_left - n_scores,
            )
    return given


def _rows_and_counts(given: Given) -> tuple[Ids, Int]:
    """The rows of the step, those that decode first, and how many tokens each computes."""
    ones = np.ones(len(given.decoding), np.int32)
    if not given.rows:
        return given.decoding, ones
    row_ids = np.concatenate([given.decoding, given.rows])
    return row_ids, np.concatenate([ones, np.array(given.counts, np.int32)])


def _advance(state: EngineState, row_ids: Ids, counts: Int) -> EngineState:
    """Count these tokens as computed. A row with none left to compute samples in this step, so its
    n_tokens grows by one."""
    rows = state.rows
    n_computed = rows.n_computed[row_ids] + counts
    n_tokens = rows.n_tokens[row_ids]
    n_tokens += n_computed == n_tokens
    rows = update(rows, row_ids, n_computed=n_computed, n_tokens=n_tokens)
    return publish(evolve(state, rows=rows), row_ids)


def _admit(state: EngineState, given: Given) -> tuple[EngineState, Given]:
    """Give waiting sequences rows, strictly in order, until rows, blocks or budget end.

    Each is advanced before the next is matched, so that requests with one prefix that arrive
    together share it."""
    while state.waiting and given.tokens_left:
        entered = _enter(state, first(state.waiting))
        if entered is None:
            break
        after, row = entered
        more = _chunk(given, after.rows, np.array([row]))
        if more is given:
            break  # it asks for scores, and this step has no more of them
        n_hit = int(after.rows.n_computed[row])
        given = evolve(more, n_hit=given.n_hit + n_hit)
        state = _advance(after, np.array([row]), np.array(given.counts[-1:], np.int32))
    return state, given


def _enter(state: EngineState, entry: Waiting) -> tuple[EngineState, int] | None:
    """Take the first waiting sequence into a row; also that row. None if it doesn't fit.

    Blocks are taken for all its known tokens, and one is left for each running row to grow into."""
    limits = state.limits
    rows = state.rows
    blocks = state.blocks
    if n_reserved(rows) + entry.n_samples > limits.max_rows:
        return None

    # 1. What the prefix cache has of it, and new blocks for the rest.
    hits, chain = _hits(blocks, entry, limits)
    n_new = blocks_for(entry.n_known, limits.block_size) - len(hits)
    if not _has_room(state, hits, n_new):
        return None
    blocks, new = take(share(blocks, hits), n_new)

    # 2. A row that has computed what was found.
    row = int(np.argmin(rows.is_running))
    n_hit = len(hits) * limits.block_size
    table = [*hits, *new]
    rows = _with_tables(rows, row, entry, table)
    rows = update(
        rows,
        row,
        is_running=True,
        n_computed=n_hit,
        n_cached=n_hit if entry.n_cached is None else entry.n_cached,
        n_blocks=len(table),
        n_published=len(hits),
        chain=chain,
        **_columns_of(entry, limits, state.seed),
    )
    waiting = without_first(state.waiting)
    return evolve(state, rows=rows, blocks=blocks, waiting=waiting), row


def _has_room(state: EngineState, hits: list[int], n_new: int) -> bool:
    """Whether that many new blocks are free beside the hits, which may be free too, and one for
    each running row to grow into."""
    n_revived = int(np.count_nonzero(state.blocks.ref_counts[hits] == 0))
    n_spare = int(np.count_nonzero(state.rows.is_running))
    return n_new + n_revived + n_spare <= state.blocks.n_free


def _hits(blocks: Blocks, entry: Waiting, limits: Limits) -> tuple[list[int], int]:
    """The cached blocks that a waiting sequence begins with, and their chain. One whose prompt is
    scored takes none: the logits would be missing."""
    if not limits.prefix_caching or is_scored(entry.request, entry.n_known):
        return [], ROOT
    return match(blocks, entry.tokens, limits.block_size, entry.request.media)


def _with_tables(rows: Rows, row: int, entry: Waiting, table: list[int]) -> Rows:
    """The rows with a waiting sequence's tokens, blocks and stop ids in this row."""
    at = np.array([row])
    n_stop = len(entry.request.stop_ids)
    stop_ids = _widened(rows.stop_ids, n_stop)
    stop_ids[row] = NO_TOKEN
    stop_ids[row, :n_stop] = list(entry.request.stop_ids)
    stop_ids.setflags(write=False)
    return evolve(
        rows,
        stop_ids=stop_ids,
        histories=replace_entries(rows.histories, at, entry.tokens, entry.n_known),
        block_tables=replace_entries(rows.block_tables, at, np.array(table), len(table)),
    )


def _widened(stop_ids: Int, width: int) -> Int:
    """A copy of the column with room for at least that many ids in each row."""
    missing = max(0, width - stop_ids.shape[1])
    return np.pad(stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)


def _columns_of(entry: Waiting, limits: Limits, seed: int) -> dict[str, Any]:
    """What a row's columns take from the sequence that enters it."""
    request = entry.request
    n_prompt = len(request.prompt)
    longest = min(limits.max_model_len, limits.pool_len)
    # Each unseeded request has a seed of its own, by its arrival (the factor is 2**64 / phi).
    own_seed = (seed * 0x9E3779B97F4A7C15 + entry.arrival + 1) % 2**64
    return {
        "requests": request,
        "arrival": entry.arrival,
        "rank": entry.rank,
        "sample": entry.sample,
        "n_samples": entry.n_samples,
        "n_prompt": n_prompt,
        "n_known": entry.n_known,
        "n_tokens": entry.n_known,
        "max_len": min(n_prompt + (request.params.max_tokens or 0), longest),
        "source": NO_SOURCE,
        "sampling": sampling_of(request, own_seed),
        "biases": _bias(request),
    }


def _bias(request: Request) -> Bias | None:
    """The request's logit_bias as arrays, made once: it may have as many entries as the vocabulary,
    and no step should go through them one by one."""
    bias = request.params.logit_bias
    if not bias:
        return None
    tokens = np.fromiter(bias.keys(), np.int32, len(bias))
    return Bias(tokens=tokens, values=np.fromiter(bias.values(), np.float64, len(bias)))


def _start_samples(state: EngineState, row_ids: Ids) -> tuple[EngineState, Ids, Ids]:
    """Which rows sample now, and from which planned row's logits. A fresh prompt forks into its
    samples, which share its blocks and its logits."""
    rows = state.rows
    (sources,) = (rows.n_tokens[row_ids] > rows.n_known[row_ids]).nonzero()
    sample_rows = row_ids[sources]
    for source in sources[rows.n_samples[sample_rows] > 1].tolist():
        row = int(row_ids[source])
        n_forks = int(rows.n_samples[row]) - 1
        state = evolve(state, rows=update(state.rows, row, n_samples=1))
        state, forks = duplicate(state, row, n_forks, int(rows.sample[row]) + 1)
        sample_rows = np.array([*sample_rows, *forks])
        sources = np.array([*sources, *[source] * n_forks])
    return state, sample_rows, sources


def _scores(rows: Rows, given: Given) -> tuple[Score, ...]:
    """The prompt tokens whose log-probabilities this step gives: the token at `position` is
    predicted by the one before it."""
    scores: list[Score] = []
    packed = len(given.decoding)  # where the next row's tokens begin among all the step's
    for row, count in zip(given.rows, given.counts, strict=True):
        if is_scored(request_of(rows, row), int(rows.n_known[row])):
            scores += _scores_of(rows, row, count, packed)
        packed += count
    return tuple(scores)


def _scores_of(rows: Rows, row: int, count: int, packed: int) -> list[Score]:
    """The scores that a row's chunk of `count` tokens gives, which is packed from `packed` on."""
    start = int(rows.n_computed[row]) - count
    end = min(start + count, int(rows.n_prompt[row]) - 1)
    arrival = int(rows.arrival[row])
    positions = range(start, end)
    return [Score(row, arrival, each + 1, packed + each - start) for each in positions]


def _next_generation(
    state: EngineState, row_ids: Ids, starts: Int, counts: Int, is_decoding: bool
) -> bytes:
    """The generation of the cache after this step: a digest of the one before, of all that came in
    since, and of who computes what. Where all rows decode, that follows from the rest."""
    parts = [state.generation, state.history]
    if not is_decoding:
        rows = state.rows
        pool = state.blocks.n_free, state.blocks.n_chains, len(row_ids)
        parts += [repr(pool).encode(), row_ids.tobytes(), starts.tobytes(), counts.tobytes()]
        parts += [rows.arrival[row_ids].tobytes(), rows.sample[row_ids].tobytes()]
    return digest(*parts)


def _sources(state: EngineState, sample_rows: Ids) -> Int:
    """The column of rows that says which sample of this step each row waits for."""
    source = np.full(state.limits.max_rows, NO_SOURCE, np.int32)
    source[sample_rows] = np.arange(len(sample_rows))
    return freeze(source)


def _empty_plan(state: EngineState) -> Plan:
    """The plan of no tokens, where all rows wait for tokens that are being sampled. Raises
    ValueError if nothing waits or runs."""
    if not state.waiting and not state.rows.is_running.any():
        raise ValueError("nothing waits or runs; submit a request before the next step")
    no_ids = np.zeros(0, np.intp)
    none = np.zeros(0, np.int32)
    return Plan(
        rows=no_ids,
        starts=none,
        counts=none,
        sample_rows=no_ids,
        sample_sources=no_ids,
        sample_arrivals=np.zeros(0, np.int64),
        sample_numbers=none,
        sample_positions=none,
        copies=no_copies(),
        before=state.generation,
        after=state.generation,
    )
