"""Seeded faults: each must make the parity check of test_parity.py fail, or that check proves
nothing."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from nva.kernels import reference
from nva.kernels.cpu.device import PLAIN
from nva.models import rope
from tests.checkpoints import CASES
from tests.devices import mutated
from tests.models.parity import TOLERANCE, Subject, deviation, subject

CHUNKS = (1, 5, 36)
REFUSED = 10 * TOLERANCE  # far above: rounding can't be what was caught


@pytest.fixture
def build(tmp_path):
    """A function that builds a case and asserts that it agrees as long as nothing is wrong."""

    def checked(name: str) -> Subject:
        sound = subject(CASES[name], tmp_path)
        assert max(deviation(sound, chunk) for chunk in CHUNKS) < TOLERANCE
        return sound

    return checked


def assert_caught(faulty: Subject, chunks: tuple[int, ...] = CHUNKS) -> None:
    deviations = [deviation(faulty, chunk) for chunk in chunks]
    assert min(deviations) > REFUSED, deviations


def test_softmax_scale_off_by_5_percent(build) -> None:
    sound = build("llama")
    assert_caught(
        attrs.evolve(sound, spec=attrs.evolve(sound.spec, attn_scale=1.05 * sound.spec.attn_scale))
    )


@pytest.mark.parametrize(
    ("case", "other"),
    [
        ("llama", "linear"),
        ("llama-linear", "default"),
        ("llama-llama3", "default"),
        ("llama-yarn", "linear"),
    ]
    + [("llama-dynamic", "default"), ("qwen2-longrope", "default"), ("qwen2-llama3", "yarn")],
)
def test_rope_kind_swapped(build, case: str, other: str) -> None:
    sound = build(case)
    ropes = tuple(as_kind(spec, other) for spec in sound.spec.ropes)
    assert_caught(attrs.evolve(sound, spec=attrs.evolve(sound.spec, ropes=ropes)))


def as_kind(spec: rope.RopeSpec, kind: str) -> rope.RopeSpec:
    """A rope of another kind, with the settings that both have, and a factor of at least 2."""
    fields = attrs.fields_dict(rope.KINDS[kind])
    settings = attrs.asdict(spec)
    settings["factor"] = max(2.0, settings.get("factor") or 0.0)
    return rope.KINDS[kind](**{name: settings[name] for name in fields if name in settings})


@pytest.mark.parametrize("case", ["llama-yarn", "qwen2-longrope"])
def test_rope_attention_factor_left_out(build, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = build(case)
    kind = type(sound.spec.ropes[0])
    frequencies = kind.frequencies
    monkeypatch.setattr(kind, "frequencies", lambda *args: (frequencies(*args)[0], 1.0))
    assert_caught(sound)


@pytest.mark.parametrize("error", [-1, 1])
@pytest.mark.parametrize("case", ["mistral", "qwen2-yarn", "qwen3-layers"])
def test_window_off_by_one(build, case: str, error: int) -> None:
    sound = build(case)
    windows = tuple(window and window + error for window in sound.spec.windows)
    assert_caught(attrs.evolve(sound, spec=attrs.evolve(sound.spec, windows=windows)))


def test_window_on_the_wrong_layers(build) -> None:
    sound = build("qwen3-layers")
    assert_caught(
        attrs.evolve(sound, spec=attrs.evolve(sound.spec, windows=sound.spec.windows[::-1]))
    )


def test_query_and_key_norm_left_out(build) -> None:
    sound = build("qwen3")
    assert_caught(attrs.evolve(sound, spec=attrs.evolve(sound.spec, qk_norm=False)))


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_weight_of_a_head_norm_left_out(build, norm: str) -> None:
    sound = build("qwen3")
    layers = [{**layer, norm: torch.ones_like(layer[norm])} for layer in sound.params["layers"]]
    assert_caught(attrs.evolve(sound, params={**sound.params, "layers": layers}))


@pytest.mark.parametrize(
    ("case", "bias"),
    [("qwen2", "qkv_bias"), ("llama-llama3", "qkv_bias"), ("llama-llama3", "o_bias")]
    + [("llama-yarn", "gate_up_bias"), ("llama-yarn", "down_bias"), ("qwen3-linear", "o_bias")],
)
def test_bias_left_out(build, case: str, bias: str) -> None:
    sound = build(case)
    layers = [
        {name: value for name, value in layer.items() if name != bias}
        for layer in sound.params["layers"]
    ]
    assert_caught(attrs.evolve(sound, params={**sound.params, "layers": layers}))


def test_mask_shifted_by_one_hides_the_query_itself(build, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, visible = build("llama"), reference._visible

    def shifted(n_padding: Tensor, n_queries: int, n_columns: int, window: int | None) -> Tensor:
        mask = visible(n_padding, n_queries, n_columns, window)
        is_alone = (
            mask.sum(-1, keepdim=True) == 1
        )  # the first token keeps itself: a softmax over nothing is NaN
        return mask & (~diagonal(n_queries, n_columns, 0) | is_alone)

    monkeypatch.setattr(reference, "_visible", shifted)
    assert_caught(sound)


def test_mask_shifted_by_one_shows_the_next_token(build, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, visible = build("llama"), reference._visible

    def shifted(n_padding: Tensor, n_queries: int, n_columns: int, window: int | None) -> Tensor:
        return visible(n_padding, n_queries, n_columns, window) | diagonal(n_queries, n_columns, 1)

    monkeypatch.setattr(reference, "_visible", shifted)
    assert_caught(sound, chunks=(5, 36))  # one token at a time, there is no next one


def diagonal(n_queries: int, n_columns: int, shift: int) -> Tensor:
    """[S, C] bool: each query's own column, or one beside it."""
    own = n_columns - n_queries + shift
    return torch.ones(n_queries, n_columns, dtype=torch.bool).tril(own).triu(own)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_key_value_heads_grouped_wrongly(build, case: str) -> None:
    """Query head h reads key-value head h % Nk instead of h // (Nq / Nk)."""
    sound = build(case)
    order = torch.arange(sound.spec.n_heads).view(-1, sound.spec.n_kv_heads).T.flatten()

    def interleaved(q: Tensor, *args, **options) -> Tensor:
        return reference.attention(q[:, order], *args, **options)[:, order.argsort()]

    assert_caught(attrs.evolve(sound, device=mutated(PLAIN, attention=interleaved)))


