"""A model whose next token can be worked out by hand: the sum of (position + 1) * token over the
sequence, modulo the vocabulary size. After [1, 2] comes 1 * 1 + 2 * 2 = 5. Its text is its tokens
as digits.

It reads the sequence back from a paged cache, as a real model does, so a wrong slot, block or
length changes its tokens. Freed blocks are poisoned: reading one raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from nva.state.blocks import free_ids
from nva.state.columns import Column, Int
from nva.state.engine import EngineState
from nva.state.errors import InvariantError
from nva.state.generation import COLD, check_generation
from nva.state.limits import Limits
from nva.state.plan import Batch, Draw, Logprobs, Sampled

POISON = -1


@attrs.frozen(kw_only=True)
class ToyKV:
    """Each slot holds the token written to it, [ids, block_size]. Updated in place, like a real
    cache."""

    tokens: Column
    generation: bytes = COLD

    @classmethod
    def empty(cls, limits: Limits) -> ToyKV:
        n_ids = limits.n_scratch + limits.n_blocks
        return cls(tokens=np.full((n_ids, limits.block_size), POISON, np.int64))


def toy_forward(limits: Limits) -> Callable[..., tuple[Column, ToyKV]]:
    """forward(params, kv, batch) -> (logits [L, vocab_size], kv) of the toy model; it has no
    parameters.

    Where the step before is not committed yet, a fourth argument is what it sampled: tokens that
    the device has and the host doesn't."""

    def forward(
        _: None, kv: ToyKV, batch: Batch, sampled: Int | None = None
    ) -> tuple[Column, ToyKV]:
        check_generation(batch.before, kv.generation)
        kv.tokens[batch.copies[:, 1]] = kv.tokens[batch.copies[:, 0]]
        kv.tokens.reshape(-1)[batch.slots] = _token_ids(batch, sampled)
        logits = np.zeros((len(batch.logit_index), limits.vocab_size), np.float32)
        for i, packed in enumerate(batch.logit_index[: batch.n_logits].tolist()):
            row = int(np.searchsorted(batch.query_ends, packed, side="right"))
            context_len = int(batch.context_lens[row] - (batch.query_ends[row] - 1 - packed))
            tokens = _read(kv, batch.block_tables[row], context_len)
            logits[i, _next(tokens, limits.vocab_size)] = 1.0
        return logits, attrs.evolve(kv, generation=batch.after)

    return forward


def _token_ids(batch: Batch, sampled: Int | None) -> Int:
    is_on_device = batch.token_source >= 0
    if not is_on_device.any():
        return batch.token_ids
    if sampled is None:
        raise InvariantError("a batch waits for tokens of the step before, which is committed")
    tokens = batch.token_ids.copy()
    tokens[is_on_device] = sampled[batch.token_source[is_on_device]]
    return tokens


def _read(kv: ToyKV, table: Int, context_len: int) -> Column:
    block_size = kv.tokens.shape[1]
    tokens = kv.tokens[table[: -(-context_len // block_size)]].reshape(-1)[:context_len]
    if (tokens == POISON).any():
        raise InvariantError(
            f"a row reads slots that nobody wrote: {tokens.tolist()} in blocks {table.tolist()}"
        )
    return tokens


def _next(tokens: Column, vocab_size: int) -> int:
    return int(((np.arange(len(tokens)) + 1) * tokens).sum() % vocab_size)


def toy_sample(logits: Column, draw: Draw) -> Sampled:
    """The likeliest token of each sample, bans and biases applied. The toy has no penalties, but
    their histories must be whole."""
    wanted = logits[draw.logit_rows].astype(np.float64)
    np.add.at(wanted, (draw.bias_at[:, 0], draw.bias_at[:, 1]), draw.bias)
    for j, history, _ in draw.penalized:
        if len(history) != draw.positions[j]:
            raise InvariantError.unequal(
                f"penalties of sample {j} see all its tokens", len(history), draw.positions[j]
            )
    n = len(draw.score_rows)
    likeliest = logits[draw.score_rows].argmax(axis=1).astype(np.int32)
    scores = Logprobs(
        chosen=logits[draw.score_rows, draw.score_tokens],
        ranks=np.ones(n, np.int32),
        top_tokens=likeliest[:, None],
        top=np.zeros((n, 1), np.float32),
    )
    return Sampled(
        tokens=wanted.argmax(axis=1).astype(np.int32),
        is_finite=np.ones(len(wanted), np.bool_),
        scores=scores if n else None,
    )


def toy_tokens(prompt: Sequence[int], n: int, vocab_size: int) -> list[int]:
    """The first n tokens that follow the prompt, without any engine."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(_next(np.array(tokens), vocab_size))
    return tokens[len(prompt) :]


def toy_stop(tokens: Sequence[int], stops: Sequence[str]) -> str | None:
    """The stop string that the text of these tokens contains, None if it contains none."""
    text = "".join(map(str, tokens))
    return next((stop for stop in stops if stop in text), None)


def poison(state: EngineState, kv: ToyKV) -> None:
    """Spoil every free block that the prefix cache can't find."""
    lost = [block for block in free_ids(state.blocks) if block not in state.blocks.keys]
    kv.tokens[lost] = POISON
