"""What the families read from a config.json, what they refuse, and what is claimed of them."""

from __future__ import annotations

from typing import Any

import pytest

from nva.models import FAMILIES, ModelSpec
from nva.models.registry import EMULATED, LOGITS, VERIFIED, read_model
from nva.models.rope import Linear, RopeSpec, Yarn
from nva.models.spec import ExpertSpec
from tests import checkpoints
from tests.checkpoints import SIZES
from tests.npu.models import CONFIGS

BASE = {**SIZES, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "head_dim": 8, "sliding_window": None}
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 5, "rope_local_base_freq": 100.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}


def spec(family: str = "Llama", **config: Any) -> ModelSpec:
    return read_model({"architectures": [f"{family}ForCausalLM"], **BASE, **config})[0]


def refuses(message: str, family: str = "Llama", without: str = "", **config: Any) -> None:
    given = {"architectures": [f"{family}ForCausalLM"], **BASE, **config}
    given.pop(without, None)
    with pytest.raises(ValueError, match=message):
        read_model(given)


def test_an_unknown_architecture_lists_those_known() -> None:
    refuses(
        r"\['OtherForCausalLM'\]; known are .*LlamaForCausalLM, .*@nva\.models\.register", "Other"
    )
    refuses(
        r"\(its own code, named in auto_map, is never run\)", "Other", auto_map={"AutoModel": "x.y"}
    )


@pytest.mark.parametrize(
    "method", ["fp8", "awq", "gptq", "compressed-tensors", "bitsandbytes", "mxfp4"]
)
def test_quantized_weights_are_refused_by_name(method: str) -> None:
    settings = {"quant_method": method, "bits": 4}
    refuses(
        rf"quantized \(quantization_config: {method}\), .* take an unquantized one",
        quantization_config=settings,
    )


def test_quantized_weights_without_a_name_are_refused() -> None:
    refuses(r"quantized \(quantization_config: unnamed\)", quantization_config="w8a8")
    refuses(r"quantized \(compression_config: unnamed\)", compression_config={"format": "int8"})


def test_an_unknown_activation_is_refused() -> None:
    assert spec(hidden_act="swish") == spec(hidden_act="silu")
    assert spec(hidden_act="gelu_pytorch_tanh").activation == "gelu_tanh"
    refuses(
        "hidden_act = 'gelu'; it must be one of silu, swish, gelu_pytorch_tanh",
        hidden_act="gelu",
    )
    refuses(
        "hidden_act = .* silu or swish, since experts have silu gates",
        "Qwen3Moe",
        hidden_act="gelu_pytorch_tanh",
        **MOE,
    )


def test_settings_that_change_attention_and_are_not_implemented_are_refused() -> None:
    assert spec(rope_interleaved=False) == spec()
    refuses("sets rope_interleaved to True, which nva doesn't implement", rope_interleaved=True)
    refuses("sets query_pre_attn_scalar", query_pre_attn_scalar=256)
    refuses("sets use_bidirectional_attention", "Gemma3", use_bidirectional_attention=True, **GEMMA)
    refuses("sets final_logit_softcapping", "Gemma3", final_logit_softcapping=30.0, **GEMMA)
    refuses(
        "sets dual_chunk_attention_config",
        "Qwen2",
        dual_chunk_attention_config={"chunk_size": 262144},
    )


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps"])
def test_a_missing_setting_is_named(name: str) -> None:
    refuses(f"config.json has no '{name}', which LlamaForCausalLM needs", without=name)


def test_sizes_that_make_no_model_are_refused() -> None:
    refuses("num_hidden_layers = '2'; it must be a whole number", num_hidden_layers="2")
    refuses("num_attention_heads = 0", num_attention_heads=0)
    refuses("6 query heads can't share 4 key-value heads evenly", num_key_value_heads=4)
    refuses("vocab_size = -3; it must be a whole number of at least 1", vocab_size=-3)
    refuses("rms_norm_eps = nan; it must be a finite number above 0", rms_norm_eps=float("nan"))
    refuses("the rope turns 7 numbers of each head; it takes an even number", head_dim=7)


