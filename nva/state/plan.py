"""What a step decides and carries: Plan (decisions), Batch and Draw (arrays), Sampled and Output
(results).

The law: each is a new record, complete when made; nothing is filled in later. The records of every
step are made without slots: attrs would fill those one by one, which takes twice the time. Read
next: steps/schedule.py makes a Plan, steps/pack.py a Batch and a Draw of it, forward.py consumes
the Batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np

from nva.state.columns import (
    Column,
    Float,
    Ids,
    Int,
    Long,
    array_field,
    column_field,
    freeze,
    freeze_columns,
)
from nva.state.generation import COLD
from nva.state.media import Image
from nva.state.request import Finished, Request
from nva.state.rows import SampleId


class Score(NamedTuple):
    """A prompt token whose log-probability is asked for, and where this step computes it."""

    row: int
    arrival: int  # of the row's request, to know it again at commit
    position: int  # of the prompt token
    packed: int  # which of the step's tokens predicts it


NO_IDS: Ids = freeze(np.zeros(0, np.intp))


@attrs.frozen(kw_only=True, slots=False)
class Plan:
    """Which rows compute which tokens, and which of them then sample.

    Row `rows[i]` computes positions [starts[i], starts[i] + counts[i]). Sample j is drawn for row
    `sample_rows[j]` from the last logits of the i-th planned row, i = `sample_sources[j]`: n
    samples of a fresh prompt share one source.

    A sample is known by (arrival, sample, position). The row alone would not do: when a plan is
    committed after the next was made, its rows may have been freed and filled again."""

    rows: Ids = column_field()  # [B] decode rows first
    starts: Int = column_field()  # [B]
    counts: Int = column_field()  # [B], at least 1
    # [B] Where the host doesn't know the row's token yet: its index among the samples of the plan
    # before this one, else NO_SOURCE. None where it knows all.
    token_sources: Int | None = None
    sample_rows: Ids = column_field()  # [S]
    sample_sources: Ids = column_field()  # [S] indices into rows
    sample_arrivals: Long = column_field()  # [S] arrival of the sequence
    sample_numbers: Int = column_field()  # [S] which of its request's samples it is
    sample_positions: Int = column_field()  # [S] position in the sequence of the token to draw
    copies: Int = column_field()  # [C, 2] (from, to) block ids; all are read before any is written
    preempted: tuple[SampleId, ...] = ()  # rows sent back to wait
    scores: tuple[Score, ...] = ()  # prompt tokens whose log-probabilities this step gives
    # [P] Tokens of this step, by their index among all it packs, whose logits a scheduler of one's
    # own asks for: draw.probe_rows says where the sampler finds them.
    probes: Ids = column_field(default=NO_IDS)
    n_hit: int = 0  # tokens found in the prefix cache, a preempted row's own included
    before: bytes = COLD  # generation of the cache that the step expects
    after: bytes = COLD  # and the one it makes of it

    @property
    def n_tokens(self) -> int:
        return int(self.counts.sum())

    def __attrs_post_init__(self) -> None:
        for names in (_ROW_ARRAYS, _SAMPLE_ARRAYS, _OTHER_ARRAYS):
            freeze_columns(self, names)
        check_lengths(self, _ROW_ARRAYS)
        check_lengths(self, _SAMPLE_ARRAYS)
        if self.token_sources is not None:
            freeze_columns(self, ("token_sources",))
            check_lengths(self, ("rows", "token_sources"))


_ROW_ARRAYS = ("rows", "starts", "counts")
_SAMPLE_ARRAYS = (
    "sample_rows",
    "sample_sources",
    "sample_arrivals",
    "sample_numbers",
    "sample_positions",
)
_OTHER_ARRAYS = ("copies", "probes")


def check_lengths(record: Any, names: Sequence[str]) -> None:
    """Raise ValueError if one of these arrays of a record is not as long as the first of them."""
    fields = record.__dict__
    n = len(fields[names[0]])
    for name in names:
        if len(fields[name]) != n:
            owner = type(record).__name__
            raise ValueError(
                f"{owner}.{name} has {len(fields[name])} entries and {owner}.{names[0]} {n}; give "
                "one for each"
            )


@attrs.frozen(kw_only=True)
class ImageSpan:
    """Features [first, first + count) of an image are what tokens [packed, packed + count) of a
    batch show."""

    image: Image
    first: int
    packed: int
    count: int


def _view_field() -> Any:
    return column_field(metadata={"in_buffer": True})


@attrs.frozen(kw_only=True, slots=False)
class Batch:
    """T packed tokens of B rows for the device, in one int32 buffer that is copied at once. The
    arrays are views of it, and follow each other there in the order of these fields.

    Other than vLLM's metadata, it doesn't tell prompts from decoding: a decode row is a query of
    length 1. Padding is one dummy row after the real rows, over the scratch blocks, then rows of no
    tokens with context 1. Make one by batch_of()."""

    buffer: Int = column_field()
    token_ids: Int = _view_field()  # [T]
    # [T] -1, or the index of the token among those that the step before sampled, where the host
    # doesn't know it yet; its token_ids then mean nothing.
    token_source: Int = _view_field()
    positions: Int = _view_field()  # [position_axes, T]
    slots: Int = _view_field()  # [T] block * block_size + offset, all distinct
    block_tables: Int = _view_field()  # [B, table_width]
    query_ends: Int = _view_field()  # [B] inclusive running sum of query lengths; the last is T
    context_lens: Int = _view_field()  # [B] tokens of the row in the cache, this step's included
    logit_index: Int = _view_field()  # [L] which of the T positions produce logits
    copies: Int = _view_field()  # [C, 2] block copies to run first
    n_tokens: int  # real tokens, [n_tokens, T) is padding
    n_rows: int  # real rows
    n_logits: int  # real entries of logit_index
    images: tuple[ImageSpan, ...] = ()
    before: bytes = COLD  # generation of the cache that the batch expects
    after: bytes = COLD  # and the one that the forward makes of it

    def __attrs_post_init__(self) -> None:
        freeze_columns(self, ("buffer", *BATCH_ARRAYS))
        fields = self.__dict__
        n_left = self.buffer.size
        for name in BATCH_ARRAYS:
            n_left -= fields[name].size
            if fields[name].base is not self.buffer:
                raise ValueError(
                    f"Batch.{name} is not a view of the batch's one buffer, and the device sees "
                    "the buffer alone; make the batch anew, by batch_of()"
                )
        if n_left:
            raise ValueError(
                "the arrays of a Batch don't fill its buffer, so that the device would see others; "
                "make the batch anew, by batch_of()"
            )


BATCH_ARRAYS = tuple(field.name for field in attrs.fields(Batch) if "in_buffer" in field.metadata)
"""The arrays of a Batch, in the order in which they follow each other in its buffer."""


def laid_out(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Int, dict[str, Int]]:
    """A batch's buffer, zeroed, and views of it of these shapes, to be filled."""
    sizes = [math.prod(shapes[name]) for name in BATCH_ARRAYS]
    buffer = np.zeros(sum(sizes), np.int32)
    views: dict[str, Int] = {}
    start = 0
    for name, size in zip(BATCH_ARRAYS, sizes, strict=True):
        views[name] = buffer[start : start + size].reshape(shapes[name])
        start += size
    return buffer, views


