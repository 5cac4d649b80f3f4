"""Frequencies at the sizes of real models, against transformers'. Whole models are compared in
test_parity.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nva.models.hf_config import Config
from nva.models.read_rope import read_rope
from nva.models.rope import RopeSpec, rope_table

LONG = {
    "short_factor": [1.0 + i / 50 for i in range(64)],
    "long_factor": [1.0 + i for i in range(64)],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

ROPES = {
    "llama 3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "qwen 2.5": YARN,
    "deepseek": {
        **YARN,
        "factor": 40.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 4096,
    },
    "one of mscale": {**YARN, "mscale": 0.7},
    "no stretch": {**YARN, "factor": 1.0},
    "untruncated": {**YARN, "truncate": False, "beta_fast": 64.0},
    "narrow": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "phi 3": {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 4096},
    "phi 3, by factor": {
        "rope_type": "longrope",
        **LONG,
        "original_max_position_embeddings": 4096,
        "factor": 2.0,
    },
}


def read(config: dict[str, Any], head_dim: int) -> RopeSpec:
    return read_rope(Config(config), head_dim, "full_attention")


@pytest.mark.parametrize("max_model_len", [2048, 131072, 200_000])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_transformers(name: str, max_model_len: int) -> None:
    settings: dict[str, Any] = {**ROPES[name], "rope_theta": 1e6}
    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters=dict(settings),
    )
    expected, scale = ROPE_INIT_FUNCTIONS[settings["rope_type"]](
        config, torch.device("cpu"), seq_len=max_model_len
    )
    rope = read({"rope_parameters": settings, "max_position_embeddings": 131072}, 128)
    found, found_scale = rope.frequencies(max_model_len)
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
    assert found_scale == pytest.approx(scale)


def test_a_table_holds_the_cosine_and_sine_of_every_position() -> None:
    config = {"rope_theta": 100.0, "max_position_embeddings": 50}
    cos, sin = rope_table(read(config, 4), 50)
    angles = torch.arange(50.0, dtype=torch.float64)[:, None] * torch.tensor(
        [1.0, 0.1], dtype=torch.float64
    )
    torch.testing.assert_close(cos.double(), angles.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(sin.double(), angles.sin(), atol=1e-5, rtol=0)


def test_llama_3_1_at_positions_beyond_100_000() -> None:
    """Angles are the products of large numbers there, so a table rounded otherwise would differ by
    0.01."""
    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters={**ROPES["llama 3.1"], "rope_theta": 5e5},
    )
    positions = torch.arange(100_000, 131_072)
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    rope = read(config.to_dict(), 128)
    for found, theirs in zip(rope_table(rope, 131_072), expected, strict=True):
        torch.testing.assert_close(found[positions].repeat(1, 2), theirs[0], atol=1e-6, rtol=0)