def test_defaults_are_the_families() -> None:
    llama = spec()
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.tied_head, llama.qk_norm) == (
        False,
    ) * 5
    assert spec(head_dim=None).head_dim == 48 // 6
    assert spec(num_key_value_heads=None).n_kv_heads == 6
    biased = spec(attention_bias=True)
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, False)
    qwen2 = spec("Qwen2")
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = spec("Qwen3")
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (False, False, True)
    refuses("no 'head_dim', which Qwen3ForCausalLM needs", "Qwen3", without="head_dim")


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_windows_of_qwen(family: str) -> None:
    given = {"sliding_window": 7, "max_window_layers": 1}
    assert spec(family, **given).windows == (None, None)
    assert spec(family, **given, use_sliding_window=True).windows == (None, 7)
    kinds = ["sliding_attention", "full_attention"]
    assert spec(family, **given, use_sliding_window=True, layer_types=kinds).windows == (7, None)
    refuses(
        "has sliding_attention in layer_types, but config.json sets no sliding window",
        family,
        **given,
        layer_types=kinds,
    )
    refuses(
        "attention kinds linear_attention are not known",
        family,
        layer_types=["linear_attention"] * 2,
    )
    refuses(
        "has 1 layer_types for num_hidden_layers = 2 layers", family, layer_types=["full_attention"]
    )


def test_windows_of_llama_and_mistral() -> None:
    assert spec("Mistral", sliding_window=5).windows == (5, 5)
    assert spec("Mistral").windows == (None, None)
    refuses(
        "no 'sliding_window', which MistralForCausalLM needs", "Mistral", without="sliding_window"
    )
    refuses("sliding_window = 5; it must be null, since LlamaForCausalLM", sliding_window=5)
    refuses("sliding_window = -4; it must be a whole", "Mistral", sliding_window=-4)


def test_layers_and_scales_of_gemma() -> None:
    gemma = spec("Gemma3", num_hidden_layers=13, **GEMMA)
    assert [i for i, window in enumerate(gemma.windows) if window is None] == [5, 11]
    assert [gemma.ropes[i].theta for i in gemma.rope_ids[4:7]] == [100.0, 1e4, 100.0]
    assert (gemma.tied_head, gemma.qk_norm, gemma.out_norms, gemma.unit_offset) == (True,) * 4
    assert (gemma.attn_scale, gemma.embed_scale) == (16**-0.5, 48**0.5)
    halves = spec("Gemma3", num_hidden_layers=4, **GEMMA, sliding_window_pattern=2)
    assert halves.windows == (5, None, 5, None)
    scaled = spec(
        "Gemma3", num_hidden_layers=6, rope_scaling={"rope_type": "linear", "factor": 8.0}, **GEMMA
    )
    assert [type(rope) for rope in scaled.ropes] == [RopeSpec, Linear]
    for name in ("query_pre_attn_scalar", "sliding_window", "head_dim", "rope_local_base_freq"):
        refuses(f"no '{name}', which Gemma3ForCausalLM needs", "Gemma3", without=name, **GEMMA)


MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
SHARED = {**MOE, "shared_expert_intermediate_size": 12}


def test_experts_of_qwen() -> None:
    qwen3 = spec("Qwen3Moe", **MOE)
    assert (qwen3.qk_norm, qwen3.qkv_bias) == (True, False)
    assert qwen3.experts[0] == ExpertSpec(
        n_experts=4, n_active=2, intermediate_size=8, normalize=True
    )
    qwen2 = spec("Qwen2Moe", **SHARED)
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.experts[0].shared_size) == (False, True, 12)
    where = [
        [
            bool(experts)
            for experts in spec("Qwen3Moe", **MOE, num_hidden_layers=4, **config).experts
        ]
        for config in ({}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 3]})
    ]
    assert where == [[True] * 4, [False, True, False, True], [False, True, True, False]]
    refuses(
        "no 'norm_topk_prob', which Qwen3MoeForCausalLM needs", "Qwen3Moe", "norm_topk_prob", **MOE
    )
    refuses("no 'num_experts', which Qwen3MoeForCausalLM needs", "Qwen3Moe", "num_experts", **MOE)
    refuses(
        "num_experts_per_tok = 5; it must be a whole number of at most 4",
        "Qwen3Moe",
        **{**MOE, "num_experts_per_tok": 5},
    )
    refuses(
        "decoder_sparse_step = 0; it must be a whole number",
        "Qwen3Moe",
        **MOE,
        decoder_sparse_step=0,
    )


