"""The forward's handle, its copies and its logits. tests/models/test_parity.py shows that the
logits are right."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from nva.forward import KV, empty_kv, make_forward
from nva.kernels import reference
from nva.kernels.cpu.device import PLAIN
from nva.models import ModelSpec, RopeSpec, random_params
from nva.state.plan import Batch
from tests.devices import mutated
from tests.models.parity import LIMITS, make_batch, packed

SPEC = ModelSpec(
    vocab_size=97,
    hidden_size=16,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=4,
    intermediate_size=24,
    max_position=64,
    norm_eps=1e-6,
    ropes=(RopeSpec(theta=1e4, dim=4, max_position=64),),
    rope_ids=(0, 0),
    windows=(None, 3),
)
PARAMS = random_params(SPEC, torch.float32, torch.Generator().manual_seed(0), std=0.3)
ROWS = [np.arange(11), np.arange(50, 57)]
TABLES = [np.array([9, 5, 7]), np.array([8, 30])]


def prefill(n_first: int = 11, n_second: int = 7) -> Batch:
    return packed(ROWS, TABLES, {0: (0, n_first), 1: (0, n_second)})


def with_arrays(batch: Batch, **changed: Any) -> Batch:
    """The batch with some arrays, or numbers, replaced."""
    fields = {
        name: getattr(batch, name)
        for name in attrs.fields_dict(Batch)
        if name not in ("buffer", "images")
    }
    return make_batch(**{**fields, **changed})


@pytest.fixture
def kv() -> KV:
    return empty_kv(SPEC, LIMITS, torch.float32)


@pytest.fixture
def forward():
    return make_forward(SPEC, LIMITS, PLAIN)


def test_empty_caches_hold_scratch_and_pool(kv: KV) -> None:
    assert len(kv.layers) == SPEC.n_layers
    for k, v in kv.layers:
        assert k.shape == v.shape == (LIMITS.n_scratch + LIMITS.n_blocks, LIMITS.block_size, 2, 4)
        assert k.data_ptr() != v.data_ptr()


def test_a_used_handle_raises_and_says_what_to_do(forward, kv: KV) -> None:
    _, fresh = forward(PARAMS, kv, prefill())
    for use in (lambda: forward(PARAMS, kv, prefill()), lambda: kv.layers, kv.renew):
        with pytest.raises(
            RuntimeError,
            match=r"already given to a forward.*keep the handle that the forward returned",
        ):
            use()
    assert forward(PARAMS, fresh, prefill())[1] is not fresh


def test_the_caches_are_donated_not_copied(forward, kv: KV) -> None:
    pointers = [tensor.data_ptr() for cache in kv.layers for tensor in cache]
    _, fresh = forward(PARAMS, kv, prefill())
    assert [tensor.data_ptr() for cache in fresh.layers for tensor in cache] == pointers


def test_a_forward_that_raises_leaves_its_handle_usable(forward, kv: KV) -> None:
    """It fails in the second layer, when the first has written already; run again, it gives the
    same logits."""
    calls = []

    def attention(*args: Any, **options: Any) -> Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("out of memory")
        return reference.attention(*args, **options)

    faulty = make_forward(SPEC, LIMITS, mutated(PLAIN, attention=attention))
    with pytest.raises(OSError, match="out of memory"):
        faulty(PARAMS, kv, prefill())
    again, _ = faulty(PARAMS, kv, prefill())
    expected, _ = forward(PARAMS, empty_kv(SPEC, LIMITS, torch.float32), prefill())
    assert torch.equal(again, expected)


def test_logits_are_float32_at_logit_index_only(forward, kv: KV) -> None:
    everywhere, kv = forward(PARAMS, kv, prefill())
    index = np.array([17, 3, 3, 0])
    some, _ = forward(PARAMS, kv, with_arrays(prefill(), logit_index=index))
    assert some.dtype == torch.float32
    torch.testing.assert_close(some, everywhere[index])
    narrow = random_params(SPEC, torch.bfloat16, torch.Generator().manual_seed(0))
    logits, _ = forward(narrow, empty_kv(SPEC, LIMITS, torch.bfloat16), prefill())
    assert logits.dtype == torch.float32


def test_the_last_layer_goes_on_with_wanted_tokens_only(kv: KV) -> None:
    n_rows: list[int] = []

    def counted(x: Tensor) -> Tensor:
        n_rows.append(len(x))
        return reference.silu_mul(x)

    batch = prefill()
    make_forward(SPEC, LIMITS, mutated(PLAIN, silu_mul=counted))(PARAMS, kv, batch)
    assert n_rows == [len(batch.token_ids), len(batch.logit_index)]


def test_only_the_slots_of_a_batch_and_its_padding_are_written(forward, kv: KV) -> None:
    batch = prefill()
    _, kv = forward(PARAMS, kv, batch)
    written = np.zeros((LIMITS.n_scratch + LIMITS.n_blocks) * LIMITS.block_size, bool)
    written[batch.slots] = True
    for cache in kv.layers:
        for tensor in cache:
            assert torch.equal(tensor.flatten(2).any(-1).flatten(), torch.from_numpy(written))


def test_copies_run_before_anything_reads(forward, kv: KV) -> None:
    """A fork: block 7, which holds positions [8, 10) of row 0, is copied to 20; both go on, and
    agree."""
    _, kv = forward(PARAMS, kv, prefill(10))
    tables = [np.array([9, 5, 7]), np.array([9, 5, 20])]
    step = packed([ROWS[0], ROWS[0]], tables, {0: (10, 11), 1: (10, 11)})
    logits, kv = forward(PARAMS, kv, with_arrays(step, copies=np.array([[7, 20]])))
    torch.testing.assert_close(logits[0], logits[1])
    k_cache, v_cache = kv.layers[1]
    assert torch.equal(k_cache[7, :2], k_cache[20, :2])
    assert torch.equal(v_cache[7, :2], v_cache[20, :2])
    whole, _ = forward(PARAMS, empty_kv(SPEC, LIMITS, torch.float32), prefill())
    torch.testing.assert_close(logits[0], whole[10])


def test_padding_changes_nothing(forward) -> None:
    padded, _ = forward(PARAMS, empty_kv(SPEC, LIMITS, torch.float32), prefill())
    exact = attrs.evolve(LIMITS, token_buckets=(), row_buckets=())
    batch = prefill()
    n, rows = batch.n_tokens, batch.n_rows
    cut = with_arrays(
        batch,
        token_ids=batch.token_ids[:n],
        positions=batch.positions[:, :n],
        slots=batch.slots[:n],
        block_tables=batch.block_tables[:rows],
        query_ends=batch.query_ends[:rows],
        context_lens=batch.context_lens[:rows],
        logit_index=batch.logit_index[:n],
    )
    alone, _ = make_forward(SPEC, exact, PLAIN)(PARAMS, empty_kv(SPEC, LIMITS, torch.float32), cut)
    torch.testing.assert_close(padded[:n], alone)
    assert len(padded) > n


def test_a_compiled_backend_is_asked_unless_eager_is_enforced(kv: KV) -> None:
    asked = []

    def compiled(compute: Any) -> Any:
        asked.append(compute)
        return compute

    device = mutated(PLAIN, compiled=compiled)
    make_forward(SPEC, LIMITS, device, enforce_eager=True)
    assert asked == []
    make_forward(SPEC, LIMITS, device)(PARAMS, kv, prefill())
    assert len(asked) == 1
