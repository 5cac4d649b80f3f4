"""The parameters of a model: a plain nested dict of tensors, the same for every family.

    {"embed": [V, H], "layers": [{"input_norm": [H], "qkv": ..., ...}, ...],
     "norm": [H], "head": [V, H]}

The law: a parameter is the rows of one or more checkpoint tensors, stacked: q, k, v in "qkv"; gate,
up in "gate_up". Read next: checkpoint.py, which fills it from files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from nva.kernels import Kernels, reference
from nva.models.spec import ExpertSpec, ModelSpec, VisionSpec

Params = dict[str, Any]
Shapes = tuple[tuple[int, ...], ...]
"""The shapes of the tensors whose rows, stacked, are a parameter."""


@attrs.frozen(kw_only=True)
class Weights:
    """What a family's checkpoints call the tensors: `{layer}` in a name stands for the layer's
    number, and names with `{expert}` for as many as there are experts, those of the first expert
    first."""

    names: Mapping[str, tuple[str, ...]]  # parameter -> the tensors whose rows it is
    fused: Mapping[str, str] = attrs.field(
        factory=dict
    )  # parameter -> the one tensor that may hold it instead
    is_transposed: bool = (
        False  # what is fused is stored [E, K, N] on the hub, [E, N, K] by transformers 5
    )
    rope_buffers: tuple[
        str, ...
    ] = ()  # tensors of rope frequencies that old checkpoints hold and nobody reads


EXPERTS = frozenset({"experts_gate_up", "experts_down"})
"""Parameters [E, N, K] that hold the weights of all experts of a layer, the rows of one after those
of another."""

LINEARS = (
    EXPERTS
    | {
        "qkv",
        "o",
        "gate_up",
        "down",
        "head",
        "router",
        "shared_gate_up",
        "shared_down",
        "shared_gate",
    }
    | {
        "patch",
        "vision_qkv",
        "vision_o",
        "fc1",
        "fc2",
        "merger_fc1",
        "merger_fc2",
        "deepstack_fc1",
        "deepstack_fc2",
    }
)
"""Parameters that kernels.linear or kernels.moe multiply with, and kernels.pack_linear therefore
prepares."""


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


def vision_shapes(spec: VisionSpec) -> dict[str, Shapes]:
    """Parameters of a vision tower outside its layers."""
    grid, hidden = spec.grid_side**2, spec.hidden_size
    return {
        "patch": ((hidden, *spec.patch_shape),),
        "patch_bias": ((hidden,),),
        "grid": ((grid, hidden),),
        **_merger_shapes(spec, "merger", hidden),
    }


def vision_layer_shapes(spec: VisionSpec) -> dict[str, Shapes]:
    """Parameters of each layer of a vision tower."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    linears = {"vision_qkv": (3 * hidden, hidden), "vision_o": (hidden, hidden)}
    linears |= {"fc1": (inner, hidden), "fc2": (hidden, inner)}
    norms = ("vision_input_norm", "vision_post_norm")
    shapes: dict[str, Shapes] = {name: (shape,) for name, shape in linears.items()}
    shapes |= {f"{name}_bias": (shape[:1],) for name, shape in linears.items()}
    return shapes | {name: ((hidden,),) for norm in norms for name in (norm, f"{norm}_bias")}


def deepstack_shapes(spec: VisionSpec) -> dict[str, Shapes]:
    """Parameters that make features of the output of one of deepstack_layers."""
    return _merger_shapes(spec, "deepstack", spec.hidden_size * spec.merge_size**2)


def _merger_shapes(spec: VisionSpec, name: str, norm_size: int) -> dict[str, Shapes]:
    merged = spec.hidden_size * spec.merge_size**2
    return {
        f"{name}_norm": ((norm_size,),),
        f"{name}_norm_bias": ((norm_size,),),
        f"{name}_fc1": ((merged, merged),),
        f"{name}_fc1_bias": ((merged,),),
        f"{name}_fc2": ((spec.out_size, merged),),
        f"{name}_fc2_bias": ((spec.out_size,),),
    }


def all_shapes(spec: ModelSpec) -> Iterator[tuple[int | None, dict[str, Shapes]]]:
    """Every group of parameters with its layer, None outside the layers."""
    yield None, outer_shapes(spec)
    yield from ((layer, layer_shapes(spec, layer)) for layer in range(spec.n_layers))
    if spec.vision:
        yield None, vision_shapes(spec.vision)
        yield from (
            (layer, vision_layer_shapes(spec.vision)) for layer in range(spec.vision.n_layers)
        )
        yield from (
            (i, deepstack_shapes(spec.vision)) for i in range(len(spec.vision.deepstack_layers))
        )


Make = Callable[[str, "int | None", Shapes], Tensor]


def build_params(spec: ModelSpec, make: Make, kernels: Kernels) -> Params:
    """All parameters, each given by `make(name, layer, shapes)` (layer None outside the layers) as
    its rows, those of experts set apart, in the form that the kernels want."""

    def finish(name: str, rows: Tensor, layer: int | None) -> Any:
        experts = spec.experts[layer] if name in EXPERTS and layer is not None else None
        tensor = rows if experts is None else rows.unflatten(0, (experts.n_experts, -1))
        if name.endswith("norm"):
            return kernels.pack_norm(tensor, spec.unit_offset)
        tensor = (
            tensor.flatten(1) if name == "patch" else tensor
        )  # stored as a convolution, but patches don't overlap
        return kernels.pack_linear(tensor) if name in LINEARS else tensor

    def build(shapes: dict[str, Shapes], layer: int | None) -> Params:
        return {
            name: finish(name, make(name, layer, parts), layer) for name, parts in shapes.items()
        }

    params = build(outer_shapes(spec), None)
    params["layers"] = [build(layer_shapes(spec, layer), layer) for layer in range(spec.n_layers)]
    if vision := spec.vision:
        params["vision"] = build(vision_shapes(vision), None)
        layers, deepstack = vision_layer_shapes(vision), deepstack_shapes(vision)
        params["vision"]["layers"] = [build(layers, layer) for layer in range(vision.n_layers)]
        params["vision"]["deepstack"] = [
            build(deepstack, i) for i in range(len(vision.deepstack_layers))
        ]
    return params if "head" in params else {**params, "head": kernels.pack_linear(params["embed"])}


def random_params(
    spec: ModelSpec,
    dtype: torch.dtype,
    generator: torch.Generator,
    kernels: Kernels = reference,
    std: float = 0.02,
) -> Params:
    """Parameters drawn from a normal distribution (norms are 1), on the generator's device: for
    benchmarks."""

    def make(name: str, layer: int | None, shapes: Shapes) -> Tensor:
        shape = (sum(part[0] for part in shapes), *shapes[0][1:])
        empty = torch.empty(shape, dtype=dtype, device=generator.device)
        return (
            empty.fill_(1) if name.endswith("norm") else empty.normal_(0, std, generator=generator)
        )

    return build_params(spec, make, kernels)
