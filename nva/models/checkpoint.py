"""Checkpoint folders: config.json, generation_config.json, and weights in safetensors files.

The law: loading is a bijection between the tensors a model needs and the tensors the files hold; a
tensor missing, left over or of the wrong shape is an error that names it. Read next: params.py for
the table of what is needed, files.py for what is there, registry.py for how a config becomes a
spec.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from nva.kernels import Kernels
from nva.kernels.reference import KERNELS as REFERENCE
from nva.models.files import Files, open_tensors, read_json, read_tensor, some_names, unmap
from nva.models.params import (
    Param,
    Params,
    Weights,
    all_tables,
    build_params,
    layer_table,
)
from nva.models.registry import read_model
from nva.models.spec import ModelSpec
from nva.state.checks import is_whole

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@attrs.frozen(kw_only=True)
class Checkpoint:
    """A folder whose configs were read and understood, and whose weights were not touched yet."""

    folder: Path
    config: dict[str, Any]  # config.json
    generation_config: dict[str, Any]  # generation_config.json, {} if there is none
    spec: ModelSpec
    weights: Weights

    @property
    def eos_ids(self) -> frozenset[int]:
        """End-of-sequence ids: the union of all that the configs name. Raises ValueError for what
        is no id."""
        found = eos_ids(self.config, "config.json")
        text = self.config.get("text_config")
        if isinstance(text, Mapping):
            found |= eos_ids(text, "config.json, text_config")
        return found | eos_ids(self.generation_config, "generation_config.json")


def eos_ids(settings: Mapping[str, Any], file: str) -> frozenset[int]:
    """The end-of-sequence ids that a config names: an id, a list of ids, or none at all, for which
    null and -1 are written. Raises ValueError for anything else."""
    given = settings.get("eos_token_id")
    found = given if isinstance(given, list) else [-1 if given is None else given]
    ids = [int(id_) if isinstance(id_, float) and id_.is_integer() else id_ for id_ in found]
    if not all(is_whole(id_) and id_ >= -1 for id_ in ids):
        raise ValueError(
            f"{file} has eos_token_id = {given!r:.80}; it must be a token id, a list of token ids, "
            "or null"
        )
    return frozenset(id_ for id_ in ids if id_ >= 0)


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read a folder's configs. Raises ValueError if it is no model, or none that nva knows."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no model: it has no config.json")
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    spec, weights = read_model(config)
    checkpoint = Checkpoint(
        folder=folder,
        config=config,
        generation_config=read_json(generation) if generation.is_file() else {},
        spec=spec,
        weights=weights,
    )
    _ = checkpoint.eos_ids  # a wrong one is found now, not once the weights are read
    return checkpoint


def load_checkpoint(
    folder: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    kernels: Kernels = REFERENCE,
) -> tuple[Checkpoint, Params]:
    """open_checkpoint and load_params in one."""
    checkpoint = open_checkpoint(folder)
    return checkpoint, load_params(checkpoint, dtype, device, kernels)


def load_params(
    checkpoint: Checkpoint,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    kernels: Kernels = REFERENCE,
) -> Params:
    """The parameters, in one dtype on one device, and in the form that the kernels want.

    Files are memory-mapped and read tensor by tensor, so the weights are never held twice. Raises
    ValueError for a file that is missing or damaged, and for tensors that are missing, left over or
    of the wrong shape."""
    dtype = resolve_dtype(dtype, checkpoint)
    files = open_tensors(checkpoint.folder)
    _check_tensors(checkpoint, files)

    def read(name: str, layer: int | None, param: Param) -> Tensor:
        rows = torch.empty(param.shape, dtype=dtype, device=device)
        start = 0
        for tensor_name in _parts(checkpoint, files, name, layer, param):
            stored = tensor = read_tensor(files, tensor_name)
            if param.kind == "experts" and stored.dim() == 3:  # one tensor for all
                is_turned = _are_turned(checkpoint, files, layer)
                tensor = (stored.mT if is_turned else stored).flatten(0, 1)
            rows[start : start + len(tensor)] = tensor
            start += len(tensor)
            unmap(stored)
        return rows

    return build_params(checkpoint.spec, read, kernels)


def resolve_dtype(dtype: str | torch.dtype, checkpoint: Checkpoint) -> torch.dtype:
    """A dtype by its name; "auto" is the one that the weights were saved in: what config.json says,
    else what most numbers in the files are. Raises ValueError for one that nva can't compute in."""
    where = "dtype"
    if dtype == "auto":
        where, dtype = named_dtype(checkpoint.config) or stored_dtype(checkpoint.folder)
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(
            f"{where} is {name:.80}; choose one of {', '.join(DTYPES)}, or auto for the one that "
            "the weights were saved in"
        )
    return DTYPES[name]