def test_windows_of_qwen_with_experts() -> None:
    given = {**SHARED, "sliding_window": 7, "max_window_layers": 1}
    without = {**MOE, "sliding_window": 7, "max_window_layers": 1}
    assert spec("Qwen3Moe", **without).windows == spec("Qwen2Moe", **given).windows == (None, None)
    assert spec("Qwen3Moe", **without, use_sliding_window=True).windows == (7, 7)
    kinds = ["sliding_attention", "full_attention"]
    assert spec("Qwen2Moe", **given, use_sliding_window=True, layer_types=kinds).windows == (
        7,
        None,
    )
    refuses(
        "use_sliding_window = True; it must be false, since layer_types isn't given",
        "Qwen2Moe",
        **given,
        use_sliding_window=True,
    )


def test_ropes_are_read_in_every_spelling() -> None:
    flat = spec(rope_scaling=YARN)
    assert isinstance(flat.ropes[0], Yarn)
    assert spec(rope_scaling={**YARN, "rope_type": "yarn", "beta_fast": None}) == flat
    new = {**YARN, "rope_theta": 1e4, "rope_type": "yarn"}
    assert spec(rope_theta=None, rope_parameters=new) == flat
    window = {"sliding_window": 7, "max_window_layers": 1, "use_sliding_window": True}
    nested = {
        "full_attention": new,
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    ropes = spec("Qwen3", rope_theta=None, rope_parameters=nested, **window).ropes
    assert [(type(rope), rope.theta) for rope in ropes] == [(Yarn, 1e4), (RopeSpec, 100.0)]
    assert spec("Qwen3", rope_theta=None, rope_parameters=nested, **window).rope_ids == (0, 1)
    assert flat.rope_ids == (0, 0)


def test_ropes_that_are_not_understood_are_refused() -> None:
    refuses(
        "rope type 'su' is not known; known are default, linear",
        rope_scaling={"type": "su", "factor": 2.0},
    )
    refuses(
        "rope type 'default' needs rope_theta, which config.json doesn't give",
        "Qwen3",
        without="rope_theta",
    )
    refuses("rope type 'linear' needs factor", rope_scaling={"type": "linear"})
    refuses(
        "rope type 'linear' has no setting beta_fast",
        rope_scaling={"type": "linear", "factor": 2.0, "beta_fast": 1},
    )
    refuses("factor is -1.0; give a finite number", rope_scaling={"type": "linear", "factor": -1.0})
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 3}
    refuses(
        r"have \(4, 3\) numbers; for .* = 8, each takes 4",
        rope_scaling={"type": "longrope", **factors},
    )


def test_ropes_that_turn_part_of_a_head() -> None:
    assert spec(partial_rotary_factor=0.5).ropes[0].dim == 4
    assert (
        spec(rope_theta=None, rope_parameters={"rope_theta": 1.0, "partial_rotary_factor": 0.25})
        .ropes[0]
        .dim
        == 2
    )


def test_how_far_ropes_reach() -> None:
    assert spec().reach == spec().max_position == 24
    assert spec(rope_scaling=YARN).reach == 48
    assert spec(rope_scaling={"type": "dynamic", "factor": 3.0}).reach == 72
    assert (
        spec(rope_scaling={"type": "linear", "factor": 3.0}).reach == 24
    )  # configs state the stretched length


def test_what_is_claimed_of_a_family_is_tested() -> None:
    assert VERIFIED.keys() == FAMILIES.keys()
    compared = {model.__name__ for _, model in checkpoints.FAMILIES.values()}
    compared |= {
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }  # in test_qwen3_vl.py
    assert {name for name, claims in VERIFIED.items() if LOGITS in claims} == compared
    assert {case.family for case in checkpoints.CASES.values()} == set(checkpoints.FAMILIES)
    emulated = {architecture for architecture, _ in CONFIGS.values()}
    assert {name for name, claims in VERIFIED.items() if EMULATED in claims} == emulated
