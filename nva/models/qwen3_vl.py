"""Qwen3-VL: the text model of Qwen3 or Qwen3-MoE, a vision tower beside it, positions in time,
height and width.

Read next: vision.py, the tower; state/media.py, the positions.
"""

from __future__ import annotations

import math
from typing import Any

import attrs

from nva.models.hf_config import Config
from nva.models.llama import LLAMA_WEIGHTS
from nva.models.params import Weights
from nva.models.read_spec import MAX_LAYERS, read_experts, read_spec
from nva.models.registry import EMULATED, LOGITS, register
from nva.models.spec import ModelSpec, VisionSpec
from nva.state.checks import is_number, is_whole

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
    text = config.part("text_config")
    experts = read_experts(text, always_normalized=True)
    return _with_tower(config, text, experts=experts), QWEN3_VL_WEIGHTS


def _with_tower(config: Config, text: Config, **differences: Any) -> ModelSpec:
    """The text model's spec, the tower in it."""
    config.pass_over("video_token_id", "vision_start_token_id", "vision_end_token_id")
    text |= {"architectures": config.get("architectures")}
    text, sections = _without_sections(text)
    bias = text.flag("attention_bias")
    spec = read_spec(
        text,
        qk_norm=True,
        head_dim=text.size("head_dim"),
        qkv_bias=bias,
        o_bias=bias,
        tied_head=config.flag("tie_word_embeddings", text.flag("tie_word_embeddings")),
        **differences,
    )
    image_token = config.size("image_token_id", at_least=0)
    if image_token >= spec.vocab_size:
        config.refuse("image_token_id", f"below text_config.vocab_size = {spec.vocab_size}")
    vision = _read_tower(config.part("vision_config"), image_token)
    if vision.out_size != spec.hidden_size:
        raise ValueError(
            f"config.json has vision_config.out_hidden_size = {vision.out_size} and "
            f"text_config.hidden_size = {spec.hidden_size}: the vision tower gives "
            f"{vision.out_size} numbers, the text model takes {spec.hidden_size}"
        )
    if len(vision.deepstack_layers) > spec.n_layers:
        raise ValueError(
            f"config.json has {len(vision.deepstack_layers)} vision_config."
            f"deepstack_visual_indexes, more than text_config.num_hidden_layers = {spec.n_layers}"
        )
    axes = _rope_axes(sections, spec.ropes[0].dim // 2)
    return attrs.evolve(spec, rope_axes=axes, vision=vision)


def _without_sections(text: Config) -> tuple[Config, tuple[int, ...]]:
    """The text config with a plain rope, and how many pairs each of time, height and width has."""
    name = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    rope = text.group(name)
    sections = rope.pop("mrope_section", None)
    is_interleaved = rope.pop("mrope_interleaved", False)
    is_three = isinstance(sections, (list, tuple)) and len(sections) == 3
    if is_interleaved is not True or not is_three or not all(map(is_whole, sections)):
        raise ValueError(
            f"config.json: in {text.path}{name}, mrope_section is {sections!r:.80} and "
            f"mrope_interleaved {is_interleaved!r:.80}; Qwen3-VL takes three whole numbers, with "
            "mrope_interleaved"
        )
    return text | {name: rope}, tuple(sections)


def _rope_axes(sections: tuple[int, ...], n_pairs: int) -> tuple[int, ...]:
    """The M-RoPE axis of each rotary pair: 0 time, 1 height, 2 width.

    The axes take turns (time, height, width, time, ...) as long as each has some left of its
    section; the rest is time's."""
    pairs = range(n_pairs)
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in pairs)


def _read_tower(config: Config, image_token: int) -> VisionSpec:
    config.choice("hidden_act", "gelu_pytorch_tanh", ["gelu_pytorch_tanh"])
    n_layers = config.size("depth", at_most=MAX_LAYERS)
    hidden_size, n_heads = config.size("hidden_size"), config.size("num_heads")
    if hidden_size % (4 * n_heads):
        config.refuse(
            "hidden_size",
            f"a multiple of 4 for each head, num_heads being {n_heads}",
        )
    n_positions = config.size("num_position_embeddings")
    grid_side = math.isqrt(n_positions)
    if grid_side**2 != n_positions:
        config.refuse("num_position_embeddings", "a square number, the points of a square grid")
    patch = config.size("patch_size")
    return VisionSpec(
        n_layers=n_layers,
        hidden_size=hidden_size,
        n_heads=n_heads,
        intermediate_size=config.size("intermediate_size"),
        patch_shape=(_read_channels(config), config.size("temporal_patch_size"), patch, patch),
        merge_size=config.size("spatial_merge_size"),
        grid_side=grid_side,
        out_size=config.size("out_hidden_size"),
        deepstack_layers=_read_deepstack(config, n_layers),
        rope_theta=_read_theta(config),
        image_token=image_token,
    )


def _read_channels(config: Config) -> int:
    """Images are read as red, green and blue."""
    if config.size("in_channels", 3) != 3:
        config.refuse("in_channels", "3")
    return 3


def _read_deepstack(config: Config, n_layers: int) -> tuple[int, ...]:
    layers = config.sizes("deepstack_visual_indexes", at_most=n_layers - 1)
    if len(set(layers)) < len(layers):
        config.refuse("deepstack_visual_indexes", "a list of different layers")
    return layers


def _read_theta(config: Config) -> float:
    """Only transformers 5 writes the tower's rope."""
    rope = config.group("rope_parameters")
    kind, theta = rope.get("rope_type", "axial"), rope.get("rope_theta", 10000.0)
    if kind != "axial":
        raise ValueError(
            f"config.json: in {config.path}rope_parameters, rope type {kind!r:.80} of the vision "
            "tower is not known; known is axial"
        )
    if not is_number(theta) or not 1 <= theta < math.inf:
        raise ValueError(
            f"config.json: in {config.path}rope_parameters, rope_theta is {theta!r:.80}; it must "
            "be a finite number of at least 1"
        )
    return float(theta)
