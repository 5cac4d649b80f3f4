"""Sizes: what memory can't hold is refused before any of it is taken; defaults are modest."""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest
import torch

import nva
from nva.forward import make_forward
from nva.kernels.cpu.device import PLAIN
from nva.kernels.cuda import GPU
from nva.loading import sizes
from nva.loading.options import Options
from nva.loading.sizes import (
    block_bytes,
    check_memory,
    default_n_blocks,
    empty_engine,
    limits_of,
    weights_bytes,
)
from nva.models.registry import read_model
from nva.models.spec import ModelSpec
from nva.state.engine import empty
from tests.npu.models import BASE

GIB = 1 << 30
F32 = torch.float32


def spec_of(**settings: Any) -> ModelSpec:
    """A tiny Llama: 2 layers of 2 heads of 16, so 512 bytes a token in float32."""
    return read_model({**BASE, "architectures": ["LlamaForCausalLM"], **settings})[0]


def device_with(memory: int, base=PLAIN):
    return attrs.evolve(base, cache_memory=lambda _: memory)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """A machine with this much memory free."""

    def set_free(n_bytes: int) -> None:
        monkeypatch.setattr(sizes, "free_memory", lambda: n_bytes)

    set_free(8 * GIB)
    return set_free


def test_a_token_takes_what_the_tests_count_with() -> None:
    assert block_bytes(spec_of(), 16, F32, PLAIN) == 16 * 512


TOO_LARGE = {
    "a cache by its memory": {"cache_memory": "100GiB"},
    "a cache by its blocks": {"n_blocks": 2_000_000},
    "rows": {"max_rows": 2**31 - 1},
    "short rows": {"max_rows": 2**31 - 1, "max_model_len": 2},
    "rows of full length": {"max_rows": 1_000_000},
    "just a little more than is free": {"cache_memory": 8 * GIB},
    "many tiny blocks": {"n_blocks": 60_000_000, "block_size": 1},
}


