"""A Plan as arrays: a Batch for the forward, a Draw for the sampler.

The law: every slot of a batch is distinct, and padding reads and writes scratch blocks only.
Read next: forward.py and sample.py, which consume them.
"""

from __future__ import annotations

import math

import numpy as np

from nva.state.columns import Float, Int, tokens_between
from nva.state.config import Limits, bucket_for
from nva.state.engine import EngineState
from nva.state.plan import Batch, Draw, Plan
from nva.state.rows import history_of, request_of, token_ids
from nva.steps.schedule import is_scored


def pack(state: EngineState, plan: Plan) -> tuple[Batch, Draw]:
    """The step's packed tokens, and how to sample from the logits they give. `state` is the one schedule() gave."""
    sources, logit_rows = np.unique(plan.sample_sources, return_inverse=True)
    ends = np.cumsum(plan.counts, dtype=np.int32)
    scored = scored_tokens(state, plan)
    logit_index = np.concatenate([ends[sources] - 1, [index for _, _, index in scored]])
    batch = _pack_batch(state, plan, ends, logit_index.astype(np.int32))
    return batch, _pack_draw(state, plan, logit_rows.astype(np.int32), len(sources), scored)


def scored_tokens(state: EngineState, plan: Plan) -> list[tuple[int, int, int]]:
    """Prompt tokens whose log-probabilities this step gives: (row, position, packed index that predicts it)."""
    packed_starts = np.cumsum(plan.counts) - plan.counts
    return [
        (row, position + 1, int(packed) + position - start)
        for row, start, count, packed in zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), packed_starts, strict=True
        )
        if count > 1 and is_scored(request_of(state.rows, row), int(state.rows.n_known[row]))
        for position in range(start, min(start + count, int(state.rows.n_prompt[row]) - 1))
    ]


def _pack_batch(state: EngineState, plan: Plan, ends: Int, logit_index: Int) -> Batch:
    limits, n, n_rows = state.limits, plan.n_tokens, len(plan.rows)
    n_padded = bucket_for(n, limits.token_buckets)
    n_padded_rows = bucket_for(n_rows + 1, limits.row_buckets) if limits.row_buckets else n_rows
    shapes = {
        "token_ids": (n_padded,),
        "positions": (1, n_padded),
        "slots": (n_padded,),
        "block_tables": (n_padded_rows, limits.table_width),
        "query_ends": (n_padded_rows,),
        "context_lens": (n_padded_rows,),
        "logit_index": (_n_logits(len(logit_index), n_padded_rows, limits),),
        "copies": plan.copies.shape,
    }
    buffer, views = _laid_out(shapes)
    positions = np.arange(n, dtype=np.int32) + np.repeat(plan.starts - ends + plan.counts, plan.counts)
    tables = state.rows.block_tables[plan.rows]
    block, offset = np.divmod(positions, limits.block_size)
    views["token_ids"][:n] = _token_ids(state, plan)
    views["positions"][0, :n] = positions
    views["slots"][:n] = tables[np.repeat(np.arange(n_rows), plan.counts), block] * limits.block_size + offset
    views["block_tables"][:n_rows] = tables
    views["query_ends"][:n_rows] = ends
    views["context_lens"][:n_rows] = plan.starts + plan.counts
    views["logit_index"][: len(logit_index)] = logit_index
    views["copies"][:] = plan.copies
    _pad(views, n, n_rows, limits)
    return Batch(buffer=buffer, n_tokens=n, n_rows=n_rows, n_logits=len(logit_index), **views)


def _n_logits(n: int, n_padded_rows: int, limits: Limits) -> int:
    """Logits to compute: exact without buckets, else of two sizes a row bucket, without and with prompt scores."""
    return bucket_for(n, (n_padded_rows, limits.max_rows + limits.max_scored_tokens) if limits.row_buckets else ())


def _laid_out(shapes: dict[str, tuple[int, ...]]) -> tuple[Int, dict[str, Int]]:
    """One zeroed int32 buffer, and views of these shapes that follow each other in it."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()]).tolist()
    buffer = np.zeros(ends[-1], np.int32)
    starts = [0, *ends]
    return buffer, {
        name: buffer[start:end].reshape(shape)
        for (name, shape), start, end in zip(shapes.items(), starts, ends, strict=False)
    }


def _pad(views: dict[str, Int], n: int, n_rows: int, limits: Limits) -> None:
    """Fill [n, T) with one dummy row that follows the real ones, over the scratch blocks from slot 0 on."""
    n_padding = len(views["token_ids"]) - n
    views["slots"][n:] = views["positions"][0, n:] = np.arange(n_padding)
    views["query_ends"][n_rows:] = n + n_padding
    views["context_lens"][n_rows:] = 1
    views["context_lens"][n_rows : n_rows + 1] = max(1, n_padding)
    n_scratch = min(limits.n_scratch, limits.table_width)
    views["block_tables"][n_rows:, :n_scratch] = np.arange(n_scratch)


def _token_ids(state: EngineState, plan: Plan) -> Int:
    """The planned tokens, one row after another."""
    histories, starts = [history_of(state.rows, row) for row in plan.rows.tolist()], plan.starts.tolist()
    if plan.n_tokens == len(histories):
        return np.array([history[start] for history, start in zip(histories, starts, strict=True)], np.int32)
    ends = (plan.starts + plan.counts).tolist()
    return np.concatenate(
        [tokens_between(history, start, end) for history, start, end in zip(histories, starts, ends, strict=True)]
    )


def _pack_draw(
    state: EngineState, plan: Plan, logit_rows: Int, n_sources: int, scored: list[tuple[int, int, int]]
) -> Draw:
    rows, sampling = state.rows, state.rows.sampling[plan.sample_rows]
    row_ids = plan.sample_rows.tolist()
    bias_at, bias = _biases(state, plan)
    asked = [request_of(rows, row).params.prompt_logprobs or 0 for row in {row for row, _, _ in scored}]
    return Draw(
        logit_rows=logit_rows,
        params=sampling,
        samples=rows.sample[plan.sample_rows],
        positions=rows.n_computed[plan.sample_rows],
        penalized=tuple(
            (j, token_ids(rows, row), int(rows.n_prompt[row]))
            for j, row in enumerate(row_ids)
            if sampling["is_penalized"][j]
        ),
        bias_at=bias_at,
        bias=bias,
        n_logprobs=sampling["n_logprobs"].copy(),
        score_rows=np.arange(n_sources, n_sources + len(scored), dtype=np.int32),
        score_tokens=np.array([history_of(rows, row)[position] for row, position, _ in scored], np.int32),
        n_score_logprobs=max(asked, default=0),
    )


def _biases(state: EngineState, plan: Plan) -> tuple[Int, Float]:
    """The logits to change, [K, 2] of (sample, token), and by how much, [K]: logit_bias, and no stop before min_len."""
    rows, changes = state.rows, dict[tuple[int, int], float]()
    sampling, n_tokens = rows.sampling[plan.sample_rows], rows.n_computed[plan.sample_rows]
    for j in np.flatnonzero(sampling["is_biased"] | (n_tokens < sampling["min_len"])).tolist():
        request = request_of(rows, int(plan.sample_rows[j]))
        changes |= {(j, token): bias for token, bias in request.params.logit_bias.items()}
        if n_tokens[j] < sampling["min_len"][j]:
            changes |= {(j, token): -math.inf for token in request.stop_ids}
    return np.array(list(changes), np.int32).reshape(-1, 2), np.array(list(changes.values()), np.float64)
