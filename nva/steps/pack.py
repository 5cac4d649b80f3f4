"""A Plan as arrays: a Batch for the forward, a Draw for the sampler.

The law: every slot of a batch is distinct, and padding reads and writes scratch blocks only.
Read next: forward.py and sample.py, which consume them.
"""

from __future__ import annotations

import math

import numpy as np

from nva.state.columns import Column, Float, Ids, Int, freeze, is_any
from nva.state.engine import EngineState
from nva.state.limits import Limits, bucket_for
from nva.state.media import positions_between
from nva.state.plan import Batch, Draw, ImageSpan, Plan, laid_out
from nva.state.rows import NO_SOURCE, Rows, request_of, token_ids
from nva.state.table import entries_at

NO_BIAS_AT = freeze(np.zeros((0, 2), np.int32))
NO_BIAS = freeze(np.zeros(0))


def pack(state: EngineState, plan: Plan) -> tuple[Batch, Draw]:
    """The step's packed tokens, and how to sample from the logits they give. `state` is the one
    schedule() gave. Raises ValueError for an empty plan, and for more scores and probes than
    limits.max_scored_tokens."""
    if not len(plan.rows):
        raise ValueError(
            "the plan is empty: every row waits for a token that is being sampled; commit the step "
            "before, then schedule the next"
        )
    ends = np.add.accumulate(plan.counts)  # packed tokens of row i: [ends[i] - counts[i], ends[i])

    # The logits to compute, in this order: one for each row that samples, and n samples of a fresh
    # prompt share it; then prompt scores; then probes.
    is_source = np.zeros(len(plan.rows), np.bool_)
    is_source[plan.sample_sources] = True
    (sources,) = is_source.nonzero()
    logit_rows = sources.searchsorted(plan.sample_sources)
    logit_index = ends[sources] - 1
    if plan.scores or len(plan.probes):
        logit_index = np.concatenate([logit_index, _asked(plan, int(ends[-1]), state.limits)])
    batch = _pack_batch(state, plan, ends, logit_index)
    return batch, _pack_draw(state, plan, logit_rows, len(sources))


def _asked(plan: Plan, n_tokens: int, limits: Limits) -> Ids:
    """The packed tokens whose logits are asked for beside those that are sampled from."""
    asked = np.array([*(score.packed for score in plan.scores), *plan.probes.tolist()], np.intp)
    if len(asked) > limits.max_scored_tokens:
        raise ValueError(
            f"the plan asks for {len(plan.scores)} scores and {len(plan.probes)} probes; a step "
            f"has max_scored_tokens, {limits.max_scored_tokens}, in all; ask for fewer, or raise it"
        )
    if len(asked) and not 0 <= asked.min() <= asked.max() < n_tokens:
        raise ValueError(
            f"the plan asks for logits of tokens {asked.min()} to {asked.max()}; the step packs "
            f"tokens [0, {n_tokens})"
        )
    return asked


def _pack_batch(state: EngineState, plan: Plan, ends: Int, logit_index: Ids) -> Batch:
    n_tokens = int(ends[-1])
    n_rows = len(plan.rows)
    buffer, views = laid_out(_shapes(state, plan, n_tokens, len(logit_index)))
    _fill_tokens(views, state, plan, ends)
    _fill_rows(views, state, plan, ends)
    views["logit_index"][: len(logit_index)] = logit_index
    views["copies"][...] = plan.copies
    if state.limits.row_buckets:
        _pad(views, n_tokens, n_rows, state.limits)
    return Batch(
        buffer=buffer,
        n_tokens=n_tokens,
        n_rows=n_rows,
        n_logits=len(logit_index),
        images=() if state.limits.position_axes == 1 else _images(state.rows, plan, ends),
        before=plan.before,
        after=plan.after,
        **views,
    )


def _fill_tokens(views: dict[str, Int], state: EngineState, plan: Plan, ends: Int) -> None:
    """One entry for each token: what it is, where it stands, and the slot it is written to."""
    rows = state.rows
    n_tokens = int(ends[-1])
    row_ids, positions = _unrolled(plan, ends)
    block, offset = np.divmod(positions, state.limits.block_size)
    held = entries_at(rows.block_tables, row_ids, block)
    views["slots"][:n_tokens] = held * state.limits.block_size + offset
    views["token_ids"][:n_tokens] = entries_at(rows.histories, row_ids, positions)
    views["token_source"][...] = NO_SOURCE
    if plan.token_sources is not None:
        _leave_to_device(views, plan.token_sources, ends)
    if state.limits.position_axes > 1:
        positions = _rope_positions(state, plan)
    views["positions"][:, :n_tokens] = positions


