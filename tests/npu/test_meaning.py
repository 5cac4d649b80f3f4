"""Rung b: the forward over emulated operators gives the logits of the reference backend, and seeded
faults show."""

from __future__ import annotations

import attrs
import pytest
import torch

from nva.forward import make_forward
from nva.kernels.cpu.device import PLAIN
from nva.kernels.npu import operators
from nva.models import load_params, open_checkpoint
from tests.devices import mutated
from tests.npu import emulation, folds, here, models

TOLERANCE = 1e-4  # of the logits' standard deviation


def compare(name, dtype=torch.float32, tested_spec=None, **changes):
    """The run of a model on both sides; the tested one may be given another spec, whose weights are
    the same."""
    spec = models.tiny_spec(name)
    limits = folds.limits_for(spec, **changes)
    sides = [
        folds.Side(
            forward=make_forward(each, limits, device),
            params=models.tiny_params(spec, device.kernels, dtype),
        )
        for each, device in ((spec, PLAIN), (tested_spec or spec, here.EAGER))
    ]
    return folds.compare(spec, limits, *sides, folds.requests_for(spec), dtype)


def happened(report, spec):
    """How often everything happened that should in a run without preemption."""
    others = {"n_preempted"} if spec.vision else {"n_preempted", "n_images", "n_cut"}
    return attrs.asdict(
        report, filter=lambda field, _: field.name.startswith("n_") and field.name not in others
    )


@pytest.mark.parametrize("name", models.CONFIGS)
def test_logits_are_the_references(name):
    with emulation.fp32_arithmetic():
        report = compare(name)
    assert report.deviation < TOLERANCE
    counts = happened(report, models.tiny_spec(name))
    assert all(counts.values()), counts
    assert len(report.shapes) == 3


@pytest.mark.parametrize(
    "changes",
    [{"n_blocks": 3}, {"token_buckets": (), "row_buckets": ()}],
    ids=["tiny pool", "exact"],
)
def test_preemption_and_exact_shapes_too(changes):
    with emulation.fp32_arithmetic():
        report = compare("qwen3, heads wider than the model, tied", **changes)
    assert report.deviation < TOLERANCE
    assert (report.n_preempted > 0) == ("n_blocks" in changes)


def test_the_real_models_logits_are_the_references(demo_model):
    """SmolLM2: 30 layers, 9 heads on 3, a vocabulary of 49,152."""
    checkpoint = open_checkpoint(demo_model)
    limits = folds.limits_for(checkpoint.spec)
    sides = [
        folds.Side(
            forward=make_forward(checkpoint.spec, limits, device),
            params=load_params(checkpoint, torch.float32, kernels=device.kernels),
        )
        for device in (PLAIN, here.EAGER)
    ]
    with emulation.fp32_arithmetic():
        report = folds.compare(checkpoint.spec, limits, *sides, folds.requests_for(checkpoint.spec))
    assert report.deviation < TOLERANCE


ALL_ACTIVE = (
    "qwen3 moe, all experts active"  # where some are left out, rounding decides now and then which
)


@pytest.mark.parametrize("dtype", here.EAGER.dtypes)
@pytest.mark.parametrize("name", ["qwen2", ALL_ACTIVE, "gemma3", "minicpm4", models.SEEING])
def test_half_types_are_taken_as_they_are(name, dtype):
    """All limits on types hold, and rounding alone, a norm's in another order, tells the two
    apart."""
    assert compare(name, dtype).deviation < 0.4


def replace(patch, **functions):
    """The device with some of its functions, or of its kernels, replaced."""
    patch.setattr(here, "EAGER", mutated(here.EAGER, **functions))


class Altered:
    """torch.ops.npu, but for one operator that gets other arguments."""

    def __init__(self, name, alter):
        self.name, self.alter = name, alter

    def __getattr__(self, name):
        operator = getattr(torch.ops.npu, name)
        if name != self.name:
            return operator

        def call(*args, **options):
            args, options = self.alter(args, options)
            return operator(*args, **options)

        return call


def altered(name, **options):
    return lambda patch: patch.setattr(
        operators, "npu", Altered(name, lambda args, given: (args, {**given, **options}))
    )


ATTENTION = "npu_fused_infer_attention_score_v2"


def cumulative_context_lens(patch):
    def alter(args, options):
        lens = torch.tensor(options["actual_seq_kvlen"]).cumsum(0).tolist()
        return args, {**options, "actual_seq_kvlen": lens}

    patch.setattr(operators, "npu", Altered(ATTENTION, alter))


def query_lens_per_row(patch):
    def alter(args, options):
        ends = torch.tensor(options["actual_seq_qlen"])
        return args, {**options, "actual_seq_qlen": ends.diff(prepend=torch.tensor([0])).tolist()}

    patch.setattr(operators, "npu", Altered(ATTENTION, alter))


def keys_and_values_swapped(patch):
    alter = lambda args, options: ((args[0], args[2], args[1]), options)  # noqa: E731 - passed on at once
    patch.setattr(operators, "npu", Altered(ATTENTION, alter))


def mask_off_by_one(patch):
    patch.setattr(
        operators, "causal_mask", lambda _: torch.ones(2048, 2048, dtype=torch.bool).triu(0)
    )


def positions_as_heads_in_rotary(patch):
    """cos and sin broadcast over tokens instead of over heads."""

    def alter(args, options):
        return (args[0], *[x[:, :1].expand_as(args[1]) for x in args[1:]]), options

    patch.setattr(operators, "npu", Altered("npu_rotary_mul", alter))


