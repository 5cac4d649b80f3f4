"""Qwen3-VL: the text model of Qwen3 or Qwen3-MoE, a vision tower beside it, positions in time,
height and width.

Read next: vision.py, the tower; state/media.py, the positions.
"""

from __future__ import annotations

from typing import Any

import attrs

from nva.models.hf_config import Config, read_experts, read_spec, required, size
from nva.models.llama import LLAMA_WEIGHTS
from nva.models.params import Weights
from nva.models.registry import EMULATED, LOGITS, register
from nva.models.spec import ModelSpec, VisionSpec

_TOWER, _LAYER = "model.visual.", "model.visual.blocks.{layer}."


def _both(name: str, tensor: str) -> dict[str, tuple[str, ...]]:
    """The names of a weight and its bias."""
    return {name: (f"{tensor}.weight",), f"{name}_bias": (f"{tensor}.bias",)}


def _merger(name: str, tensor: str) -> dict[str, tuple[str, ...]]:
    """The names of the weights that make features of patches."""
    linears = {
        **_both(f"{name}_fc1", f"{tensor}.linear_fc1"),
        **_both(f"{name}_fc2", f"{tensor}.linear_fc2"),
    }
    return {**_both(f"{name}_norm", f"{tensor}.norm"), **linears}


def _of_text(tensor: str) -> str:
    return tensor.replace("model.", "model.language_model.")


QWEN3_VL_WEIGHTS = Weights(
    names={
        **{name: tuple(map(_of_text, tensors)) for name, tensors in LLAMA_WEIGHTS.names.items()},
        **_both("patch", f"{_TOWER}patch_embed.proj"),
        "grid": (f"{_TOWER}pos_embed.weight",),
        **_both("vision_input_norm", f"{_LAYER}norm1"),
        **_both("vision_qkv", f"{_LAYER}attn.qkv"),
        **_both("vision_o", f"{_LAYER}attn.proj"),
        **_both("vision_post_norm", f"{_LAYER}norm2"),
        **_both("fc1", f"{_LAYER}mlp.linear_fc1"),
        **_both("fc2", f"{_LAYER}mlp.linear_fc2"),
        **_merger("merger", f"{_TOWER}merger"),
        **_merger("deepstack", f"{_TOWER}deepstack_merger_list.{{layer}}"),
    },
    fused={name: _of_text(tensor) for name, tensor in LLAMA_WEIGHTS.fused.items()},
    is_transposed=True,
)


@register("Qwen3VLForConditionalGeneration", verified=[LOGITS, EMULATED])
def qwen3_vl(config: Config) -> tuple[ModelSpec, Weights]:
    """The settings of the text model and of the tower stand in configs of their own."""
    return _with_tower(config, config.part("text_config")), QWEN3_VL_WEIGHTS


@register("Qwen3VLMoeForConditionalGeneration", verified=[LOGITS, EMULATED])
def qwen3_vl_moe(config: Config) -> tuple[ModelSpec, Weights]:
    """The weights of a token's experts always sum to 1."""
    text = config.part("text_config") | {"norm_topk_prob": True}
    return _with_tower(config, text, experts=read_experts(text)), QWEN3_VL_WEIGHTS


def _with_tower(config: Config, text: Config, **differences: Any) -> ModelSpec:
    config.pass_over(
        "video_token_id", "vision_start_token_id", "vision_end_token_id"
    )  # the tokenizer's affair
    text, axes = _without_axes(text | {"architectures": config.get("architectures")})
    head_dim, bias = required(text, "head_dim"), text.get("attention_bias", False)
    tied = config.get("tie_word_embeddings", False)
    spec = read_spec(
        text,
        qk_norm=True,
        head_dim=head_dim,
        qkv_bias=bias,
        o_bias=bias,
        tied_head=tied,
        **differences,
    )
    vision = _vision(config.part("vision_config"), size(config, "image_token_id"))
    if vision.out_size != spec.hidden_size or len(vision.deepstack_layers) > spec.n_layers:
        raise ValueError(
            f"the vision tower gives {vision.out_size} numbers, the text model takes "
            f"{spec.hidden_size}"
        )
    return attrs.evolve(spec, rope_axes=axes, vision=vision)


def _without_axes(text: Config) -> tuple[Config, tuple[int, ...]]:
    """The text config with a plain rope, and which of time, height and width each pair of numbers
    turns with.

    Pairs take turns (time, height, width, time, ...) as long as an axis has some left of its
    section; the rest is time's."""
    name = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    rope = dict(required(text, name))
    sections = rope.pop("mrope_section", None)
    if not rope.pop("mrope_interleaved", False) or sections is None or len(sections) != 3:
        raise ValueError(
            f"{name} has mrope_section {sections}; Qwen3-VL takes three, with mrope_interleaved"
        )
    pairs = range(required(text, "head_dim") // 2)
    axes = tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in pairs)
    return text | {name: rope}, axes


def _vision(config: Config, image_token: int) -> VisionSpec:
    activation = config.get("hidden_act", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise ValueError(
            f"the vision tower's hidden_act {activation!r} is not known; known is gelu_pytorch_tanh"
        )
    grid_side = int(size(config, "num_position_embeddings") ** 0.5)
    patch = size(config, "patch_size")
    return VisionSpec(
        n_layers=size(config, "depth"),
        hidden_size=size(config, "hidden_size"),
        n_heads=size(config, "num_heads"),
        intermediate_size=size(config, "intermediate_size"),
        patch_shape=(
            config.get("in_channels", 3),
            size(config, "temporal_patch_size"),
            patch,
            patch,
        ),
        merge_size=size(config, "spatial_merge_size"),
        grid_side=grid_side,
        out_size=size(config, "out_hidden_size"),
        deepstack_layers=tuple(required(config, "deepstack_visual_indexes")),
        rope_theta=_theta(config),
        image_token=image_token,
    )


def _theta(config: Config) -> float:
    """Only transformers 5 writes the tower's rope."""
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") != "axial":
        raise ValueError(
            f"rope type {rope['rope_type']!r} of the vision tower is not known; known is axial"
        )
    return float(rope.get("rope_theta", 10000.0))
