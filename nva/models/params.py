"""The parameters of a model: a plain nested dict of tensors, the same for every family.

    {"embed": [V, H], "layers": [{"input_norm": [H], "qkv": ..., ...}, ...], "norm": [H], "head": [V, H]}

The law: a parameter is the rows of one or more checkpoint tensors, stacked: q, k, v in "qkv"; gate, up in "gate_up".
Read next: checkpoint.py, which fills it from files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from nva.models.spec import ModelSpec

Params = dict[str, Any]
Shapes = tuple[tuple[int, ...], ...]
"""The shapes of the tensors whose rows, stacked, are a parameter."""


@attrs.frozen(kw_only=True)
class Weights:
    """What a family's checkpoints call the tensors: `{layer}` in a name stands for the layer's number."""

    names: Mapping[str, tuple[str, ...]]  # parameter -> the tensors whose rows it is
    rope_buffers: tuple[str, ...] = ()  # tensors of rope frequencies that old checkpoints hold and nobody reads


LINEARS = frozenset({"qkv", "o", "gate_up", "down", "head"})
"""Parameters that kernels.linear multiplies with, and kernels.pack_linear therefore prepares."""


def outer_shapes(spec: ModelSpec) -> dict[str, Shapes]:
    """Parameters outside the layers. A tied head is no parameter of its own."""
    embedding = ((spec.vocab_size, spec.hidden_size),)
    head = {} if spec.tied_head else {"head": embedding}
    return {"embed": embedding, "norm": ((spec.hidden_size,),), **head}


def layer_shapes(spec: ModelSpec) -> dict[str, Shapes]:
    """Parameters of each layer."""
    hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q, kv = spec.n_heads * head_dim, spec.n_kv_heads * head_dim
    shapes: dict[str, Shapes] = {
        "input_norm": ((hidden,),),
        "qkv": ((q, hidden), (kv, hidden), (kv, hidden)),
        "o": ((hidden, q),),
        "post_norm": ((hidden,),),
        "gate_up": ((inner, hidden), (inner, hidden)),
        "down": ((hidden, inner),),
    }
    if spec.qk_norm:
        shapes |= {"q_norm": ((head_dim,),), "k_norm": ((head_dim,),)}
    if spec.qkv_bias:
        shapes |= {"qkv_bias": ((q,), (kv,), (kv,))}
    if spec.o_bias:
        shapes |= {"o_bias": ((hidden,),)}
    if spec.mlp_bias:
        shapes |= {"gate_up_bias": ((inner,), (inner,)), "down_bias": ((hidden,),)}
    return shapes


Make = Callable[[str, "int | None", Shapes], Tensor]
Pack = Callable[[Tensor], Any]


def unpacked(weight: Tensor) -> Tensor:
    """The pack that leaves weights as they are, for the reference kernels."""
    return weight


def build_params(spec: ModelSpec, make: Make, pack: Pack) -> Params:
    """All parameters, each given by `make(name, layer, shapes)` (layer None outside the layers), linear ones packed."""

    def build(shapes: dict[str, Shapes], layer: int | None) -> Params:
        made = ((name, make(name, layer, parts)) for name, parts in shapes.items())
        return {name: pack(tensor) if name in LINEARS else tensor for name, tensor in made}

    params = build(outer_shapes(spec), None)
    params["layers"] = [build(layer_shapes(spec), layer) for layer in range(spec.n_layers)]
    return params if "head" in params else {**params, "head": pack(params["embed"])}


def random_params(
    spec: ModelSpec,
    dtype: torch.dtype,
    generator: torch.Generator,
    pack: Pack = unpacked,
    std: float = 0.02,
) -> Params:
    """Parameters drawn from a normal distribution (norms are 1), on the generator's device: for benchmarks."""

    def make(name: str, layer: int | None, shapes: Shapes) -> Tensor:
        shape = (sum(part[0] for part in shapes), *shapes[0][1:])
        empty = torch.empty(shape, dtype=dtype, device=generator.device)
        return empty.fill_(1) if name.endswith("norm") else empty.normal_(0, std, generator=generator)

    return build_params(spec, make, pack)