def halves_swapped_in_rotary(patch):
    alter = lambda args, options: ((args[0], args[1], -args[2]), options)  # noqa: E731 - passed on at once
    patch.setattr(operators, "npu", Altered("npu_rotary_mul", alter))


def window_one_wider(patch):
    def alter(args, options):
        return args, {
            **options,
            **{name: n + 1 for name, n in options.items() if name == "pre_tokens"},
        }

    patch.setattr(operators, "npu", Altered(ATTENTION, alter))


def residual_is_the_norm(patch):
    whole = operators.add_rms_norm
    replace(patch, add_rms_norm=lambda *args, **options: (whole(*args, **options)[0],) * 2)


def slots_off_by_one(patch):
    alter = lambda args, options: ((args[0], args[1] + 1, args[2]), options)  # noqa: E731 - passed on at once
    patch.setattr(operators, "npu", Altered("npu_scatter_nd_update_", alter))


def another_epsilon(patch):
    alter = lambda args, options: ((*args[:2], 1e-2), options)  # noqa: E731 - passed on at once
    patch.setattr(operators, "npu", Altered("npu_rms_norm", alter))


def copies_left_out(patch):
    replace(patch, copy_blocks=lambda *_: None)


GROUPED = "npu_grouped_matmul"


def summed_counts(patch):
    alter = lambda args, options: (args, {**options, "group_list": options["group_list"].cumsum(0)})  # noqa: E731 - passed on at once
    patch.setattr(operators, "npu", Altered(GROUPED, alter))


def halves_swapped_in_experts(patch):
    """The gate is taken for what it gates."""

    def alter(args, options):
        x, (weight,) = args
        size = models.EXPERTS["moe_intermediate_size"]
        return (x, [weight.roll(size, 2) if weight.shape[2] == 2 * size else weight]), options

    patch.setattr(operators, "npu", Altered(GROUPED, alter))


def experts_shifted(patch):
    alter = lambda args, options: ((args[0], [args[1][0].roll(1, 0)]), options)  # noqa: E731 - passed on at once
    patch.setattr(operators, "npu", Altered(GROUPED, alter))


def normalized(is_normalized):
    """Weights of experts that are normalized, or aren't, whatever the model says."""
    with_weights = operators.moe

    def moe(x, logits, gate_up, down, n_active, normalize, is_padding):
        return with_weights(x, logits, gate_up, down, n_active, is_normalized, is_padding)

    return lambda patch: replace(patch, moe=moe)


def unit_offset_left_out(patch):
    replace(patch, pack_norm=lambda weight, unit_offset: weight)


WINDOWED, MOE = "mistral, a window of 100", "qwen3 moe, the first layer dense"
FAULTS = {
    "cumulative KV lengths": (cumulative_context_lens, WINDOWED),
    "query lengths per row": (query_lens_per_row, WINDOWED),
    "K and V swapped": (keys_and_values_swapped, "llama"),
    "mask off by one": (mask_off_by_one, "llama"),
    "cos and sin along the heads": (positions_as_heads_in_rotary, "llama"),
    "the other way round in rotary": (halves_swapped_in_rotary, "llama"),
    "neighbours instead of halves in rotary": (
        altered("npu_rotary_mul", rotary_mode="interleave"),
        "llama",
    ),
    "no causality": (altered(ATTENTION, sparse_mode=0, atten_mask=None), "llama"),
    "the window left out": (altered(ATTENTION, sparse_mode=3), WINDOWED),
    "a window one wider": (window_one_wider, WINDOWED),
    "the scale left out": (altered(ATTENTION, softmax_scale=1.0), "llama"),
    "KV heads left out": (altered(ATTENTION, num_key_value_heads=0), "llama"),
    "another block size": (altered(ATTENTION, block_size=16), "llama"),
    "the norm as the residual": (residual_is_the_norm, "llama"),
    "slots off by one": (slots_off_by_one, "llama"),
    "block copies left out": (copies_left_out, "llama"),
    "another epsilon": (another_epsilon, "llama"),
    "a unit offset left out": (unit_offset_left_out, "gemma3"),
    "the wrong half activated": (altered("npu_geglu", activate_left=False), "gemma3"),
    "running sums for counts": (summed_counts, MOE),
    "counts taken for running sums": (altered(GROUPED, group_list_type=0), MOE),
    "the halves of gate and up swapped": (halves_swapped_in_experts, MOE),
    "another expert's weights": (experts_shifted, MOE),
    "experts' weights not normalized": (normalized(False), MOE),
    "experts' weights normalized": (normalized(True), "qwen2 moe"),
    "places in the other order": (altered("npu_moe_finalize_routing", drop_pad_mode=0), MOE),
    "the last expert left out": (
        altered("npu_moe_init_routing_v2", active_expert_range=[0, 5]),
        MOE,
    ),
    "no room for padding": (altered("npu_moe_init_routing_v2", expert_num=6), "qwen2 moe"),
}


@pytest.mark.parametrize(("fault", "name"), FAULTS.values(), ids=FAULTS)
def test_faults_are_caught(fault, name, monkeypatch):
    fault(monkeypatch)
    with emulation.fp32_arithmetic():
        try:
            deviation = compare(name).deviation
        except emulation.LimitError:
            return
    assert deviation > 10 * TOLERANCE