def named_dtype(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """(where it stands, name) of the dtype that a config.json says the weights are in, None if it
    says none.

    transformers has written it as torch_dtype and as dtype; for a model of several parts at the
    top, in the parts' own configs, or both."""
    for part in ("", "text_config", "vision_config"):
        settings = config.get(part) if part else config
        for name in ("dtype", "torch_dtype"):
            found = settings.get(name) if isinstance(settings, Mapping) else None
            if found is not None and found != "auto":
                return f"{part}.{name}".strip(".") + " in config.json", str(found)
    return None


_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def stored_dtype(folder: Path) -> tuple[str, str]:
    """(where it stands, name) of the dtype that most numbers of the files have."""
    counts: Counter[str] = Counter()
    for name, file in open_tensors(folder).items():
        tensor = file.get_slice(name)
        counts[tensor.get_dtype()] += math.prod(tensor.get_shape())
    most = counts.most_common(1)[0][0] if counts else "missing"
    return "the weights' dtype", _STORED.get(most, most)


_QUANTIZED = (
    ".qweight",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".SCB",
    ".absmax",
    "_blocks",
)
"""How names end that only quantized checkpoints have: GPTQ and AWQ, compressed-tensors, fp8,
bitsandbytes, MXFP4."""


def _check_tensors(checkpoint: Checkpoint, files: Files) -> None:
    """Raise ValueError unless the files hold exactly the tensors of the model, and harmless ones
    that are known."""
    expected = _expected_shapes(checkpoint, files)
    harmless = _harmless_shapes(checkpoint.spec, checkpoint.weights)
    left_over = files.keys() - expected.keys() - harmless.keys()
    if quantized := [name for name in left_over if name.endswith(_QUANTIZED)]:
        raise ValueError(
            f"the checkpoint is quantized ({some_names(quantized)}), which nva can't read; take an "
            "unquantized one"
        )
    for problem, names in (
        ("lacks", expected.keys() - files.keys()),
        ("has tensors the model doesn't use:", left_over),
    ):
        if names:
            raise ValueError(f"{checkpoint.folder} {problem} {some_names(names)}")
    for name, shape in {**harmless, **expected}.items():
        if name in files:
            _check_tensor(name, shape, files[name].get_slice(name))
    if checkpoint.spec.tied_head:
        _check_tied(checkpoint.weights, files)


def _check_tensor(name: str, shape: tuple[int, ...], stored: Any) -> None:
    if tuple(stored.get_shape()) != shape:
        raise ValueError(
            f"{name} has the shape {tuple(stored.get_shape())}; config.json asks for {shape}"
        )
    if stored.get_dtype() not in ("F64", "F32", "F16", "BF16"):
        raise ValueError(
            f"{name} is stored as {stored.get_dtype()}; nva reads F64, F32, F16 and BF16, not "
            "quantized weights"
        )


def _check_tied(weights: Weights, files: Files) -> None:
    """A head that is stored although config.json ties it must be the embedding, or the config is
    wrong. NaN equals NaN here: rows that no token uses may hold anything."""
    (embed,), (head,) = weights.names["embed"], weights.names["head"]
    if head in files and not _is_same(read_tensor(files, head), read_tensor(files, embed)):
        raise ValueError(f"{head} differs from {embed}, but config.json sets tie_word_embeddings")


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors [V, H] hold the same numbers. They are compared a piece at a time, since
    they are among the largest."""
    for x, y in zip(a.split(4096), b.split(4096), strict=True):
        if not ((x == y) | (x.isnan() & y.isnan())).all():
            return False
    return True


def _expected_shapes(checkpoint: Checkpoint, files: Files) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, for all that the model needs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, table in all_tables(checkpoint.spec):
        for name, param in table.items():
            shapes |= _parts(checkpoint, files, name, layer, param)
    return shapes


def _parts(
    checkpoint: Checkpoint, files: Files, name: str, layer: int | None, param: Param
) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, for the tensors whose rows are a parameter, in order."""
    weights = checkpoint.weights
    if param.kind == "experts":
        fused = weights.fused.get(name, "").format(layer=layer)
        if fused in files:
            n_rows, n_columns = param.shape[0] // param.n_experts, param.shape[1]
            is_turned = _are_turned(checkpoint, files, layer)
            matrix = (n_columns, n_rows) if is_turned else (n_rows, n_columns)
            return {fused: (param.n_experts, *matrix)}
    names = [
        part.format(layer=layer, expert=expert)
        for expert in range(param.n_experts)
        for part in weights.names[name]
    ]
    return dict(zip(names, param.parts, strict=True))


def _are_turned(checkpoint: Checkpoint, files: Files, layer: int | None) -> bool:
    """Whether a layer's tensors of all experts are stored [E, K, N], not [E, N, K]. A square matrix
    doesn't tell; gate and up together, or down, is none."""
    if not checkpoint.weights.is_transposed or layer is None:
        return False
    table = layer_table(checkpoint.spec, layer)
    for name, tensor in checkpoint.weights.fused.items():
        tensor = tensor.format(layer=layer)
        n_rows, n_columns = table[name].shape[0] // table[name].n_experts, table[name].shape[1]
        if n_rows != n_columns and tensor in files:
            stored = files[tensor].get_slice(tensor).get_shape()
            return list(stored[1:]) == [n_columns, n_rows]
    return False


def _harmless_shapes(spec: ModelSpec, weights: Weights) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, for what may be there without being needed: rope buffers, and a tied
    head."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in weights.rope_buffers:
        for layer, rope_id in enumerate(spec.rope_ids):
            shapes[name.format(layer=layer)] = (spec.ropes[rope_id].dim // 2,)
    if spec.tied_head:
        shapes |= dict.fromkeys(weights.names["head"], (spec.vocab_size, spec.hidden_size))
    return shapes
