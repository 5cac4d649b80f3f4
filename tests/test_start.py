"""Warm-up batches have every shape, are valid, and as demanding as any; a wrong device is found
before it serves."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nva.forward import empty_kv, make_forward
from nva.kernels import reference
from nva.kernels.cpu.device import PLAIN
from nva.loading.check import self_check
from nva.loading.warm_up import filled_batch, run_largest, shapes, warm_up
from nva.models import ModelSpec, RopeSpec, random_params
from nva.models.spec import ExpertSpec, VisionSpec
from nva.state.bounds import Bounds, check_batch
from nva.state.errors import DeviceError
from nva.state.limits import Limits
from nva.state.media import Image
from tests.devices import mutated

ROPE = RopeSpec(theta=1e4, dim=16, max_position=256)
SPEC = ModelSpec(
    vocab_size=31, hidden_size=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, intermediate_size=48,
    max_position=256, norm_eps=1e-5, ropes=(ROPE,), rope_ids=(0, 0), windows=(None, 50),
)  # fmt: skip


def limits(token_buckets=(16, 64), row_buckets=(17, 33), **fields):
    fields = {
        "vocab_size": 31,
        "max_model_len": 100,
        "n_blocks": 9,
        "max_rows": 32,
        "max_batched_tokens": 64,
        **fields,
    }
    return Limits(token_buckets=token_buckets, row_buckets=row_buckets, **fields)


@given(n_tokens=st.integers(1, 80), n_rows=st.integers(1, 40), n_blocks=st.integers(5, 30))
def test_filled_batch_is_valid_and_full(n_tokens, n_rows, n_blocks):
    bounds = limits(n_blocks=n_blocks)
    batch = filled_batch(bounds, n_tokens, n_rows)
    counts = np.diff(batch.query_ends, prepend=0)
    assert batch.query_ends[-1] == n_tokens
    assert (counts >= 0).all()
    assert np.ptp(counts) <= 1
    assert (batch.context_lens == bounds.max_model_len).all(), "the longest context there is"
    assert len(np.unique(batch.slots)) == n_tokens
    assert batch.slots.max() < (bounds.n_scratch + n_blocks) * bounds.block_size
    assert batch.block_tables.shape == (n_rows, bounds.table_width)
    assert 0 <= batch.block_tables.min() <= batch.block_tables.max() < bounds.n_scratch + n_blocks
    positions = [range(bounds.max_model_len - count, bounds.max_model_len) for count in counts]
    assert batch.positions[0].tolist() == [position for row in positions for position in row]
    assert (batch.logit_index >= 0).all()


def test_shapes_are_those_that_a_step_can_have():
    """16 tokens are at most 16 rows, and those with the row of padding fit 17."""
    assert shapes(limits()) == [(16, 17), (64, 17), (64, 33)]
    assert shapes(limits((), ())) == []


def test_a_shape_that_no_step_can_have_is_not_compiled():
    """Steps of more tokens than the pool has slots, or than the rows can hold."""
    of_two_blocks = limits((16, 32, 64), (33,), n_blocks=2, max_model_len=32)
    assert shapes(of_two_blocks) == [(16, 33), (32, 33)]
    buckets = tuple(range(16, 177, 16))
    short_rows = limits(buckets, (9, 33), max_model_len=16, n_blocks=99, max_batched_tokens=176)
    found = shapes(short_rows)
    assert [n_tokens for n_tokens, n_rows in found if n_rows == 9] == list(range(16, 145, 16))
    assert [n_tokens for n_tokens, n_rows in found if n_rows == 33] == list(buckets)


@given(
    max_rows=st.integers(1, 40),
    max_model_len=st.integers(2, 90),
    n_blocks=st.integers(1, 30),
    first=st.integers(2, 40),
)
def test_what_is_compiled_is_within_every_bound(max_rows, max_model_len, n_blocks, first):
    """The forward would refuse it otherwise, for the cache that there is."""
    tokens = [min(first, max_model_len)]
    while tokens[-1] < 64:
        tokens.append(min(64, 4 * tokens[-1], tokens[-1] + max_model_len))
    rows = tuple(sorted({min(17, max_rows + 1), max_rows + 1}))
    bounds = limits(
        tuple(tokens), rows, max_rows=max_rows, max_model_len=max_model_len, n_blocks=n_blocks
    )
    for n_tokens, n_rows in shapes(bounds):
        check_batch(
            filled_batch(bounds, n_tokens, n_rows),
            Bounds(
                n_ids=bounds.n_scratch + bounds.n_blocks,
                block_size=bounds.block_size,
                vocab_size=bounds.vocab_size,
                max_model_len=max_model_len,
                position_axes=1,
            ),
        )


def test_warm_up_runs_every_shape_once():
    seen = []
    bounds = limits()
    forward = make_forward(SPEC, bounds, PLAIN)

    def watched(params, kv, batch):
        seen.append((len(batch.token_ids), len(batch.query_ends)))
        return forward(params, kv, batch)

    params = random_params(SPEC, torch.float32, torch.Generator())
    kv = warm_up(watched, params, empty_kv(SPEC, bounds, torch.float32), bounds)
    assert sorted(seen) == sorted(shapes(bounds))
    assert kv.layers, "the handle that comes back is fresh"


def wrong(**functions):
    return attrs.evolve(mutated(PLAIN, **functions), is_checked=True)


MANY = ExpertSpec(
    n_experts=128, n_active=8, intermediate_size=768, shared_size=4096, normalize=True
)
MOE = attrs.evolve(SPEC, experts=(None, MANY))


TOWER = VisionSpec(
    n_layers=24, hidden_size=1152, n_heads=16, intermediate_size=4304, patch_shape=(3, 2, 16, 16), merge_size=2,
    grid_side=48, out_size=32, deepstack_layers=(8, 16), rope_theta=1e4, image_token=3,
)  # fmt: skip
SEEING = attrs.evolve(SPEC, qk_norm=True, rope_axes=(0, 1, 2, 0, 1, 2, 0, 0), vision=TOWER)


def test_a_device_that_computes_the_same_passes():
    for spec in (SPEC, MOE, SEEING):
        for dtype in PLAIN.dtypes:
            self_check(spec, wrong(), dtype)


def unweighted(x, logits, *rest):
    return reference.moe(x, torch.zeros_like(logits), *rest)


@pytest.mark.parametrize("moe", [lambda x, *_: x, unweighted], ids=["no experts", "no router"])
def test_a_device_that_routes_otherwise_is_refused(moe):
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(DeviceError, match="something else than the reference"):
            self_check(MOE, wrong(moe=moe), dtype)


@pytest.mark.parametrize(
    "device",
    [
        wrong(
            attention=lambda q, *rest: reference.attention(q, *rest[:3], rest[3] * 1.5, *rest[4:])
        ),
        wrong(attention=lambda *args: reference.attention(*args[:5])),
        wrong(rotary=lambda q, k, cos, sin: (q, k)),
        wrong(silu_mul=lambda x: x.chunk(2, -1)[0]),
        wrong(write_kv=lambda *_: None),
        wrong(silu_mul=lambda x: x.chunk(2, -1)[0] * torch.nan),
    ],
    ids=["scale", "no window", "no rope", "no gate", "no cache", "NaN"],
)
def test_a_device_that_computes_something_else_is_refused(device):
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(DeviceError, match="something else than the reference"):
            self_check(SPEC, device, dtype)


def dtyped(function):
    return lambda q, k, v, scale: function(q, k, v, scale).to(q.dtype)


@pytest.mark.parametrize(
    "vision_attention",
    [
        dtyped(lambda q, k, v, scale: v.float().mean(0).expand(v.shape)),
        dtyped(lambda q, k, v, scale: reference.vision_attention(q, k, v, 1.5 * scale)),
        dtyped(lambda q, k, v, scale: reference.vision_attention(q, k[:512], v[:512], scale)),
        dtyped(lambda q, k, v, scale: reference.vision_attention(q, v, k, scale)),
        dtyped(lambda q, k, v, scale: q * torch.nan),
    ],
    ids=["mean", "scale", "512 patches", "K and V swapped", "NaN"],
)
def test_a_device_that_sees_something_else_is_refused(vision_attention):
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(DeviceError, match="what it makes of an image"):
            self_check(SEEING, wrong(vision_attention=vision_attention), dtype)


def test_a_device_that_puts_images_nowhere_is_refused():
    """A tower that is right says nothing of what reads its features."""

    def without_images(compute):
        def run(params, caches, inputs):
            features = tuple(map(torch.zeros_like, inputs.features))
            return compute(params, caches, attrs.evolve(inputs, features=features))

        return run

    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(DeviceError, match="something else than the reference"):
            self_check(SEEING, wrong(compiled=without_images), dtype)


def test_the_largest_step_has_the_largest_image():
    seen = []

    def watched(q, k, v, scale):
        seen.append(len(q))
        return reference.vision_attention(q, k, v, scale)

    spec = attrs.evolve(
        SEEING, vision=attrs.evolve(TOWER, n_layers=1, hidden_size=64, deepstack_layers=())
    )
    params = random_params(spec, torch.float32, torch.Generator())
    largest = Image(
        patches=np.zeros((4 * 70, 1536), np.float32), n_rows=7, n_columns=10, digest=b""
    )
    run_largest(
        spec,
        limits(position_axes=3),
        wrong(vision_attention=watched),
        params,
        torch.float32,
        largest,
    )
    assert seen == [4 * 70]