def batch_of(arrays: Mapping[str, Column], **fields: Any) -> Batch:
    """A batch of copies of these arrays, one for each of BATCH_ARRAYS, and its other fields."""
    buffer, views = laid_out({name: arrays[name].shape for name in BATCH_ARRAYS})
    for name, view in views.items():
        view[...] = arrays[name]
    return Batch(buffer=buffer, **views, **fields)


def _no_arrivals(draw: Draw) -> Long:
    return np.zeros(len(draw.logit_rows), np.int64)


def _no_requests(draw: Draw) -> Column:
    return np.full(len(draw.logit_rows), None)


@attrs.frozen(kw_only=True, slots=False)
class Draw:
    """What the sampler needs for S samples, one entry each, and for Q prompt tokens whose
    log-probabilities are asked.

    `penalized[k] = (j, history, n_prompt)`: sample j has penalties, over these tokens. `bias_at[k]
    = (j, token)`, all distinct, gets `bias[k]` added to its logit; minus infinity bans a token."""

    logit_rows: Ids = column_field()  # [S] row of the logits
    params: Column = column_field()  # [S] ROW_PARAMS
    samples: Int = column_field()  # [S] sample index
    positions: Int = column_field()  # [S] position in the sequence of the token to draw
    # [S] Whose sample it is: the arrival of its request, and the Request itself.
    arrivals: Long = column_field(default=attrs.Factory(_no_arrivals, takes_self=True))
    requests: Column = column_field(default=attrs.Factory(_no_requests, takes_self=True))
    penalized: tuple[tuple[int, Int, int], ...]
    bias_at: Int = column_field()  # [K, 2]
    bias: Float = column_field()  # [K]
    score_rows: Int = column_field()  # [Q] rows of the logits that predict prompt tokens
    score_tokens: Int = column_field()  # [Q] the prompt tokens
    # Likeliest tokens to report for each, the most that any of these prompts asks.
    n_score_logprobs: int
    probe_rows: Ids = column_field(default=NO_IDS)  # [P] rows of the logits of plan.probes

    def __attrs_post_init__(self) -> None:
        freeze_columns(self, _DRAW_ARRAYS)


_DRAW_ARRAYS = tuple(
    name for name in attrs.fields_dict(Draw) if name not in ("penalized", "n_score_logprobs")
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

    tokens: Int = column_field()  # [S]
    # [S] bool: False where the logits were NaN or infinite, or all tokens banned.
    is_finite: Column = column_field()
    logprobs: Logprobs | None = None
    scores: Logprobs | None = None

    def __attrs_post_init__(self) -> None:
        freeze_columns(self, ("tokens", "is_finite"))


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
    samples: Int = column_field()  # [S]
    tokens: Int = column_field()  # [S]
    logprobs: Sequence[TokenLogprobs | None]  # [S]
    # (request, position, log-probs), positions ascending
    scores: Sequence[tuple[Request, int, TokenLogprobs]] = ()
    finished: Sequence[Finished] = ()

    def __attrs_post_init__(self) -> None:
        freeze_columns(self, ("samples", "tokens"))


_NO_COPIES: Int = freeze(np.zeros((0, 2), np.int32))


def no_copies() -> Int:
    """An empty list of block copies, [0, 2]."""
    return _NO_COPIES
