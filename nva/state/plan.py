"""What a step decides and carries: Plan (decisions), Batch and Draw (arrays), Sampled and Output
(results).

The law: each is a new record, complete when made; nothing is filled in later. Those of every step
have no slots, which attrs fills one by one, in twice the time. Read next: steps/schedule.py makes a
Plan, steps/pack.py a Batch and a Draw of it, forward.py consumes the Batch."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from nva.state.columns import Column, Float, Ids, Int, Long, array_field
from nva.state.media import Image
from nva.state.request import Finished, Request


@attrs.frozen(kw_only=True, slots=False)
class Plan:
    """Which rows compute which tokens, and which of them then sample.

    Row `rows[i]` computes positions `[starts[i], starts[i] + counts[i])`. Sample j is drawn for row
    `sample_rows[j]` from the last logits of the i-th planned row, i = `sample_sources[j]`: n
    samples of a fresh prompt share one source."""

    rows: Ids = array_field()  # [B] decode rows first
    starts: Int = array_field()  # [B]
    counts: Int = array_field()  # [B], at least 1
    sample_rows: Ids = array_field()  # [S]
    sample_sources: Ids = array_field()  # [S] indices into rows
    sample_arrivals: Long = array_field()  # [S] arrival of the sequence, to know it again at commit
    copies: Int = array_field()  # [C, 2] (from, to) block ids; all are read before any is written
    preempted: tuple[tuple[int, int], ...] = ()  # (arrival, sample) of rows sent back to wait
    n_hit: int = 0  # tokens found in the prefix cache, a preempted row's own included

    @property
    def n_tokens(self) -> int:
        return int(self.counts.sum())


@attrs.frozen(kw_only=True)
class ImageSpan:
    """Features [first, first + count) of an image are what tokens [packed, packed + count) of a
    batch show."""

    image: Image
    first: int
    packed: int
    count: int


@attrs.frozen(kw_only=True, slots=False)
class Batch:
    """T packed tokens of B rows for the device, in one int32 buffer that is copied at once. Fields
    are views of it.

    Padding is one dummy row after the real rows, over the scratch blocks, then rows of no tokens
    with context 1."""

    buffer: Int = array_field()  # everything below, contiguous
    token_ids: Int = array_field()  # [T]
    positions: Int = array_field()  # [position_axes, T]
    slots: Int = array_field()  # [T] block * block_size + offset, all distinct
    block_tables: Int = array_field()  # [B, table_width]
    query_ends: Int = array_field()  # [B] inclusive running sum of query lengths; the last equals T
    context_lens: Int = array_field()  # [B] tokens of the row in the cache, this step's included
    logit_index: Int = array_field()  # [L] which of the T positions produce logits
    copies: Int = array_field()  # [C, 2] block copies to run first
    n_tokens: int  # real tokens, [n_tokens, T) is padding
    n_rows: int  # real rows
    n_logits: int  # real entries of logit_index
    images: tuple[ImageSpan, ...] = ()


@attrs.frozen(kw_only=True, slots=False)
class Draw:
    """What the sampler needs for S samples, one entry each, and for Q prompt tokens whose
    log-probabilities are asked.

    `penalized[k] = (j, history, n_prompt)`: sample j has penalties, over these tokens. `bias_at[k]
    = (j, token)`, all distinct, gets `bias[k]` added to its logit; minus infinity bans a token."""

    logit_rows: Ids = array_field()  # [S] row of the logits
    params: Column = array_field()  # [S] SAMPLING
    samples: Int = array_field()  # [S] sample index
    positions: Int = array_field()  # [S] position in the sequence of the token to draw
    penalized: tuple[tuple[int, Int, int], ...]
    bias_at: Int = array_field()  # [K, 2]
    bias: Float = array_field()  # [K]
    score_rows: Int = array_field()  # [Q] rows of the logits that predict prompt tokens
    score_tokens: Int = array_field()  # [Q] the prompt tokens
    n_score_logprobs: (
        int  # likeliest tokens to report for each, the most that any of these prompts asks
    )


@attrs.frozen(kw_only=True)
class Logprobs:
    """Log-probabilities of N chosen tokens and of the K likeliest, of the model's distribution
    before any change."""

    chosen: Float = array_field()  # [N] float32
    ranks: Int = array_field()  # [N] 1 for the likeliest
    top_tokens: Int = array_field()  # [N, K]
    top: Float = array_field()  # [N, K] float32, descending


@attrs.frozen(kw_only=True, slots=False)
class Sampled:
    """What the sampler answers: S tokens, and log-probabilities if any were asked (over all S; over
    all Q)."""

    tokens: Int = array_field()  # [S]
    is_finite: Column = (
        array_field()
    )  # [S] bool: False where the logits were NaN or infinite, or all tokens banned
    logprobs: Logprobs | None = None
    scores: Logprobs | None = None


@attrs.frozen(kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position: of its token, with its rank, and of the likeliest, as
    (token, log-prob)."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@attrs.frozen(kw_only=True, slots=False)
class Output:
    """What a step brought: a token for each of S samples, prompt scores, and the samples that
    ended."""

    requests: Sequence[Request]  # [S]
    samples: Int = array_field()  # [S]
    tokens: Int = array_field()  # [S]
    logprobs: Sequence[TokenLogprobs | None]  # [S]
    scores: Sequence[
        tuple[Request, int, TokenLogprobs]
    ] = ()  # (request, position, log-probs), ascending positions
    finished: Sequence[Finished] = ()


def no_copies() -> Int:
    """An empty list of block copies, [0, 2]."""
    return np.zeros((0, 2), np.int32)
