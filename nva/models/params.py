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

from nva.models.spec import ExpertSpec, ModelSpec

Params = dict[str, Any]
Shapes = tuple[tuple[int, ...], ...]
"""The shapes of the tensors whose rows, stacked, are a parameter."""


@attrs.frozen(kw_only=True)
class Weights:
    """What a family's checkpoints call the tensors: `{layer}` in a name stands for the layer's number, and names with
    `{expert}` for as many as there are experts, those of the first expert first."""

    names: Mapping[str, tuple[str, ...]]  # parameter -> the tensors whose rows it is
    fused: Mapping[str, str] = attrs.field(factory=dict)  # parameter -> the one tensor that may hold it instead
    rope_buffers: tuple[str, ...] = ()  # tensors of rope frequencies that old checkpoints hold and nobody reads


EXPERTS = frozenset({"experts_gate_up", "experts_down"})
"""Parameters [E, N, K] that hold the weights of all experts of a layer, the rows of one after those of another."""

LINEARS = EXPERTS | {"qkv", "o", "gate_up", "down", "head", "router", "shared_gate_up", "shared_down", "shared_gate"}
"""Parameters that kernels.linear or kernels.moe multiply with, and kernels.pack_linear therefore prepares."""


def outer_shapes(spec: ModelSpec) -> dict[str, Shapes]:
    """Parameters outside the layers. A tied head is no parameter of its own."""
    embedding = ((spec.vocab_size, spec.hidden_size),)
    head = {} if spec.tied_head else {"head": embedding}
    return {"embed": embedding, "norm": ((spec.hidden_size,),), **head}


def layer_shapes(spec: ModelSpec, layer: int) -> dict[str, Shapes]:
    """Parameters of a layer."""
    hidden, head_dim = spec.hidden_size, spec.head_dim
    q, kv = spec.n_heads * head_dim, spec.n_kv_heads * head_dim
    shapes: dict[str, Shapes] = {
        "input_norm": ((hidden,),),
        "qkv": ((q, hidden), (kv, hidden), (kv, hidden)),
        "o": ((hidden, q),),
        "post_norm": ((hidden,),),
    }
    experts = spec.experts[layer]
    shapes |= _mlp_shapes(spec) if experts is None else _expert_shapes(experts, hidden)
    if spec.qk_norm:
        shapes |= {"q_norm": ((head_dim,),), "k_norm": ((head_dim,),)}
    if spec.out_norms:
        shapes |= {"attention_out_norm": ((hidden,),), "mlp_out_norm": ((hidden,),)}
    if spec.qkv_bias:
        shapes |= {"qkv_bias": ((q,), (kv,), (kv,))}
    if spec.o_bias:
        shapes |= {"o_bias": ((hidden,),)}
    return shapes


def _mlp_shapes(spec: ModelSpec) -> dict[str, Shapes]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, Shapes] = {"gate_up": ((inner, hidden),) * 2, "down": ((hidden, inner),)}
    if spec.mlp_bias:
        shapes |= {"gate_up_bias": ((inner,), (inner,)), "down_bias": ((hidden,),)}
    return shapes


def _expert_shapes(spec: ExpertSpec, hidden: int) -> dict[str, Shapes]:
    inner, shared = spec.intermediate_size, spec.shared_size
    shapes: dict[str, Shapes] = {
        "router": ((spec.n_experts, hidden),),
        "experts_gate_up": ((inner, hidden),) * 2 * spec.n_experts,
        "experts_down": ((hidden, inner),) * spec.n_experts,
    }
    if shared:
        shapes |= {"shared_gate_up": ((shared, hidden),) * 2, "shared_down": ((hidden, shared),)}
        shapes |= {"shared_gate": ((1, hidden),)}
    return shapes


Make = Callable[[str, "int | None", Shapes], Tensor]
Pack = Callable[[Tensor], Any]


def unpacked(weight: Tensor) -> Tensor:
    """The pack that leaves weights as they are, for the reference kernels."""
    return weight


def build_params(spec: ModelSpec, make: Make, pack: Pack) -> Params:
    """All parameters, each given by `make(name, layer, shapes)` (layer None outside the layers) as its rows, those of
    experts set apart, linear ones packed."""

    def finish(name: str, rows: Tensor, layer: int | None) -> Any:
        experts = spec.experts[layer] if name in EXPERTS and layer is not None else None
        tensor = rows if experts is None else rows.unflatten(0, (experts.n_experts, -1))
        return pack(tensor) if name in LINEARS else tensor

    def build(shapes: dict[str, Shapes], layer: int | None) -> Params:
        return {name: finish(name, make(name, layer, parts), layer) for name, parts in shapes.items()}

    params = build(outer_shapes(spec), None)
    params["layers"] = [build(layer_shapes(spec, layer), layer) for layer in range(spec.n_layers)]
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
