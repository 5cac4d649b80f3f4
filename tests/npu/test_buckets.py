"""The padded sizes that graphs are compiled for: few, and always large enough."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nva.kernels.npu import devices, graph
from nva.state.limits import Limits


@given(
    max_batched_tokens=st.integers(1, 20_000),
    max_rows=st.integers(1, 1024),
    max_model_len=st.integers(2, 40_000),
)
def test_buckets(max_batched_tokens, max_rows, max_model_len):
    tokens, rows = graph.buckets(max_batched_tokens, max_rows, max_model_len)
    assert tokens[-1] >= max_batched_tokens
    assert rows[-1] >= max_rows + 1
    assert min(*tokens, *rows) >= 2, "a size of 1 would make graphs of its own"
    assert all(
        after - before <= max_model_len for before, after in zip(tokens, tokens[1:], strict=False)
    )
    if max_model_len >= max_batched_tokens:
        assert len(tokens) <= 7
    assert len(rows) <= 5
    limits = Limits(
        vocab_size=10, max_model_len=max_model_len, n_blocks=1, block_size=128, max_rows=max_rows,
        max_batched_tokens=max_batched_tokens, token_buckets=tokens, row_buckets=rows,
    )  # fmt: skip
    assert limits.n_scratch <= limits.table_width, "the row of padding has a table wide enough"


def test_eager_mode_has_none():
    assert devices.EAGER.buckets(2048, 256, 4096) == ((), ())
