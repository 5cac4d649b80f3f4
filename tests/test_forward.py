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
from nva.kernels import Device, reference
from nva.kernels.cpu.device import PLAIN
from nva.kernels.cpu.operators import COMPILED
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


N_IDS = LIMITS.n_scratch + LIMITS.n_blocks
ROOM = LIMITS.table_width * LIMITS.block_size


def changed(batch: Batch, name: str, index: Any, value: int) -> Batch:
    """The batch with one entry of one array replaced."""
    array = getattr(batch, name).copy()
    array[index] = value
    return with_arrays(batch, **{name: array})


BEYOND = {
    "a slot after the cache": ("slots", 3, N_IDS * LIMITS.block_size, "slots are in .* a cache of"),
    "a slot before it": ("slots", 0, -1, "slots are in .* a cache of"),
    "a block that a row reads": (
        "block_tables",
        (0, 1),
        N_IDS,
        "block_tables are in .* a cache of",
    ),
    "a block before the first": ("block_tables", (1, 0), -3, "block_tables are in"),
    "a token": ("token_ids", 2, 97, "token_ids are in .* the model's vocabulary"),
    "a token before the first": ("token_ids", 2, -1, "token_ids are in"),
    "a position": ("positions", (0, 2), LIMITS.max_model_len, "positions are in .* max_model_len"),
    "a row of logits": ("logit_index", 0, 21, "logit_index are in .* the batch's own tokens"),
    "a context longer than its table": ("context_lens", 0, ROOM + 1, "context_lens are in"),
    "a context longer than int32 adds up": ("context_lens", 0, 2**31 - 1, "context_lens are in"),
    "a context shorter than its queries": ("context_lens", 1, 6, "context_lens are .* holds"),
    "no context": ("context_lens", -1, 0, "context_lens are .* at least 1"),
    "rows that end late": ("query_ends", -1, 22, "query_ends are .* end at the batch's 21 tokens"),
    "rows that descend": ("query_ends", 0, 19, "query_ends are .* they ascend"),
}


@pytest.mark.parametrize("device", [PLAIN, COMPILED], ids=["plain", "compiled"])
@pytest.mark.parametrize(("name", "index", "value", "message"), BEYOND.values(), ids=BEYOND)
def test_a_batch_beyond_its_model_or_cache_is_refused(
    kv: KV, device: Device, name: str, index: Any, value: int, message: str
) -> None:
    """Before anything is written, and the handle still serves. The compiled kernels would read or
    write somebody else's memory."""
    params = packed_for(device)
    forward = make_forward(SPEC, LIMITS, device)
    with pytest.raises(ValueError, match=message):
        forward(params, kv, changed(prefill(), name, index, value))
    assert not any(tensor.any() for cache in kv.layers for tensor in cache)
    logits, _ = forward(params, kv, prefill())
    assert logits.isfinite().all()


def packed_for(device: Device) -> Any:
    generator = torch.Generator().manual_seed(0)
    return random_params(SPEC, torch.float32, generator, device.kernels, std=0.3)


@pytest.mark.parametrize("copies", [[[7, N_IDS]], [[-1, 20]]])
def test_copies_beyond_the_cache_are_refused(forward, kv: KV, copies: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="copies are in .* a cache of"):
        forward(PARAMS, kv, with_arrays(prefill(), copies=np.array(copies)))


def test_what_a_table_holds_beyond_its_context_is_arbitrary(forward, kv: KV) -> None:
    """A row of 7 tokens in blocks of 4 has 2 blocks."""
    expected, kv = forward(PARAMS, kv, prefill())
    found, _ = forward(PARAMS, kv, changed(prefill(), "block_tables", (1, slice(2, None)), 10**6))
    assert torch.equal(found, expected)


def test_a_batch_for_a_large_cache_is_refused_by_a_small_one(forward) -> None:
    """Through public functions alone: the state's limits are not those of the cache."""
    small = empty_kv(SPEC, attrs.evolve(LIMITS, n_blocks=8), torch.float32)
    with pytest.raises(ValueError, match="empty_kv.spec, limits"):
        forward(PARAMS, small, prefill())


OTHER_CACHES = {
    "of other heads": ({"n_kv_heads": 1}, torch.float32, "2 layers of 1 KV heads of 4"),
    "of another size": ({"head_dim": 8}, torch.float32, "2 layers of 2 KV heads of 8"),
    "of fewer layers": (
        {"n_layers": 1, "rope_ids": (0,), "windows": (None,), "experts": (None,)},
        torch.float32,
        "1 layers of 2",
    ),
    "in another type": ({}, torch.bfloat16, "4 in torch.bfloat16, the model .* in torch.float32"),
}


@pytest.mark.parametrize(("fields", "dtype", "message"), OTHER_CACHES.values(), ids=OTHER_CACHES)
def test_another_models_cache_is_refused(forward, fields: Any, dtype: Any, message: str) -> None:
    other = empty_kv(attrs.evolve(SPEC, **fields), LIMITS, dtype)
    with pytest.raises(ValueError, match=message):
        forward(PARAMS, other, prefill())


SHAPES = {
    "slots": lambda batch: batch.slots[:-1],
    "positions": lambda batch: np.tile(batch.positions, (3, 1)),
    "block_tables": lambda batch: batch.block_tables[:-1],
    "context_lens": lambda batch: batch.context_lens[:-1],
}


@pytest.mark.parametrize("name", SHAPES)
def test_arrays_that_are_not_as_long_as_the_others_are_refused(forward, kv: KV, name: str) -> None:
    batch = prefill()
    with pytest.raises(ValueError, match=f"{name} is .*, not .* 21 tokens in 3 rows"):
        forward(PARAMS, kv, with_arrays(batch, **{name: SHAPES[name](batch)}))
