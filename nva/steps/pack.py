"""A Plan as arrays: a Batch for the forward, a Draw for the sampler.

The law: every slot of a batch is distinct, and padding reads and writes scratch blocks only.
Read next: forward.py and sample.py, which consume them.
"""

from __future__ import annotations

import math

import numpy as np

from nva.state.columns import Column, Float, Ids, Int, entries_at
from nva.state.engine import EngineState
from nva.state.limits import Limits, bucket_for
from nva.state.media import positions_between
from nva.state.plan import Batch, Draw, ImageSpan, Plan
from nva.state.rows import request_of, token_ids
from nva.steps.schedule import is_scored


def pack(state: EngineState, plan: Plan) -> tuple[Batch, Draw]:
    """The step's packed tokens, and how to sample from the logits they give. `state` is the one
    schedule() gave."""
    ends = np.add.accumulate(plan.counts)
    is_source = np.zeros(len(plan.rows), np.bool_)
    is_source[plan.sample_sources] = True
    sources, scored = is_source.nonzero()[0], scored_tokens(state, plan)
    logit_rows = sources.searchsorted(plan.sample_sources)
    logit_index = [*(ends[sources] - 1).tolist(), *(index for _, _, index in scored)]
    return _pack_batch(state, plan, ends, logit_index), _pack_draw(
        state, plan, logit_rows, len(sources), scored
    )


def scored_tokens(state: EngineState, plan: Plan) -> list[tuple[int, int, int]]:
    """Prompt tokens whose log-probabilities this step gives: (row, position, packed index that
    predicts it)."""
    rows, found = state.rows, list[tuple[int, int, int]]()
    for i in (plan.starts < rows.n_prompt[plan.rows] - 1).nonzero()[0].tolist():
        row, start, packed = int(plan.rows[i]), int(plan.starts[i]), int(plan.counts[:i].sum())
        if is_scored(request_of(rows, row), int(rows.n_known[row])):
            end = min(start + int(plan.counts[i]), int(rows.n_prompt[row]) - 1)
            found += [
                (row, position + 1, packed + position - start) for position in range(start, end)
            ]
    return found


def _pack_batch(state: EngineState, plan: Plan, ends: Int, logit_index: list[int]) -> Batch:
    limits, n, n_rows = state.limits, int(ends[-1]), len(plan.rows)
    n_padded = bucket_for(n, limits.token_buckets)
    n_padded_rows = bucket_for(n_rows + 1, limits.row_buckets) if limits.row_buckets else n_rows
    width = (
        limits.table_width if limits.row_buckets else max(state.rows.n_blocks[plan.rows].tolist())
    )
    shapes = {
        "token_ids": (n_padded,),
        "positions": (limits.position_axes, n_padded),
        "slots": (n_padded,),
        "block_tables": (n_padded_rows, width),
        "query_ends": (n_padded_rows,),
        "context_lens": (n_padded_rows,),
        "logit_index": (_n_logits(len(logit_index), n_padded_rows, limits),),
        "copies": plan.copies.shape,
    }
    buffer, views = _laid_out(shapes)
    row_ids, positions = _unrolled(plan, ends)
    block, offset = np.divmod(positions, limits.block_size)
    tables, histories = state.rows.block_tables, state.rows.histories
    views["token_ids"][:n] = entries_at(histories, row_ids, positions)
    views["positions"][:, :n] = (
        positions if limits.position_axes == 1 else _rope_positions(state, plan)
    )
    views["slots"][:n] = entries_at(tables, row_ids, block) * limits.block_size + offset
    views["block_tables"][:n_rows] = entries_at(tables, plan.rows, slice(width))
    views["query_ends"][:n_rows] = ends
    views["context_lens"][:n_rows] = plan.starts + plan.counts
    views["logit_index"][: len(logit_index)] = logit_index
    views["copies"][:] = plan.copies
    if limits.row_buckets:
        _pad(views, n, n_rows, limits)
    images = () if limits.position_axes == 1 else _images(state, plan, ends)
    return Batch(
        buffer=buffer, n_tokens=n, n_rows=n_rows, n_logits=len(logit_index), images=images, **views
    )


def _unrolled(plan: Plan, ends: Int) -> tuple[Ids, Int]:
    """The row and the position of each planned token."""
    if len(plan.rows) == ends[-1]:  # one each
        return plan.rows, plan.starts
    positions = np.arange(ends[-1], dtype=np.int32)
    return plan.rows.repeat(plan.counts), positions + (plan.starts - ends + plan.counts).repeat(
        plan.counts
    )


