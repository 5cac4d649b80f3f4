"""A vision tower on the NPU's operators: one call's meaning, faults that must show, and the graph
it makes if compiled.

What the decoder makes of images is in test_meaning.py and test_graphs.py, with the models that see.
"""

from __future__ import annotations

import functools

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nva.kernels import reference
from nva.kernels.npu import graph, operators
from nva.models.vision import encode_patches, place_patches
from tests.npu import emulation, folds, lowering, models
from tests.npu.models import SEEING
from tests.npu.test_kernels import few, normal, same, seeds, sizes
from tests.npu.test_meaning import ATTENTION, TOLERANCE, Altered, compare, replace


@few
@given(seeds, st.integers(1, 70), sizes, st.sampled_from([4, 16, 64, 72, 128]))
def test_vision_attention(seed, n_patches, n_heads, head_dim):
    """Of heads that are a part of a wider product, as the tower's are."""
    q, k, v = normal(seed, n_patches, 3 * n_heads, head_dim).split(n_heads, dim=1)
    with emulation.fp32_arithmetic():
        out, expected = (
            kernels.vision_attention(q, k, v, 0.2) for kernels in (operators, reference)
        )
    same([out], [expected])


def altered_in_tower(**options):
    """The operator's call in the tower alone, which has no cache."""

    def alter(args, given):
        return args, given if "block_table" in given else {**given, **options}

    return lambda patch: patch.setattr(operators, "npu", Altered(ATTENTION, alter))


def in_tower(name, faulty):
    """A kernel that is another one where there are as many keys as queries, as only the tower has
    them."""
    whole = getattr(operators, name)

    def kernel(q, k, *rest):
        return (faulty if q.shape[1] == k.shape[1] else whole)(q, k, *rest)

    return lambda patch: replace(patch, **{name: kernel})


def altered_features(alter):
    """Another order of what the decoder gets."""

    def compiled(compute):
        def run(params, caches, inputs):
            return compute(params, caches, attrs.evolve(inputs, features=alter(inputs.features)))

        return run

    return lambda patch: replace(patch, compiled=compiled)


FAULTS = {
    "the scale left out": altered_in_tower(softmax_scale=1.0),
    "the scale of filled heads": altered_in_tower(softmax_scale=128**-0.5),
    "key lengths left out": altered_in_tower(actual_seq_kvlen=None),
    "as a cache's block size": altered_in_tower(block_size=128),
    "KV heads left out": altered_in_tower(num_key_value_heads=0),
    "heads not filled up": lambda patch: patch.setattr(
        operators, "filled_head_dim", lambda head_dim: head_dim
    ),
    "the mean of all patches": in_tower(
        "vision_attention", lambda q, k, v, scale: v.mean(0).expand_as(v)
    ),
    "K and V swapped": in_tower(
        "vision_attention", lambda q, k, v, scale: reference.vision_attention(q, v, k, scale)
    ),
    "DeepStack after the other layers": altered_features(
        lambda levels: (levels[0], *levels[:0:-1])
    ),
    "DeepStack one layer late": altered_features(
        lambda levels: (levels[0], 0 * levels[1], levels[1])
    ),
    "no DeepStack": altered_features(lambda levels: levels[:1]),
    "no rope": in_tower("rotary", lambda q, k, cos, sin: (q, k)),
    "the other way round in the rope": in_tower(
        "rotary", lambda q, k, cos, sin: reference.rotary(q, k, cos, -sin)
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_of_the_tower_are_caught(fault, monkeypatch):
    fault(monkeypatch)
    with emulation.fp32_arithmetic():
        try:
            deviation = compare(SEEING).deviation
        except emulation.LimitError:
            return
    assert deviation > 10 * TOLERANCE


SPEC = models.tiny_spec(SEEING)
HEIGHT_AND_WIDTH_SWAPPED = tuple((0, 2, 1)[axis] for axis in SPEC.rope_axes)
OTHER_SPECS = {
    "height and width swapped": attrs.evolve(SPEC, rope_axes=HEIGHT_AND_WIDTH_SWAPPED),
    "axes in a row": attrs.evolve(SPEC, rope_axes=tuple(sorted(SPEC.rope_axes))),
    "the other layer's projection": attrs.evolve(
        SPEC, vision=attrs.evolve(SPEC.vision, deepstack_layers=SPEC.vision.deepstack_layers[::-1])
    ),
}


@pytest.mark.parametrize("other", OTHER_SPECS.values(), ids=OTHER_SPECS)
def test_another_spec_is_caught(other):
    with emulation.fp32_arithmetic():
        assert compare(SEEING, tested_spec=other).deviation > 10 * TOLERANCE


TOWER = {
    "FusedInferAttentionScore": 2, "RotaryMul": 4, "LayerNormV4": 2 * 2 + 3, "Gelu": 2 + 3, "SplitV": 2 + 4,
    "MatMulV2": 1 + 2 * 4 + 3 * 2, "PadV3": 2 * 3, "StridedSliceV2": 2, "Identity": 2, "GatherV2": 4 + 8, "Pack": 1,
}  # fmt: skip
PLAIN = {"Add", "Cast", "Const", "Data", "Mul", "NetOutput", "Reshape", "Squeeze", "Unsqueeze"}
"""Two layers and three projections: heads are filled up and cut again, which copies them; three
levels are stacked."""


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 5e-4), (torch.bfloat16, 0.4)], ids=str
)
def test_a_tower_can_be_compiled(dtype, tolerance):
    """nva doesn't, but one may: it is one graph, of fused operators. Its gelus are all
    approximations."""
    picture, at = (
        folds.picture(SPEC, 6, 7, 0),
        place_patches(SPEC.vision, 6, 7, torch.device("cpu")),
    )
    patches = torch.tensor(picture.patches, dtype=dtype)
    params = [
        models.tiny_params(SPEC, kernels, dtype)["vision"]
        for kernels in (reference.KERNELS, operators.KERNELS)
    ]
    expected = encode_patches(SPEC.vision, reference.KERNELS, params[0], patches, at)
    with torch.inference_mode(), emulation.fp32_arithmetic(), lowering.caught() as found:
        out = graph.compiled_ge(functools.partial(encode_patches, SPEC.vision, operators.KERNELS))(
            params[1], patches, at
        )
    assert float((out - expected).abs().max() / expected.std()) < tolerance
    assert len(found) == 1
    assert {kind: found[0].counts[kind] for kind in TOWER} == TOWER
    assert found[0].counts.keys() == TOWER.keys() | PLAIN
