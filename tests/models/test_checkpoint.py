"""Loading is a bijection: whatever is missing, left over, misshapen or damaged is an error that
names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from nva.kernels.reference import KERNELS as REFERENCE
from nva.models import load_checkpoint, open_checkpoint, random_params
from nva.models.checkpoint import resolve_dtype
from nva.models.files import INDEX, SINGLE
from nva.models.params import layer_table
from tests.checkpoints import CASES, build, edit_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build(CASES["qwen3"], tmp_path)  # tied and sharded
    return tmp_path


@pytest.fixture
def single(tmp_path: Path) -> Path:
    build(CASES["llama"], tmp_path)  # untied, one file
    return tmp_path


def edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refuses(folder: Path, message: str, dtype: str = "auto") -> None:
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder, dtype)


def test_a_missing_tensor_is_named(single: Path) -> None:
    edit_weights(single / SINGLE, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refuses(single, r"lacks model\.layers\.1\.mlp\.up_proj\.weight")


def test_a_tensor_left_over_is_named(single: Path) -> None:
    edit_weights(
        single / SINGLE,
        lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}),
    )
    refuses(single, r"has tensors the model doesn't use: model\.layers\.2\.mlp\.up_proj\.weight")


def test_a_bias_the_config_does_not_ask_for_is_left_over(single: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_weights(single / SINGLE, lambda tensors: tensors.update({name: torch.zeros(48)}))
    refuses(single, r"doesn't use: model\.layers\.0\.self_attn\.q_proj\.bias")


def test_many_names_are_cut_short(single: Path) -> None:
    edit_weights(
        single / SINGLE,
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "proj" in name],
    )
    refuses(single, "and 9 more")


def test_every_expert_is_there(tmp_path: Path) -> None:
    build(CASES["qwen3_moe-layers"], tmp_path)
    name = "model.layers.3.mlp.experts.2.up_proj.weight"
    edit_weights(tmp_path / SINGLE, lambda tensors: tensors.pop(name))
    refuses(tmp_path, f"lacks {name}")


def test_experts_in_one_tensor_are_not_there_again_one_by_one(tmp_path: Path) -> None:
    build(CASES["qwen2_moe-fused"], tmp_path)
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    edit_weights(tmp_path / SINGLE, lambda tensors: tensors.update({name: torch.ones(48, 20)}))
    refuses(tmp_path, f"doesn't use: {name}")
    edit_weights(
        tmp_path / SINGLE, lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj")
    )
    refuses(tmp_path, r"lacks model\.layers\.1\.mlp\.experts\.1\.down_proj\.weight")


def test_a_layer_without_experts_has_no_router(tmp_path: Path) -> None:
    build(CASES["qwen3_moe-layers"], tmp_path)
    name = "model.layers.0.mlp.gate.weight"
    edit_weights(tmp_path / SINGLE, lambda tensors: tensors.update({name: torch.ones(6, 48)}))
    refuses(tmp_path, f"doesn't use: {name}")


def test_a_misshapen_tensor_is_named(single: Path) -> None:
    edit_weights(
        single / SINGLE, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)})
    )
    refuses(single, r"model\.norm\.weight has the shape \(47,\); config\.json asks for \(48,\)")


def test_a_quantized_tensor_is_named(single: Path) -> None:
    edit_weights(
        single / SINGLE,
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(48).to(torch.int8)}),
    )
    refuses(single, r"model\.norm\.weight is stored as I8; nva reads F64, F32, F16 and BF16")


@pytest.mark.parametrize("suffix", ["qweight", "weight_packed", "weight_scale_inv"])
def test_a_quantized_checkpoint_whose_config_does_not_say_so(single: Path, suffix: str) -> None:
    name = f"model.layers.0.mlp.up_proj.{suffix}"
    edit_weights(single / SINGLE, lambda tensors: tensors.update({name: torch.ones(9)}))
    refuses(single, rf"the checkpoint is quantized \({name}\), which nva can't read")


@pytest.mark.parametrize("n_bytes", [0, 4, 100, 50_000])
def test_a_truncated_file_is_named(single: Path, n_bytes: int) -> None:
    whole = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(whole[:n_bytes])
    refuses(single, r"model\.safetensors is truncated or no safetensors file .*; download it again")


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    refuses(folder, f"lacks {shard.name}, which {INDEX} names")


def test_a_shard_that_disagrees_with_the_index_is_named(folder: Path) -> None:
    def move(index: dict[str, Any]) -> dict[str, Any]:
        files = sorted(set(index["weight_map"].values()))
        index["weight_map"]["model.norm.weight"] = next(
            f for f in files if f != index["weight_map"]["model.norm.weight"]
        )
        return index

    edit_json(folder / INDEX, move)
    refuses(folder, r"disagree on model\.norm\.weight; download both again")


@pytest.mark.parametrize(
    "content", [{}, {"weight_map": []}, {"weight_map": {"model.norm.weight": 3}}]
)
def test_an_index_without_a_map_is_refused(folder: Path, content: dict[str, Any]) -> None:
    edit_json(folder / INDEX, lambda _: content)
    refuses(folder, "has no weight_map from tensors to files")


def test_an_index_must_not_lead_out_of_the_folder(folder: Path) -> None:
    edit_json(
        folder / INDEX,
        lambda index: {
            "weight_map": dict.fromkeys(index["weight_map"], "../elsewhere.safetensors")
        },
    )
    refuses(
        folder, r"names the file '\.\./elsewhere\.safetensors'; files must lie in the folder itself"
    )


def test_files_that_the_index_does_not_name_are_not_looked_at(folder: Path) -> None:
    _, expected = load_checkpoint(folder)
    for name in (SINGLE, "consolidated.safetensors", "pytorch_model.bin"):
        (folder / name).write_bytes(b"rubbish")
    _, params = load_checkpoint(folder)
    assert torch.equal(params["embed"], expected["embed"])


def test_pickles_are_never_loaded(single: Path) -> None:
    (single / SINGLE).rename(single / "pytorch_model.bin")
    refuses(
        single, r"weights in pytorch_model\.bin.* never loaded; convert it to model\.safetensors"
    )


def test_a_folder_without_weights_is_refused(single: Path) -> None:
    (single / SINGLE).unlink()
    refuses(single, "has no weights: neither model.safetensors nor")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    refuses(tmp_path, "is no model: it has no config.json")
    refuses(tmp_path / "nowhere", "is no model: it has no config.json")


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"architectures": ['])
def test_a_damaged_config_is_refused(single: Path, text: str) -> None:
    (single / "config.json").write_text(text)
    refuses(single, r"config\.json (is not valid JSON|holds no JSON object).*; download it again")


def test_rope_buffers_of_old_checkpoints_are_harmless_in_their_shape_only(single: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(single / SINGLE, lambda tensors: tensors.update({name: torch.ones(4)}))
    load_checkpoint(single)
    edit_weights(single / SINGLE, lambda tensors: tensors.update({name: torch.ones(5)}))
    refuses(single, r"inv_freq has the shape \(5,\); config\.json asks for \(4,\)")


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    build(CASES["qwen2"], tmp_path)
    embed = "model.embed_tokens.weight"
    edit_weights(
        tmp_path / SINGLE,
        lambda tensors: tensors.update({"lm_head.weight": tensors[embed].clone()}),
    )
    _, params = load_checkpoint(tmp_path)
    assert params["head"] is params["embed"]
    edit_weights(tmp_path / SINGLE, lambda tensors: tensors["lm_head.weight"].add_(1))
    refuses(
        tmp_path,
        r"lm_head\.weight differs from model\.embed_tokens\.weight, but .* sets tie_word_embeddings",
    )


def test_a_tied_head_may_hold_nan_where_the_embedding_does(tmp_path: Path) -> None:
    build(CASES["qwen2"], tmp_path)

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        embed = tensors["model.embed_tokens.weight"]
        embed[96] = torch.nan
        tensors["lm_head.weight"] = embed.clone()

    edit_weights(tmp_path / SINGLE, add_head)
    _, params = load_checkpoint(tmp_path)
    assert params["head"] is params["embed"]
    edit_weights(tmp_path / SINGLE, lambda tensors: tensors["lm_head.weight"][95].fill_(torch.nan))
    refuses(tmp_path, "differs from")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "auto", "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"text_config": {"torch_dtype": "torch.float16"}}, "float16"),
        ({"vision_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "float16", "text_config": {"dtype": "bfloat16"}}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}, "vision_config": {"dtype": "float32"}}, "bfloat16"),
        ({"dtype": "auto", "text_config": {"dtype": None}}, "float32"),  # as it is stored
        ({}, "float32"),
        ({"text_config": 3}, "float32"),
    ],
)
def test_dtypes_are_found_wherever_configs_have_them(
    single: Path, config: dict[str, Any], expected: str
) -> None:
    plain = open_checkpoint(single)
    rest = {name: value for name, value in plain.config.items() if name != "dtype"}
    checkpoint = attrs.evolve(plain, config={**rest, **config})
    assert resolve_dtype("auto", checkpoint) == getattr(torch, expected)
    assert resolve_dtype("float16", checkpoint) == torch.float16


@pytest.mark.parametrize("name", ["float64", "float8_e4m3fn", 3, ["bfloat16"], {"": "float32"}])
def test_dtypes_that_nva_can_not_compute_in_are_named(single: Path, name: Any) -> None:
    checkpoint = attrs.evolve(open_checkpoint(single), config={"text_config": {"dtype": name}})
    with pytest.raises(
        ValueError, match=r"text_config\.dtype in config\.json is .*; choose one of"
    ):
        resolve_dtype("auto", checkpoint)


def test_weights_stored_in_several_types_have_that_of_most_numbers(single: Path) -> None:
    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if "norm" not in name:
                tensors[name] = tensor.bfloat16()

    edit_weights(single / SINGLE, narrow)
    edit_json(single / "config.json", lambda config: {**config, "dtype": "auto"})
    _, params = load_checkpoint(single)
    assert params["norm"].dtype == params["embed"].dtype == torch.bfloat16


def test_dtypes(single: Path) -> None:
    _, params = load_checkpoint(single)
    assert params["norm"].dtype == torch.float32  # config.json's
    _, narrow = load_checkpoint(single, "bfloat16")
    assert torch.equal(narrow["layers"][1]["qkv"], params["layers"][1]["qkv"].bfloat16())
    _, half = load_checkpoint(single, torch.float16)
    assert half["embed"].dtype == torch.float16
    refuses(
        single, "dtype is int8; choose one of float32, bfloat16, float16, or auto", dtype="int8"
    )
    edit_json(
        single / "config.json", lambda config: {k: v for k, v in config.items() if k != "dtype"}
    )
    _, params = load_checkpoint(single)
    assert params["norm"].dtype == torch.float32  # what the files hold


def test_linear_weights_are_packed_once_each_and_nothing_else(
    single: Path,
) -> None:
    packed: list[torch.Tensor] = []

    def pack(weight: torch.Tensor) -> torch.Tensor:
        packed.append(weight)
        return weight

    kernels = attrs.evolve(REFERENCE, pack_linear=pack)
    checkpoint, params = load_checkpoint(single, kernels=kernels)
    assert len(packed) == 4 * checkpoint.spec.n_layers + 1
    expected = [
        value
        for i, layer in enumerate(params["layers"])
        for name, value in layer.items()
        if layer_table(checkpoint.spec, i)[name].kind == "linear"
    ]
    assert {id(tensor) for tensor in packed} == {
        id(tensor) for tensor in [*expected, params["head"]]
    }


def test_norms_are_packed_once_each_and_told_their_offset(
    tmp_path: Path,
) -> None:
    adding = attrs.evolve(
        REFERENCE, pack_norm=lambda weight, unit_offset: weight.float() + unit_offset
    )
    for name, offset in (("qwen3", 0), ("gemma3", 1)):
        build(CASES[name], tmp_path / name)
        _, packed = load_checkpoint(tmp_path / name, kernels=adding)
        _, plain = load_checkpoint(tmp_path / name)
        for one, other in zip([packed, *packed["layers"]], [plain, *plain["layers"]], strict=True):
            for key in (key for key in one if key != "layers"):
                torch.testing.assert_close(
                    one[key], other[key] + offset * key.endswith("norm"), check_dtype=False
                )


def test_end_of_sequence_ids_are_the_union_of_both_configs(single: Path) -> None:
    (single / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 9], "temperature": 0.6})
    )
    edit_json(single / "config.json", lambda config: {**config, "eos_token_id": 2})
    checkpoint = open_checkpoint(single)
    assert checkpoint.eos_ids == {2, 7, 9}
    assert checkpoint.generation_config["temperature"] == 0.6
    (single / "generation_config.json").unlink()
    edit_json(single / "config.json", lambda config: {**config, "eos_token_id": None})
    assert open_checkpoint(single).eos_ids == frozenset()


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3-linear", "qwen3_moe-layers", "qwen2_moe"]
)
def test_random_params_have_the_form_of_loaded_ones(name: str, tmp_path: Path) -> None:
    build(CASES[name], tmp_path)
    checkpoint, loaded = load_checkpoint(tmp_path)
    drawn = random_params(checkpoint.spec, torch.bfloat16, torch.Generator().manual_seed(0))

    def form(params: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda tensor: tensor.shape, params)

    assert form(drawn) == form(loaded)
    assert drawn["layers"][0]["qkv"].float().std().item() == pytest.approx(0.02, rel=0.1)
    assert (drawn["norm"] == 1).all()
