"""The table of parameters, held against the specs of all families: what it says of tensor parallelism
is what a smaller model has, and the ranks' parts add up."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

from nva.kernels import reference
from nva.models import ModelSpec, random_params
from nva.models.params import Param, all_tables, layer_table, outer_table
from nva.models.registry import FAMILIES, read_model
from tests.models.hub import CONFIGS, shrunk
from tests.npu.models import CONFIGS as OTHERS
from tests.npu.models import tiny_spec

SPECS = {name: read_model(shrunk(config))[0] for name, config in CONFIGS.items()}
SPECS |= {f"npu, {name}": tiny_spec(name) for name in OTHERS}
KINDS = {"linear", "experts", "norm", "layer_norm", "table", "bias"}


def ranks_part(spec: ModelSpec, n: int) -> ModelSpec:
    """The spec that each of n ranks has: a part of the heads, of the inner sizes and of the rows of
    the vocabulary."""
    experts = tuple(
        each
        and attrs.evolve(
            each,
            intermediate_size=each.intermediate_size // n,
            shared_size=each.shared_size // n,
        )
        for each in spec.experts
    )
    return attrs.evolve(
        spec,
        vocab_size=spec.vocab_size // n,
        n_heads=spec.n_heads // n,
        n_kv_heads=spec.n_kv_heads // n,
        intermediate_size=spec.intermediate_size // n,
        experts=experts,
    )


def split_shapes(param: Param, n: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of a rank's parts, as the table says."""
    if param.split == "rows":
        return tuple((rows // n, *rest) for rows, *rest in param.parts)
    if param.split == "columns":
        return tuple((rows, columns // n) for rows, columns in param.parts)
    return param.parts


def test_every_family_is_among_the_specs() -> None:
    assert {config["architectures"][0] for config in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", SPECS)
def test_ranks_have_what_the_table_says(name: str) -> None:
    spec = attrs.evolve(SPECS[name], vocab_size=96, n_kv_heads=2)
    for layer in (None, *range(spec.n_layers)):
        whole, part = (
            outer_table(each) if layer is None else layer_table(each, layer)
            for each in (spec, ranks_part(spec, 2))
        )
        assert whole.keys() == part.keys()
        for key, param in whole.items():
            assert split_shapes(param, 2) == part[key].parts, key
            assert (param.kind, param.split) == (part[key].kind, part[key].split)


@pytest.mark.parametrize("name", SPECS)
def test_kinds_and_shapes_belong_together(name: str) -> None:
    for _, table in all_tables(SPECS[name]):
        for key, param in table.items():
            assert param.kind in KINDS
            is_vector = param.kind in ("norm", "layer_norm", "bias")
            assert (len(param.shape) == 1) == is_vector, key
            assert (param.n_experts > 1) == (param.kind == "experts"), key
            assert len({part[1:] for part in param.parts}) == 1, key
            if param.split == "columns":
                assert param.kind in ("linear", "experts")


def test_what_the_kernels_pack() -> None:
    """Linears and experts by pack_linear, RMS norms by pack_norm, nothing else at all."""
    packed: list[Tensor] = []
    normed: list[Tensor] = []
    spec = SPECS["Qwen 3 VL 30B"]

    class Kernels:
        def pack_linear(self, weight: Tensor) -> Tensor:
            packed.append(weight)
            return weight

        def pack_norm(self, weight: Tensor, unit_offset: bool) -> Tensor:
            normed.append(weight)
            return weight

    random_params(spec, torch.float32, torch.Generator(), Kernels())  # type: ignore[arg-type]
    kinds = [param.kind for _, table in all_tables(spec) for param in table.values()]
    assert len(packed) == kinds.count("linear") + kinds.count("experts") + spec.tied_head
    assert len(normed) == kinds.count("norm")
    assert {weight.dim() for weight in packed} == {2, 3}
    assert sum(weight.dim() == 3 for weight in packed) == kinds.count("experts")


def test_the_ranks_results_add_up() -> None:
    """An MLP computed by two ranks, each with its rows of gate and up and its columns of down."""
    spec = SPECS["Qwen 3 8B"]
    table = layer_table(spec, 0)
    layer = random_params(spec, torch.float64, torch.Generator().manual_seed(0))["layers"][0]
    x = torch.randn(5, spec.hidden_size, dtype=torch.float64)

    def mlp(gate_up: Tensor, down: Tensor) -> Tensor:
        return reference.linear(reference.silu_mul(reference.linear(x, gate_up)), down)

    def part(key: str, rank: int) -> Tensor:
        param, weight = table[key], layer[key]
        if param.split == "columns":
            return weight.chunk(2, dim=1)[rank]
        parts = weight.split([rows for rows, *_ in param.parts])
        return torch.cat([each.chunk(2)[rank] for each in parts])

    whole = mlp(layer["gate_up"], layer["down"])
    ranks = [mlp(part("gate_up", rank), part("down", rank)) for rank in range(2)]
    torch.testing.assert_close(sum(ranks), whole)