def test_keys_cached_before_the_rope(build) -> None:
    sound = build("llama")

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return reference.rotary(q, k, cos, sin)[0], k

    assert_caught(attrs.evolve(sound, device=mutated(PLAIN, rotary=rotary)))


def test_gate_and_up_swapped(build) -> None:
    sound = build("llama")

    def silu_mul(x: Tensor) -> Tensor:
        return reference.silu_mul(torch.cat(x.chunk(2, -1)[::-1], -1))

    assert_caught(attrs.evolve(sound, device=mutated(PLAIN, silu_mul=silu_mul)))


def with_experts(sound: Subject, **changed: Any) -> Subject:
    experts = tuple(spec and attrs.evolve(spec, **changed) for spec in sound.spec.experts)
    return attrs.evolve(sound, spec=attrs.evolve(sound.spec, experts=experts))


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3_moe-fused", "qwen2_moe"])
def test_weights_of_experts_normalized_or_not(build, case: str) -> None:
    sound = build(case)
    assert_caught(with_experts(sound, normalize=not sound.spec.experts[0].normalize))


@pytest.mark.parametrize("error", [-1, 1])
def test_one_expert_more_or_less(build, error: int) -> None:
    sound = build("qwen3_moe")
    assert_caught(with_experts(sound, n_active=3 + error))


def test_shared_expert_left_out(build) -> None:
    assert_caught(with_experts(build("qwen2_moe"), shared_size=0))


@pytest.mark.parametrize("name", ["shared_gate", "router"])
def test_gate_of_experts_left_out(build, name: str) -> None:
    sound = build("qwen2_moe")
    layers = [{**layer, name: torch.zeros_like(layer[name])} for layer in sound.params["layers"]]
    assert_caught(attrs.evolve(sound, params={**sound.params, "layers": layers}))


@pytest.mark.parametrize("name", ["experts_gate_up", "experts_down"])
def test_experts_in_another_order(build, name: str) -> None:
    sound = build("qwen3_moe")
    layers = [{**layer, name: layer[name].flip(0)} for layer in sound.params["layers"]]
    assert_caught(attrs.evolve(sound, params={**sound.params, "layers": layers}))


def test_tokens_put_back_in_another_order(build) -> None:
    def moe(x: Tensor, *args: Any) -> Tensor:
        return reference.moe(x, *args).roll(1, 0)

    sound = build("qwen3_moe")
    assert_caught(attrs.evolve(sound, device=mutated(PLAIN, moe=moe)), chunks=(5, 36))


@pytest.mark.parametrize(
    "changed",
    [
        {"unit_offset": False},
        {"embed_scale": 1.0},
        {"activation": "silu"},
        {"attn_scale": 10**-0.5},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_gemma_switch_left_out(build, changed: dict[str, Any]) -> None:
    sound = build("gemma3")
    assert_caught(attrs.evolve(sound, spec=attrs.evolve(sound.spec, **changed)))


@pytest.mark.parametrize("norm", ["attention_out_norm", "mlp_out_norm"])
def test_norm_of_what_is_added_left_out(build, norm: str) -> None:
    sound = build("gemma3")
    layers = [
        {name: value for name, value in layer.items() if name != norm}
        for layer in sound.params["layers"]
    ]
    assert_caught(attrs.evolve(sound, params={**sound.params, "layers": layers}))


def test_ropes_of_gemma_swapped(build) -> None:
    sound = build("gemma3-layers")
    assert_caught(
        attrs.evolve(sound, spec=attrs.evolve(sound.spec, rope_ids=sound.spec.rope_ids[::-1]))
    )
