"""The parameters of a model: a plain nested dict of tensors, the same for every family.

    {"embed": [V, H], "layers": [{"input_norm": [H], "qkv": ..., ...}, ...],
     "norm": [H], "head": [V, H]}

One table says everything about them: which a spec has, their shapes, what each is for, and how
tensor parallelism splits it. Whoever treats parameters differently asks it, and no one their names.

The law: a parameter is the rows of one or more checkpoint tensors, stacked: q, k, v in "qkv"; gate,
up in "gate_up". Read next: checkpoint.py, which fills them from files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from nva.kernels import Kernels
from nva.kernels.reference import KERNELS as REFERENCE
from nva.models.spec import ExpertSpec, ModelSpec, VisionSpec

Params = dict[str, Any]

Kind = Literal["linear", "experts", "norm", "layer_norm", "table", "bias"]
"""What a parameter is for.

- linear: [N, K], multiplied by kernels.linear, and prepared by kernels.pack_linear;
- experts: the linears of all experts of a layer, [E, N, K], for kernels.moe;
- norm: the weight of an RMS norm, prepared by kernels.pack_norm;
- layer_norm: the weight of a LayerNorm;
- table: rows that are looked up;
- bias: [N], added to what a linear or a LayerNorm gives."""

Split = Literal["rows", "columns"]


@attrs.frozen
class Param:
    """A parameter: the shapes of the tensors whose rows it is, and what it is for.

    `split` is how N ranks share it (Shoeybi et al. 2019, Megatron-LM): rank i has the i-th part of
    every tensor's rows, or of its columns; None if each has it whole. The ranks' results are summed
    after a linear that is split by columns. Of experts, each expert is split."""

    parts: tuple[tuple[int, ...], ...]
    kind: Kind
    split: Split | None = None
    n_experts: int = 1  # whose rows follow each other

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stacked rows."""
        return (sum(part[0] for part in self.parts), *self.parts[0][1:])


Table = dict[str, Param]


@attrs.frozen(kw_only=True)
class Weights:
    """What a family's checkpoints call the tensors: `{layer}` in a name stands for the layer's
    number, and names with `{expert}` for as many as there are experts, those of the first expert
    first."""

    # parameter -> the tensors whose rows it is
    names: Mapping[str, tuple[str, ...]]
    # parameter of experts -> the one tensor that may hold it instead
    fused: Mapping[str, str] = attrs.field(factory=dict)
    # fused tensors are stored [E, K, N] on the hub, [E, N, K] by transformers 5
    is_transposed: bool = False
    # tensors of rope frequencies that old checkpoints hold and nobody reads
    rope_buffers: tuple[str, ...] = ()


def outer_table(spec: ModelSpec) -> Table:
    """The parameters outside the layers. A tied head is none of its own."""
    vocabulary = ((spec.vocab_size, spec.hidden_size),)
    table = {
        "embed": Param(vocabulary, "table", "rows"),
        "norm": Param(((spec.hidden_size,),), "norm"),
    }
    if not spec.tied_head:
        table["head"] = Param(vocabulary, "linear", "rows")
    return table


def layer_table(spec: ModelSpec, layer: int) -> Table:
    """The parameters of a layer."""
    hidden = spec.hidden_size
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    whole, head = ((hidden,),), ((spec.head_dim,),)
    table = {
        "input_norm": Param(whole, "norm"),
        "qkv": Param(((q, hidden), (kv, hidden), (kv, hidden)), "linear", "rows"),
        "o": Param(((hidden, q),), "linear", "columns"),
        "post_norm": Param(whole, "norm"),
    }
    experts = spec.experts[layer]
    table |= _mlp_table(spec) if experts is None else _expert_table(experts, hidden)
    if spec.qk_norm:
        table |= {"q_norm": Param(head, "norm"), "k_norm": Param(head, "norm")}
    if spec.out_norms:
        table |= {"attention_out_norm": Param(whole, "norm"), "mlp_out_norm": Param(whole, "norm")}
    if spec.qkv_bias:
        table["qkv_bias"] = Param(((q,), (kv,), (kv,)), "bias", "rows")
    if spec.o_bias:
        table["o_bias"] = Param(whole, "bias")
    return table


def _mlp_table(spec: ModelSpec) -> Table:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    table = {
        "gate_up": Param(((inner, hidden),) * 2, "linear", "rows"),
        "down": Param(((hidden, inner),), "linear", "columns"),
    }
    if spec.mlp_bias:
        table["gate_up_bias"] = Param(((inner,), (inner,)), "bias", "rows")
        table["down_bias"] = Param(((hidden,),), "bias")
    return table


def _expert_table(spec: ExpertSpec, hidden: int) -> Table:
    n, inner, shared = spec.n_experts, spec.intermediate_size, spec.shared_size
    table = {
        "router": Param(((n, hidden),), "linear"),
        "experts_gate_up": Param(((inner, hidden),) * 2 * n, "experts", "rows", n),
        "experts_down": Param(((hidden, inner),) * n, "experts", "columns", n),
    }
    if shared:
        table["shared_gate_up"] = Param(((shared, hidden),) * 2, "linear", "rows")
        table["shared_down"] = Param(((hidden, shared),), "linear", "columns")
        table["shared_gate"] = Param(((1, hidden),), "linear")
    return table


