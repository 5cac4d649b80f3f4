"""ModelSpec: everything in which one decoder-only model differs from another, as data.

The law: the decoder reads differences here and nowhere else; a new one is a new field with a
neutral default. Read next: decoder.py, which computes what a spec says; params.py, the tensors that
it needs.
"""

from __future__ import annotations

from typing import Literal

import attrs

from nva.models.rope import RopeSpec
from nva.state.checks import flag, number, whole

Activation = Literal["silu", "gelu_tanh"]


@attrs.frozen(kw_only=True)
class ExpertSpec:
    """The experts that take the place of the MLP in some layers (Shazeer et al. 2017)."""

    n_experts: int = attrs.field(validator=whole(1))
    n_active: int = attrs.field(validator=whole(1))  # experts that compute a token
    intermediate_size: int = attrs.field(validator=whole(1))  # of each
    shared_size: int = attrs.field(default=0, validator=whole(0))  # of one for all tokens; 0: none
    normalize: bool = attrs.field(validator=flag)  # the weights of a token's experts sum to 1

    def __attrs_post_init__(self) -> None:
        if self.n_active > self.n_experts:
            raise ValueError(f"{self.n_active} experts a token, but there are {self.n_experts}")


@attrs.frozen(kw_only=True)
class VisionSpec:
    """The tower that makes features of images, of the width of text embeddings, for the first layer
    and some beyond."""

    n_layers: int = attrs.field(validator=whole(1))
    hidden_size: int = attrs.field(validator=whole(1))
    n_heads: int = attrs.field(validator=whole(1))
    intermediate_size: int = attrs.field(validator=whole(1))
    patch_shape: tuple[int, int, int, int]  # channels, frames, rows and columns of a patch
    merge_size: int = attrs.field(validator=whole(1))  # rows, and columns, of patches of a feature
    grid_side: int = attrs.field(validator=whole(1))  # of the square grid of position embeddings
    out_size: int = attrs.field(validator=whole(1))
    deepstack_layers: tuple[int, ...]  # what they give is added in the decoder's first layers
    rope_theta: float = attrs.field(validator=number(1))
    image_token: int = attrs.field(validator=whole(0))  # stands for a feature in a prompt

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % (4 * self.n_heads):
            raise ValueError(
                f"{self.n_heads} heads of a vision tower {self.hidden_size} wide are not multiples "
                "of 4"
            )


@attrs.frozen(kw_only=True)
class ModelSpec:
    """Sizes and switches of a model. `windows`, `rope_ids` and `experts` have one entry per
    layer."""

    vocab_size: int = attrs.field(validator=whole(1))
    hidden_size: int = attrs.field(validator=whole(1))
    n_layers: int = attrs.field(validator=whole(1))
    n_heads: int = attrs.field(validator=whole(1))
    n_kv_heads: int = attrs.field(validator=whole(1))
    head_dim: int = attrs.field(validator=whole(1))
    intermediate_size: int = attrs.field(validator=whole(1))
    max_position: int = attrs.field(validator=whole(1))  # positions that the config declares
    norm_eps: float = attrs.field(validator=number(0))
    activation: Activation = "silu"  # of the MLP's gate

    # Rope. The axes are those of M-RoPE: 0 time, 1 height, 2 width; () where tokens have a single
    # position.
    ropes: tuple[RopeSpec, ...]  # the distinct ones
    rope_ids: tuple[int, ...]  # which of them a layer has
    rope_axes: tuple[int, ...] = ()  # the axis that each rotary pair turns by

    # A token sees that many positions, its own included; None sees all.
    windows: tuple[int | None, ...]
    experts: tuple[ExpertSpec | None, ...] = attrs.Factory(
        lambda spec: (None,) * spec.n_layers, takes_self=True
    )
    vision: VisionSpec | None = None

    # Biases and norms.
    qkv_bias: bool = attrs.field(default=False, validator=flag)
    o_bias: bool = attrs.field(default=False, validator=flag)
    mlp_bias: bool = attrs.field(default=False, validator=flag)
    qk_norm: bool = attrs.field(default=False, validator=flag)  # of each head, before the rope
    out_norms: bool = attrs.field(default=False, validator=flag)  # of what attention and MLP add
    unit_offset: bool = attrs.field(default=False, validator=flag)  # norms multiply by 1 + weight
    tied_head: bool = attrs.field(default=False, validator=flag)  # the output head is the embedding

    # Scales.
    attn_scale: float = attrs.field(
        default=attrs.Factory(lambda spec: spec.head_dim**-0.5, takes_self=True)
    )
    embed_scale: float = 1.0  # rounded to the model's dtype
    residual_scale: float = 1.0  # of what each attention and each MLP adds
    logit_scale: float = 1.0

    def __attrs_post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"{self.n_heads} query heads can't share {self.n_kv_heads} key-value heads evenly"
            )
        lengths = len(self.rope_ids), len(self.windows), len(self.experts)
        if set(lengths) != {self.n_layers}:
            raise ValueError(f"{self.n_layers} layers, but {lengths} ropes, windows and experts")
        if any(self.experts) and self.activation != "silu":
            raise ValueError(
                f"experts have silu gates, but this model's activation is {self.activation}"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(
                f"sliding windows are {set(self.windows)}; give at least 1, or None to see "
                "everything"
            )

    @property
    def reach(self) -> int:
        """The longest max_model_len the ropes are made for; at least max_position."""
        return max(rope.reach for rope in self.ropes)