def _fill_rows(views: dict[str, Int], state: EngineState, plan: Plan, ends: Int) -> None:
    """One entry for each row: its blocks, where its queries end, and how much it attends to."""
    n_rows = len(plan.rows)
    width = views["block_tables"].shape[1]
    tables = entries_at(state.rows.block_tables, plan.rows, slice(width))
    views["block_tables"][:n_rows] = tables
    views["query_ends"][:n_rows] = ends
    views["context_lens"][:n_rows] = plan.starts + plan.counts


def _shapes(
    state: EngineState, plan: Plan, n_tokens: int, n_logits: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of a batch's arrays: padded to buckets where a compiled forward has them, exact
    elsewhere."""
    limits = state.limits
    n_rows = len(plan.rows)
    if limits.row_buckets:
        n_tokens = bucket_for(n_tokens, limits.token_buckets)
        n_rows = bucket_for(n_rows + 1, limits.row_buckets)
        width = limits.table_width
        # Two sizes for each row bucket: without and with prompt scores.
        n_logits = bucket_for(n_logits, (n_rows, limits.max_rows + limits.max_scored_tokens))
    else:
        width = int(state.rows.n_blocks[plan.rows].max())
    return {
        "token_ids": (n_tokens,),
        "token_source": (n_tokens,),
        "positions": (limits.position_axes, n_tokens),
        "slots": (n_tokens,),
        "block_tables": (n_rows, width),
        "query_ends": (n_rows,),
        "context_lens": (n_rows,),
        "logit_index": (n_logits,),
        "copies": plan.copies.shape,
    }


def _unrolled(plan: Plan, ends: Int) -> tuple[Ids, Int]:
    """The row and the position of each planned token, [T] each."""
    if len(plan.rows) == ends[-1]:  # one each
        return plan.rows, plan.starts
    firsts = ends - plan.counts
    positions = np.arange(ends[-1], dtype=np.int32)
    positions += (plan.starts - firsts).repeat(plan.counts)
    return plan.rows.repeat(plan.counts), positions


def _leave_to_device(views: dict[str, Int], sources: Int, ends: Int) -> None:
    """Say which tokens the host doesn't know yet, and where among the samples of the step before
    the device has them."""
    (unknown,) = (sources != NO_SOURCE).nonzero()
    last = ends[unknown] - 1
    views["token_source"][last] = sources[unknown]
    # The history has leftovers there, which would make equal batches differ.
    views["token_ids"][last] = 0


def _rope_positions(state: EngineState, plan: Plan) -> Int:
    """Positions in time, height and width [3, T] of the planned tokens."""
    spans = zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True)
    parts = [
        positions_between(request_of(state.rows, row).media, start, start + count)
        for row, start, count in spans
    ]
    return np.concatenate(parts, axis=1)


def _images(rows: Rows, plan: Plan, ends: Int) -> tuple[ImageSpan, ...]:
    """The parts of images that are planned tokens."""
    starts = plan.starts.tolist()
    stops = (plan.starts + plan.counts).tolist()
    firsts = (ends - plan.counts).tolist()  # of each row, among the packed tokens
    spans: list[ImageSpan] = []
    for row, start, stop, first in zip(plan.rows.tolist(), starts, stops, firsts, strict=True):
        spans += _images_of(rows, row, start, stop, first)
    return tuple(spans)


def _images_of(rows: Rows, row: int, start: int, stop: int, first: int) -> list[ImageSpan]:
    """The parts of a row's images at positions [start, stop), which are packed from `first` on."""
    media = request_of(rows, row).media
    spans: list[ImageSpan] = []
    for each in media.placed if media else ():
        low = max(start, each.start)
        high = min(stop, each.end)
        if low < high:
            packed = first + low - start
            count = high - low
            span = ImageSpan(image=each.image, first=low - each.start, packed=packed, count=count)
            spans.append(span)
    return spans


def _pad(views: dict[str, Int], n_tokens: int, n_rows: int, limits: Limits) -> None:
    """Fill [n_tokens, T) with one dummy row that follows the real ones, over the scratch blocks
    from slot 0 on."""
    n_padding = len(views["token_ids"]) - n_tokens
    views["slots"][n_tokens:] = np.arange(n_padding)
    views["positions"][:, n_tokens:] = np.arange(n_padding)
    views["query_ends"][n_rows:] = n_tokens + n_padding
    views["context_lens"][n_rows:] = 1
    views["context_lens"][n_rows : n_rows + 1] = max(1, n_padding)
    n_scratch = min(limits.n_scratch, views["block_tables"].shape[1])
    views["block_tables"][n_rows:, :n_scratch] = np.arange(n_scratch)


def _pack_draw(state: EngineState, plan: Plan, logit_rows: Ids, n_sources: int) -> Draw:
    rows = state.rows
    first_probe = n_sources + len(plan.scores)
    sampling = rows.sampling.take(plan.sample_rows)  # several times faster than an index
    penalized, bias_at, bias = _adjustments(rows, plan, sampling)
    score_tokens, n_score_logprobs = _scored(rows, plan)
    return Draw(
        logit_rows=logit_rows,
        params=sampling,
        samples=plan.sample_numbers,
        positions=plan.sample_positions,
        arrivals=plan.sample_arrivals,
        requests=rows.requests.take(plan.sample_rows),
        penalized=penalized,
        bias_at=bias_at,
        bias=bias,
        score_rows=np.arange(n_sources, first_probe, dtype=np.int32),
        score_tokens=score_tokens,
        n_score_logprobs=n_score_logprobs,
        probe_rows=np.arange(first_probe, first_probe + len(plan.probes)),
    )


def _scored(rows: Rows, plan: Plan) -> tuple[Int, int]:
    """[Q] The prompt tokens that are scored, and the most log-probabilities asked for one."""
    tokens = [token_ids(rows, score.row)[score.position] for score in plan.scores]
    requests = [request_of(rows, row) for row in {score.row for score in plan.scores}]
    n_asked = [request.params.prompt_logprobs or 0 for request in requests]
    return np.array(tokens, np.int32), max(n_asked, default=0)


def _adjustments(
    rows: Rows, plan: Plan, sampling: Column
) -> tuple[tuple[tuple[int, Int, int], ...], Int, Float]:
    """How logits are changed before the draw: the fields penalized, bias_at and bias of a Draw. A
    sample may not stop before its min_len."""
    is_early = plan.sample_positions < sampling["min_len"]
    is_penalized = sampling["is_penalized"]
    is_biased = sampling["is_biased"] | is_early
    penalized = tuple(_penalized(rows, plan, j) for j in is_penalized.nonzero()[0].tolist())
    if not is_any(is_biased):
        return penalized, NO_BIAS_AT, NO_BIAS
    members = is_biased.nonzero()[0].tolist()
    found = [_biases(rows, int(plan.sample_rows[j]), bool(is_early[j])) for j in members]
    bias_at = [_with_sample(j, tokens) for j, (tokens, _) in zip(members, found, strict=True)]
    return penalized, np.concatenate(bias_at), np.concatenate([values for _, values in found])


def _penalized(rows: Rows, plan: Plan, j: int) -> tuple[int, Int, int]:
    """Sample j, whose request has penalties, with the tokens that they are for."""
    row = int(plan.sample_rows[j])
    return j, token_ids(rows, row), int(rows.n_prompt[row])


def _with_sample(j: int, tokens: Int) -> Int:
    """[n, 2] Pairs (j, token)."""
    pairs = np.empty((len(tokens), 2), np.int32)
    pairs[:, 0] = j
    pairs[:, 1] = tokens
    return pairs


def _biases(rows: Rows, row: int, is_early: bool) -> tuple[Int, Float]:
    """Distinct tokens and what is added to their logits: the request's bias, and for one that may
    not stop yet, minus infinity for its stop ids, whatever the bias says of them."""
    bias = rows.biases[row]
    tokens = bias.tokens if bias else NO_BIAS_AT[:, 1]
    values = bias.values if bias else NO_BIAS
    if not is_early:
        return tokens, values
    stop_ids = np.array([*request_of(rows, row).stop_ids], np.int32)
    is_kept = ~np.isin(tokens, stop_ids)
    banned = np.full(len(stop_ids), -math.inf)
    return (
        np.concatenate([tokens[is_kept], stop_ids]),
        np.concatenate([values[is_kept], banned]),
    )
