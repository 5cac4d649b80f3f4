"""What is fixed when an engine starts: Limits. Validated once, never changed.

Read next: engine.py, which starts from Limits.
"""

from __future__ import annotations

import itertools

import attrs

from nva.state.checks import flag, whole


def _ascending(
    _: object, field: attrs.Attribute[tuple[int, ...]], buckets: tuple[int, ...]
) -> None:
    if list(buckets) != sorted(set(buckets)) or any(size < 1 for size in buckets):
        raise ValueError(f"{field.name} is {buckets}; give positive sizes in ascending order")


@attrs.frozen(kw_only=True)
class Limits:
    """Sizes that no step exceeds.

    Buckets are the padded shapes of a compiled forward: `token_buckets` for the packed tokens,
    `row_buckets` for the rows (padding included, so the largest is at least max_rows + 1). Empty
    buckets mean exact shapes, no padding."""

    vocab_size: int = attrs.field(validator=whole(1))
    # Tokens of a row, prompt and output together.
    max_model_len: int = attrs.field(validator=whole(2))
    # Blocks of the pool. The scratch blocks, which padding writes to, are not counted.
    n_blocks: int = attrs.field(validator=whole(1))
    # Tokens that a block holds.
    block_size: int = attrs.field(default=16, validator=whole(1))
    max_rows: int = attrs.field(default=64, validator=whole(1))
    # Tokens that a step computes, prompts and decoding together.
    max_batched_tokens: int = attrs.field(default=2048, validator=whole(1))
    # Tokens that a step gives log-probabilities or probes of, beside those it samples.
    max_scored_tokens: int = attrs.field(default=256, validator=whole(1))
    # How many tokens of a row a step may compute before the host knows them. 0: each step is
    # committed before the next is planned. 1: it may be committed one step later (overlap).
    lookahead: int = attrs.field(default=0, validator=whole(0))
    # 3 where images have time, height and width.
    position_axes: int = attrs.field(default=1, validator=whole(1))
    prefix_caching: bool = attrs.field(default=True, validator=flag)
    token_buckets: tuple[int, ...] = attrs.field(default=(), validator=_ascending)
    row_buckets: tuple[int, ...] = attrs.field(default=(), validator=_ascending)

    def __attrs_post_init__(self) -> None:
        if bool(self.token_buckets) != bool(self.row_buckets):
            raise ValueError("token_buckets and row_buckets go together: give both or neither")
        if self.token_buckets and self.token_buckets[-1] < self.max_batched_tokens:
            raise ValueError(
                f"the largest token bucket, {self.token_buckets[-1]}, is below max_batched_tokens"
            )
        if self.token_buckets and self._largest_padding > self.max_model_len:
            raise ValueError(
                f"token_buckets {self.token_buckets} pad by up to {self._largest_padding} tokens, "
                f"which one row of max_model_len {self.max_model_len} must hold; add buckets "
                "between"
            )
        if self.row_buckets and self.row_buckets[-1] < self.max_rows + 1:
            raise ValueError(
                f"the largest row bucket, {self.row_buckets[-1]}, is below max_rows + 1 (one row "
                "is padding)"
            )

    @property
    def table_width(self) -> int:
        """Columns of a block table: blocks that the longest row needs."""
        return blocks_for(self.max_model_len, self.block_size)

    @property
    def n_scratch(self) -> int:
        """Blocks before the pool that padding writes to: ids [0, n_scratch), at least one."""
        return max(1, blocks_for(self._largest_padding, self.block_size))

    @property
    def _largest_padding(self) -> int:
        """Padding tokens of the worst step: one token more than a bucket holds takes the next."""
        sizes = itertools.pairwise((0, *self.token_buckets))
        return max((larger - smaller - 1 for smaller, larger in sizes), default=0)

    @property
    def pool_len(self) -> int:
        """Tokens at which a row ends that has the whole pool to itself: the last one needs no
        slot."""
        return self.n_blocks * self.block_size + 1


def blocks_for(n_tokens: int, block_size: int) -> int:
    """How many blocks hold that many tokens."""
    return -(-n_tokens // block_size)


def bucket_for(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds the size; the size itself where there are no buckets."""
    return next((bucket for bucket in buckets if bucket >= size), size)