def vision_table(spec: VisionSpec) -> Table:
    """The parameters of a vision tower outside its layers. Every rank computes the whole tower."""
    hidden = spec.hidden_size
    return {
        "patch": Param(((hidden, *spec.patch_shape),), "linear"),  # stored as a convolution
        "patch_bias": Param(((hidden,),), "bias"),
        "grid": Param(((spec.grid_side**2, hidden),), "table"),
        **_merger_table(spec, "merger", hidden),
    }


def vision_layer_table(spec: VisionSpec) -> Table:
    """The parameters of each layer of a vision tower."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return {
        **_layer_norm("vision_input_norm", hidden),
        **_with_bias("vision_qkv", 3 * hidden, hidden),
        **_with_bias("vision_o", hidden, hidden),
        **_layer_norm("vision_post_norm", hidden),
        **_with_bias("fc1", inner, hidden),
        **_with_bias("fc2", hidden, inner),
    }


def deepstack_table(spec: VisionSpec) -> Table:
    """The parameters that make features of the output of one of deepstack_layers."""
    return _merger_table(spec, "deepstack", spec.hidden_size * spec.merge_size**2)


def _merger_table(spec: VisionSpec, name: str, norm_size: int) -> Table:
    merged = spec.hidden_size * spec.merge_size**2
    return {
        **_layer_norm(f"{name}_norm", norm_size),
        **_with_bias(f"{name}_fc1", merged, merged),
        **_with_bias(f"{name}_fc2", spec.out_size, merged),
    }


def _with_bias(name: str, n_rows: int, n_columns: int) -> Table:
    weight, bias = ((n_rows, n_columns),), ((n_rows,),)
    return {name: Param(weight, "linear"), f"{name}_bias": Param(bias, "bias")}


def _layer_norm(name: str, size: int) -> Table:
    vector = ((size,),)
    return {name: Param(vector, "layer_norm"), f"{name}_bias": Param(vector, "bias")}


def all_tables(spec: ModelSpec) -> Iterator[tuple[int | None, Table]]:
    """Every group of parameters with its layer, None outside the layers."""
    yield None, outer_table(spec)
    for layer in range(spec.n_layers):
        yield layer, layer_table(spec, layer)
    if spec.vision:
        yield None, vision_table(spec.vision)
        for layer in range(spec.vision.n_layers):
            yield layer, vision_layer_table(spec.vision)
        for i in range(len(spec.vision.deepstack_layers)):
            yield i, deepstack_table(spec.vision)


Make = Callable[[str, "int | None", Param], Tensor]
"""Gives the stacked rows of a parameter: its name, its layer (None outside the layers), its line of
the table."""


def build_params(spec: ModelSpec, make: Make, kernels: Kernels) -> Params:
    """All parameters, each made by `make`, in the form that the kernels want."""

    def build(table: Table, layer: int | None) -> Params:
        return {
            name: _packed(param, make(name, layer, param), spec.unit_offset, kernels)
            for name, param in table.items()
        }

    params = build(outer_table(spec), None)
    params["layers"] = [build(layer_table(spec, i), i) for i in range(spec.n_layers)]
    if spec.tied_head:
        params["head"] = kernels.pack_linear(params["embed"])
    if tower := spec.vision:
        n_deepstack = len(tower.deepstack_layers)
        params["vision"] = {
            **build(vision_table(tower), None),
            "layers": [build(vision_layer_table(tower), i) for i in range(tower.n_layers)],
            "deepstack": [build(deepstack_table(tower), i) for i in range(n_deepstack)],
        }
    return params


def _packed(param: Param, rows: Tensor, unit_offset: bool, kernels: Kernels) -> Any:
    """The stacked rows of a parameter in the form that the kernels want."""
    match param.kind:
        case "linear":
            return kernels.pack_linear(rows.flatten(1))
        case "experts":
            return kernels.pack_linear(rows.unflatten(0, (param.n_experts, -1)))
        case "norm":
            return kernels.pack_norm(rows, unit_offset)
        case _:
            return rows


def random_params(
    spec: ModelSpec,
    dtype: torch.dtype,
    generator: torch.Generator,
    kernels: Kernels = REFERENCE,
    std: float = 0.02,
) -> Params:
    """Parameters drawn from a normal distribution (weights of norms are 1), on the generator's
    device: for benchmarks."""

    def make(name: str, layer: int | None, param: Param) -> Tensor:
        empty = torch.empty(param.shape, dtype=dtype, device=generator.device)
        if param.kind in ("norm", "layer_norm"):
            return empty.fill_(1)
        return empty.normal_(0, std, generator=generator)

    return build_params(spec, make, kernels)