@pytest.mark.parametrize("options", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_memory_can_not_hold_is_refused_with_what_is_free(free, options) -> None:
    spec = spec_of()
    start = time.perf_counter()
    with pytest.raises(
        ValueError, match=r"don't fit into memory, of which 8.0 GiB are free .*; lower max_rows"
    ):
        limits = limits_of(spec, Options(**options), PLAIN, F32)
        check_memory(spec, limits, F32, PLAIN, with_weights=True)
    assert time.perf_counter() - start < 1


def test_what_fits_is_not_refused(free) -> None:
    spec = spec_of()
    for options in ({"cache_memory": "7GiB"}, {"max_rows": 100_000}, {"n_blocks": 100_000}, {}):
        limits = limits_of(spec, Options(**options), PLAIN, F32)
        check_memory(spec, limits, F32, PLAIN, with_weights=True)


def test_a_cache_on_a_device_of_its_own_is_not_counted_as_the_hosts(free) -> None:
    spec = spec_of()
    limits = limits_of(spec, Options(cache_memory="60GiB"), GPU, F32)
    check_memory(spec, limits, F32, GPU, with_weights=True)
    rows = limits_of(spec, Options(max_rows=2**31 - 1, n_blocks=9), GPU, F32)
    with pytest.raises(ValueError, match="don't fit into memory"):
        check_memory(spec, rows, F32, GPU, with_weights=True)


def test_the_weights_count_before_they_are_read(free) -> None:
    spec = spec_of()
    params = weights_bytes(spec, F32)
    limits = limits_of(spec, Options(cache_memory=8 * GIB - params), PLAIN, F32)
    with pytest.raises(ValueError, match="beside weights of"):
        check_memory(spec, limits, F32, PLAIN, with_weights=True)
    free(params - 1)
    with pytest.raises(ValueError, match="the weights, .* in float32, don't fit into memory"):
        check_memory(spec, limits, F32, PLAIN, with_weights=True)


def test_the_weights_are_counted_as_they_are() -> None:
    from nva.kernels.reference import KERNELS
    from nva.models import random_params

    for dtype in (torch.float32, torch.bfloat16):
        spec = spec_of(tie_word_embeddings=False)
        params = random_params(spec, dtype, torch.Generator(), KERNELS)
        leaves = torch.utils._pytree.tree_leaves(params)
        assert sum(leaf.nbytes for leaf in leaves) == weights_bytes(spec, dtype)


def test_a_system_that_does_not_tell_its_memory_is_left_to_refuse(monkeypatch) -> None:
    def unknown() -> int:
        raise ValueError("this system doesn't tell")

    monkeypatch.setattr(sizes, "free_memory", unknown)
    spec = spec_of()
    limits = limits_of(spec, Options(cache_memory="100GiB"), PLAIN, F32)
    check_memory(spec, limits, F32, PLAIN, with_weights=True)


def test_slots_have_int32_numbers(free) -> None:
    free(1 << 50)
    spec = spec_of()
    limits = limits_of(spec, Options(n_blocks=2**27), PLAIN, F32)
    with pytest.raises(ValueError, match="more than slots can be numbered; lower"):
        check_memory(spec, limits, F32, PLAIN, with_weights=False)


def test_the_tables_are_counted_as_they_are_made(free) -> None:
    """What the state takes is within what was counted, and the count is not far above it."""
    spec = spec_of()
    for options in ({"max_rows": 3000}, {"n_blocks": 40_000}, {"max_rows": 1, "block_size": 1}):
        limits = limits_of(
            spec, Options(n_blocks=options.pop("n_blocks", 7), **options), PLAIN, F32
        )
        rows = empty(limits).rows
        tables = (rows.histories.shared.entries, rows.block_tables.shared.entries)
        columns = [value.nbytes for value in vars(rows).values() if hasattr(value, "nbytes")]
        made = sum(columns) + sum(table.nbytes for table in tables)
        counted = sizes._row_bytes(limits)
        assert 0.95 * made <= counted <= 1.05 * made


def test_the_default_cache_in_the_hosts_memory_is_modest() -> None:
    """Other programs want that memory; a GPU's is there for nothing else."""
    spec = spec_of()
    limits = limits_of(spec, Options(), PLAIN, F32)
    assert limits.max_model_len == 2048
    assert default_n_blocks(spec, limits, F32, device_with(100 * GIB)) == 256 * 256 // 16
    whole = 256 * 2048 // 16
    assert default_n_blocks(spec, limits, F32, device_with(100 * GIB, GPU)) == whole
    assert default_n_blocks(spec, limits, F32, device_with(16 * 512 * 10)) == 10
    one = limits_of(spec, Options(max_rows=1), PLAIN, F32)
    assert default_n_blocks(spec, one, F32, device_with(GIB)) == 2048 // 16
    short = limits_of(spec, Options(max_model_len=20), PLAIN, F32)
    assert default_n_blocks(spec, short, F32, device_with(GIB)) == 256 * 2
    few = attrs.evolve(limits, max_rows=8)
    assert default_n_blocks(spec, few, F32, device_with(GIB)) == 8 * 2048 // 16, "all they need"


def test_memory_for_less_than_a_block_is_refused() -> None:
    spec = spec_of()
    with pytest.raises(ValueError, match="memory, 8191 bytes, holds no block of 8192 bytes"):
        limits_of(spec, Options(cache_memory=8191), PLAIN, F32)
    assert limits_of(spec, Options(cache_memory=8192), PLAIN, F32).n_blocks == 1


LONG = 10_000_000


def test_a_very_long_model_is_as_long_as_its_cache(caplog) -> None:
    spec = spec_of(max_position_embeddings=LONG)
    small, large = device_with(GIB), device_with(4 * GIB)
    with caplog.at_level("INFO", "nva"):
        assert limits_of(spec, Options(), small, F32).max_model_len == GIB // 512
    assert f"max_model_len is {GIB // 512}, not the model's 10000000" in caplog.text
    assert limits_of(spec, Options(), large, F32).max_model_len == 4 * GIB // 512
    assert limits_of(spec, Options(), device_with(1 << 50), F32).max_model_len == LONG
    assert limits_of(spec, Options(n_blocks=9), small, F32).max_model_len == sizes.LONG_LEN
    assert limits_of(spec, Options(cache_memory=GIB), large, F32).max_model_len == GIB // 512
    assert limits_of(spec, Options(max_model_len=LONG), small, F32).max_model_len == LONG


def test_a_very_long_model_costs_no_gigabytes(free) -> None:
    """Ten million positions were 5 GB and half a minute."""
    spec = spec_of(max_position_embeddings=LONG)
    device = device_with(64 << 20)
    limits = limits_of(spec, Options(), device, F32)
    limits = attrs.evolve(limits, n_blocks=default_n_blocks(spec, limits, F32, device))
    free(GIB)
    empty_engine(spec, limits, F32, device, Options())
    start = time.perf_counter()
    make_forward(spec, limits, device)
    assert time.perf_counter() - start < 10
    asked = limits_of(spec, Options(max_model_len=LONG, n_blocks=9), device, F32)
    with pytest.raises(ValueError, match="rows of up to 10000000 tokens .* lower .*max_model_len"):
        check_memory(spec, asked, F32, device, with_weights=True)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "longrope", "original_max_position_embeddings": 1_000_000},
        {"rope_type": "longrope", "original_max_position_embeddings": 4096},
        {"rope_type": "dynamic", "factor": 4.0},
    ],
    ids=str,
)
def test_the_memory_that_is_free_changes_no_rope(scaling: dict[str, Any]) -> None:
    """Some ropes depend on max_model_len: then it stays the model's own."""
    if scaling["rope_type"] == "longrope":
        factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        scaling = {**scaling, **factors, "factor": 1.0}
    spec = spec_of(max_position_embeddings=LONG, rope_scaling=scaling)
    length = limits_of(spec, Options(), device_with(GIB), F32).max_model_len
    for rope in spec.ropes:
        (found, scale), (expected, other) = rope.frequencies(length), rope.frequencies(LONG)
        assert torch.equal(found, expected)
        assert scale == other


def test_the_refusal_comes_before_the_weights(demo_model, monkeypatch) -> None:
    import importlib

    load = importlib.import_module("nva.loading.load")
    monkeypatch.setattr(load, "load_params", lambda *_: pytest.fail("weights were read"))
    for options in ({"cache_memory": "9999GiB"}, {"max_rows": 2**31 - 1}, {"n_blocks": 2**26}):
        with pytest.raises(ValueError, match="don't fit into memory"):
            nva.load(demo_model, device="cpu", **options)
