"""MiniCPM against its published architecture (Hu et al. 2024; MiniCPM4 adds LongRoPE), stated here
in plain torch.

transformers has no MiniCPM, and the checkpoints' own code is never run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from nva.models import load_checkpoint, open_checkpoint
from tests.checkpoints import MAX_MODEL_LEN, SIZES
from tests.models.parity import LIMITS, TOLERANCE, Subject, deviation

SHORT, LONG = [1.0, 1.3, 1.6, 1.9], [2.0, 2.7, 3.4, 4.1]
CONFIG: dict[str, Any] = {
    **SIZES,
    "architectures": ["MiniCPMForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"},
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "torch_dtype": "float32",
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 16,
}


def longrope(original: int) -> dict[str, Any]:
    scaling = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
    return {"rope_scaling": {**scaling, "original_max_position_embeddings": original}}


VARIANTS = {
    "MiniCPM": {},
    "MiniCPM4, long": longrope(20),
    "MiniCPM4, short": longrope(MAX_MODEL_LEN),
    "untied, with biases": {"tie_word_embeddings": False, "attention_bias": True},
}


def random_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Weights by the names of the checkpoints, std 0.2, norms around 1."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, mean: float = 0.0) -> Tensor:
        return mean + 0.2 * torch.randn(shape, generator=generator)

    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = hidden // config["num_attention_heads"]
    rows = {
        "q": hidden,
        "k": config["num_key_value_heads"] * head_dim,
        "v": config["num_key_value_heads"] * head_dim,
    }
    weights = {
        "model.embed_tokens.weight": normal(vocab, hidden),
        "model.norm.weight": normal(hidden, mean=1),
    }
    if not config.get("tie_word_embeddings", True):
        weights["lm_head.weight"] = normal(vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}{name}_layernorm.weight": normal(hidden, mean=1)
            for name in ("input", "post_attention")
        }
        for name, n in {**rows, "o": hidden}.items():
            weights[f"{at}self_attn.{name}_proj.weight"] = normal(n, hidden)
            if config.get("attention_bias"):
                weights[f"{at}self_attn.{name}_proj.bias"] = normal(n)
        weights |= {f"{at}mlp.{name}_proj.weight": normal(inner, hidden) for name in ("gate", "up")}
        weights[f"{at}mlp.down_proj.weight"] = normal(hidden, inner)
    return weights


def minicpm(
    config: dict[str, Any], weights: dict[str, Tensor], token_ids: Tensor, max_len: int
) -> Tensor:
    """Logits [T, V] of a whole prompt, the architecture line by line."""
    n_layers, n_heads, n_kv_heads = (
        config[name] for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    )
    depth_scale = config["scale_depth"] / math.sqrt(n_layers)
    x = weights["model.embed_tokens.weight"][token_ids] * config["scale_emb"]

    def norm(x: Tensor, name: str) -> Tensor:
        return (
            x
            / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()
            * weights[f"{name}.weight"]
        )

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def heads(x: Tensor, name: str, n: int) -> Tensor:
        return linear(x, name).view(len(x), n, -1).transpose(0, 1)

    for layer in range(n_layers):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm")
        q = rope(config, heads(h, f"{at}.self_attn.q_proj", n_heads), max_len)
        k = rope(config, heads(h, f"{at}.self_attn.k_proj", n_kv_heads), max_len)
        v = heads(h, f"{at}.self_attn.v_proj", n_kv_heads)
        k, v = (tensor.repeat_interleave(n_heads // n_kv_heads, 0) for tensor in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + depth_scale * linear(attended, f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm")
        gated = silu(linear(h, f"{at}.mlp.gate_proj")) * linear(h, f"{at}.mlp.up_proj")
        x = x + depth_scale * linear(gated, f"{at}.mlp.down_proj")
    x = norm(x, "model.norm") / (config["hidden_size"] / config["dim_model_base"])
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def rope(config: dict[str, Any], x: Tensor, max_len: int) -> Tensor:
    """x [N, T, D] turned by position. LongRoPE slows each pair down by a factor and stretches all
    for the length."""
    _, n_tokens, dim = x.shape
    frequencies = config["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
    stretch, scaling = 1.0, config.get("rope_scaling")
    if scaling:
        original = scaling["original_max_position_embeddings"]
        frequencies /= torch.tensor(LONG if max_len > original else SHORT).double()
        stretch = math.sqrt(
            1 + math.log(config["max_position_embeddings"] / original) / math.log(original)
        )
    angles = torch.arange(n_tokens).double()[:, None] * frequencies
    cos, sin = (stretch * turn.float().repeat(1, 2) for turn in (angles.cos(), angles.sin()))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def written(folder: Path, **changed: Any) -> Subject:
    """A checkpoint as the hub has them, loaded by us, beside the logits that the architecture
    gives."""
    config = {**CONFIG, **changed}
    weights = random_weights(config)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    checkpoint, params = load_checkpoint(folder)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, LIMITS.vocab_size, length) for length in (MAX_MODEL_LEN, 19, 1, 27)]
    expected = [minicpm(config, weights, torch.from_numpy(row), MAX_MODEL_LEN) for row in rows]
    return Subject(spec=checkpoint.spec, params=params, limits=LIMITS, rows=rows, expected=expected)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_the_architectures(variant: dict[str, Any], tmp_path: Path) -> None:
    subject = written(tmp_path, **variant)
    deviations = {chunk: deviation(subject, chunk) for chunk in (1, 2, 7, MAX_MODEL_LEN)}
    assert max(deviations.values()) < TOLERANCE, deviations


@pytest.mark.parametrize("scale", ["embed_scale", "residual_scale", "logit_scale"])
def test_a_scale_left_out_is_caught(scale: str, tmp_path: Path) -> None:
    sound = written(tmp_path)
    faulty = attrs.evolve(sound, spec=attrs.evolve(sound.spec, **{scale: 1.0}))
    assert deviation(faulty, 7) > 10 * TOLERANCE


def test_what_a_config_may_leave_out(tmp_path: Path) -> None:
    given = {
        name: value for name, value in CONFIG.items() if name not in ("rope_theta", "rms_norm_eps")
    }
    (tmp_path / "config.json").write_text(json.dumps(given))
    spec = open_checkpoint(tmp_path).spec
    assert (spec.ropes[0].theta, spec.norm_eps, spec.tied_head) == (1e4, 1e-6, True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"sparse_config": {"kernel_size": 32}},
            "sets sparse_config.*remove it from config.json for dense attention",
        ),
        ({"num_experts": 8}, "sets num_experts.*take a dense MiniCPM"),
        ({"dim_model_base": 0}, "dim_model_base = 0; it must be a whole number"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path)