def _rope_positions(state: EngineState, plan: Plan) -> Int:
    """Positions in time, height and width [3, n] of the planned tokens."""
    spans = zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True)
    media = (request_of(state.rows, row).media for row in plan.rows.tolist())
    parts = [
        positions_between(each, start, start + n)
        for each, (_, start, n) in zip(media, spans, strict=True)
    ]
    return np.concatenate(parts, axis=1)


def _images(state: EngineState, plan: Plan, ends: Int) -> tuple[ImageSpan, ...]:
    """The parts of images that are planned tokens."""
    spans: list[ImageSpan] = []
    for i, row in enumerate(plan.rows.tolist()):
        media, start, packed = (
            request_of(state.rows, row).media,
            int(plan.starts[i]),
            int(ends[i] - plan.counts[i]),
        )
        for each in media.placed if media is not None else ():
            first, end = max(start, each.start), min(start + int(plan.counts[i]), each.end)
            if first < end:
                at = packed + first - start
                spans.append(
                    ImageSpan(
                        image=each.image, first=first - each.start, packed=at, count=end - first
                    )
                )
    return tuple(spans)


def _n_logits(n: int, n_padded_rows: int, limits: Limits) -> int:
    """Logits to compute: exact without buckets, else of two sizes a row bucket, without and with
    prompt scores."""
    return bucket_for(
        n, (n_padded_rows, limits.max_rows + limits.max_scored_tokens) if limits.row_buckets else ()
    )


def _laid_out(shapes: dict[str, tuple[int, ...]]) -> tuple[Int, dict[str, Int]]:
    """One zeroed int32 buffer, and views of these shapes that follow each other in it."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    buffer, views, end = np.zeros(sum(sizes), np.int32), dict[str, Int](), 0
    for (name, shape), size in zip(shapes.items(), sizes, strict=True):
        start, end = end, end + size
        views[name] = buffer[start:end].reshape(shape)
    return buffer, views


def _pad(views: dict[str, Int], n: int, n_rows: int, limits: Limits) -> None:
    """Fill [n, T) with one dummy row that follows the real ones, over the scratch blocks from slot
    0 on."""
    n_padding = len(views["token_ids"]) - n
    views["slots"][n:] = views["positions"][:, n:] = np.arange(n_padding)
    views["query_ends"][n_rows:] = n + n_padding
    views["context_lens"][n_rows:] = 1
    views["context_lens"][n_rows : n_rows + 1] = max(1, n_padding)
    n_scratch = min(limits.n_scratch, views["block_tables"].shape[1])
    views["block_tables"][n_rows:, :n_scratch] = np.arange(n_scratch)


def _pack_draw(
    state: EngineState,
    plan: Plan,
    logit_rows: Ids,
    n_sources: int,
    scored: list[tuple[int, int, int]],
) -> Draw:
    rows, sampling = (
        state.rows,
        state.rows.sampling.take(plan.sample_rows),
    )  # several times faster than an index
    positions = rows.n_computed[plan.sample_rows]
    penalized, bias_at, bias = _adjustments(state, plan, sampling, positions)
    asked = [
        request_of(rows, row).params.prompt_logprobs or 0 for row in {row for row, _, _ in scored}
    ]
    return Draw(
        logit_rows=logit_rows,
        params=sampling,
        samples=rows.sample[plan.sample_rows],
        positions=positions,
        penalized=penalized,
        bias_at=bias_at,
        bias=bias,
        score_rows=np.arange(n_sources, n_sources + len(scored), dtype=np.int32),
        score_tokens=np.array(
            [token_ids(rows, row)[position] for row, position, _ in scored], np.int32
        ),
        n_score_logprobs=max(asked, default=0),
    )


def _adjustments(
    state: EngineState, plan: Plan, sampling: Column, positions: Int
) -> tuple[tuple[tuple[int, Int, int], ...], Int, Float]:
    """How logits are changed before the draw: the fields penalized, bias_at and bias of a Draw. A
    sample may not stop before its min_len."""
    is_early = positions < sampling["min_len"]
    penalized, biases = list[tuple[int, Int, int]](), dict[tuple[int, int], float]()
    for j in (sampling["is_penalized"] | sampling["is_biased"] | is_early).nonzero()[0].tolist():
        row = int(plan.sample_rows[j])
        request = request_of(state.rows, row)
        biases |= {(j, token): bias for token, bias in request.params.logit_bias.items()}
        if is_early[j]:
            biases |= {(j, token): -math.inf for token in request.stop_ids}
        if sampling["is_penalized"][j]:
            penalized.append((j, token_ids(state.rows, row), len(request.prompt)))
    bias_at = np.array(list(biases), np.int32).reshape(-1, 2)
    return tuple(penalized), bias_at, np.array(list(biases.values()), np.float64)
