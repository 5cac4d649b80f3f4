"""The model files that peers read: a checkpoint as the hub lays it out, or a GGUF file, made once
and kept.

The law: every peer gets the weights of one checkpoint, with a cast of their type at most. Random
weights stand in for a model known by its shape. Prompts are token ids, so a vocabulary only has to
have the right size. Read next: ratio.py."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from nva.bench import SHAPES
from nva.host.cache_folder import cache_folder
from nva.loading.find import find_model

ARCHITECTURES = {"llama": "LLAMA", "qwen3": "QWEN3"}  # of GGUF, by model_type


def model_file(model: str | None, kind: str) -> Path:
    """A model as a peer reads it; kind: "checkpoint" for its folder, "bf16" or "f16" for a GGUF
    file of that type."""
    folder = _random_checkpoint(model) if model in SHAPES else find_model(model)
    if kind == "checkpoint":
        return folder
    path = _cache() / f"{folder.name}-{kind}.gguf"
    if not path.exists():
        write_gguf(folder, path.with_suffix(".part"), kind)
        path.with_suffix(".part").rename(path)
    return path


def _cache() -> Path:
    folder = cache_folder() / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _random_checkpoint(name: str) -> Path:
    """A checkpoint of this shape, its bfloat16 weights drawn at random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = _cache() / name
    if not folder.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**SHAPES[name])
        part = folder.with_suffix(".part")
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(part)
        part.rename(folder)
    return folder


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write a checkpoint as a GGUF file; raises ValueError for a model whose layout isn't known
    here."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in ARCHITECTURES:
        raise ValueError(
            f"{folder} is a {config['model_type']}; GGUF files are written here for "
            f"{', '.join(ARCHITECTURES)} only: "
            "convert it with llama.cpp's own script and name the file with --peer-model"
        )
    writer = gguf.GGUFWriter(path, config["model_type"])
    _write_sizes(writer, config)
    _write_vocabulary(writer, config["vocab_size"])
    chosen = gguf.GGMLQuantizationType[kind.upper()]
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    for name, weight in _tensors(folder, config):
        stored = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else chosen
        writer.add_tensor(name, gguf.quantize(weight.float().numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: Any, config: dict[str, Any]) -> None:
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _write_vocabulary(writer: Any, size: int) -> None:
    """Every byte, then words that mean nothing, up to the size: enough for a reader that insists on
    a vocabulary."""
    letters = [
        chr(i)
        for i in itertools.chain(range(33, 127), range(161, 173), range(174, 256), range(256, 324))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, "ab", *(f"<{i}>" for i in range(len(letters) + 1, size))])
    writer.add_token_types([*[1] * (size - 1), 3])  # the last is a control token
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def _tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights by GGUF's names. A Llama's queries and keys have their rope's halves interleaved
    there."""
    import gguf

    kind = getattr(gguf.MODEL_ARCH, ARCHITECTURES[config["model_type"]])
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    n_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for path in sorted(folder.glob("*.safetensors")):
        for name, weight in load_file(path).items():
            part = name.split(".")[-2]
            if part in n_heads and config["model_type"] == "llama":
                halves = weight.unflatten(0, (n_heads[part], 2, -1))
                weight = halves.transpose(1, 2).reshape(weight.shape)
            yield names.get_name(name, try_suffixes=(".weight",)), weight
