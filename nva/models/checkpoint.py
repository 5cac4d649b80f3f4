"""Checkpoint folders: config.json, generation_config.json, and weights in safetensors files.

The law: loading is a bijection between the tensors a model needs and the tensors the files hold; a
tensor missing, left over or of the wrong shape is an error that names it. Nothing is unpickled, no
code of the checkpoint runs. Read next: params.py for the pytree that is filled, registry.py for how
a config becomes a spec."""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nva.kernels import Kernels, reference
from nva.models.params import EXPERTS, Params, Shapes, Weights, all_shapes, build_params
from nva.models.registry import read_model
from nva.models.spec import ModelSpec

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
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
        """End-of-sequence ids: the union of both configs'."""
        found = (config.get("eos_token_id") for config in (self.config, self.generation_config))
        return frozenset(
            id_
            for ids in found
            if ids is not None
            for id_ in ([ids] if isinstance(ids, int) else ids)
        )


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read a folder's configs. Raises ValueError if it is no model, or none that nva knows."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no model: it has no config.json")
    config = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    spec, weights = read_model(config)
    return Checkpoint(
        folder=folder,
        config=config,
        generation_config=_read_json(generation) if generation.is_file() else {},
        spec=spec,
        weights=weights,
    )


def load_checkpoint(
    folder: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    kernels: Kernels = reference,
) -> tuple[Checkpoint, Params]:
    """open_checkpoint and load_params in one."""
    checkpoint = open_checkpoint(folder)
    return checkpoint, load_params(checkpoint, dtype, device, kernels)


def load_params(
    checkpoint: Checkpoint,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    kernels: Kernels = reference,
) -> Params:
    """The parameters, in one dtype on one device, and in the form that the kernels want.

    Files are memory-mapped and read tensor by tensor, so the weights are never held twice. Raises
    ValueError for a file that is missing or damaged, and for tensors that are missing, left over or
    of the wrong shape."""
    dtype = resolve_dtype(dtype, checkpoint.config)
    files = _open_tensors(checkpoint.folder)
    _check_tensors(checkpoint, files)

    def read(name: str, layer: int | None, shapes: Shapes) -> Tensor:
        param = torch.empty(
            sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype, device=device
        )
        start = 0
        for tensor_name in _parts(checkpoint, files, name, layer, shapes):
            stored = tensor = _read(files, tensor_name)
            if tensor.dim() == 3:  # one tensor of all experts
                n = len(param) // len(tensor)
                is_turned = checkpoint.weights.is_transposed and tensor.shape[2] == n
                tensor = (tensor.mT if is_turned else tensor).flatten(0, 1)
            param[start : start + len(tensor)] = tensor
            start += len(tensor)
            _unmap(stored)
        return param

    return build_params(checkpoint.spec, read, kernels)


def resolve_dtype(dtype: str | torch.dtype, config: Mapping[str, Any]) -> torch.dtype:
    """A dtype by its name; "auto" is the one that config.json names. Raises ValueError for any
    other."""
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "missing in config.json"
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(
            f"dtype is {name}; choose one of {', '.join(DTYPES)}, or auto if config.json names one"
        )
    return DTYPES[name]


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

Files = dict[str, Any]
"""Tensor name -> the open file that holds it."""


def _open_tensors(folder: Path) -> Files:
    """Every tensor of the folder. The index decides, if there is one: other files, left by an
    earlier download or made for another program, are not looked at. Without an index,
    model.safetensors is all there is."""
    if not (folder / INDEX).is_file():
        return dict.fromkeys(*_open_file(_single_file(folder)))
    placed = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise ValueError(
            f"{folder / INDEX} has no weight_map from tensors to files; download it again"
        )
    files: Files = {}
    for file_name in sorted(set(placed.values())):
        names, file = _open_file(_shard(folder, file_name))
        if wrong := set(names) ^ {name for name, at in placed.items() if at == file_name}:
            raise ValueError(
                f"{file_name} and {INDEX} disagree on {_some(wrong)}; download both again"
            )
        files |= dict.fromkeys(names, file)
    return files


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    pickles = sorted(
        path.name for suffix in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{suffix}")
    )
    if pickles:
        raise ValueError(
            f"{folder} has weights in {_some(pickles)}, which may hold code and is never loaded; "
            f"convert it to {SINGLE}"
        )
    raise ValueError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def _shard(folder: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ValueError(f"{INDEX} names the file {name!r}; files must lie in the folder itself")
    if not (folder / name).is_file():
        raise ValueError(f"{folder} lacks {name}, which {INDEX} names; download it")
    return folder / name


def _open_file(path: Path) -> tuple[list[str], Any]:
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is truncated or no safetensors file ({error}); download it again"
        ) from error
    return list(file.keys()), file


def _read(files: Files, name: str) -> Tensor:
    return files[name].get_tensor(name)


def _unmap(tensor: Tensor) -> None:
    """Let go of the memory pages of a tensor that was read and is not needed again. A mapped file's
    would stay with the process until the file is closed, and weigh as much as the weights
    themselves."""
    start, end = (
        -(-tensor.data_ptr() // mmap.PAGESIZE),
        (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE,
    )
    if sys.platform == "linux" and start < end:
        place, size = (
            ctypes.c_void_p(start * mmap.PAGESIZE),
            ctypes.c_size_t((end - start) * mmap.PAGESIZE),
        )
        ctypes.CDLL(None).madvise(place, size, mmap.MADV_DONTNEED)


def _check_tensors(checkpoint: Checkpoint, files: Files) -> None:
    """Raise ValueError unless the files hold exactly the tensors of the model, and harmless ones
    that are known."""
    expected = _expected_shapes(checkpoint, files)
    harmless = _harmless_shapes(checkpoint.spec, checkpoint.weights)
    left_over = files.keys() - expected.keys() - harmless.keys()
    if quantized := [name for name in left_over if name.endswith(_QUANTIZED)]:
        raise ValueError(
            f"the checkpoint is quantized ({_some(quantized)}), which nva can't read; take an "
            "unquantized one"
        )
    for problem, names in (
        ("lacks", expected.keys() - files.keys()),
        ("has tensors the model doesn't use:", left_over),
    ):
        if names:
            raise ValueError(f"{checkpoint.folder} {problem} {_some(names)}")
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
    wrong."""
    (embed,), (head,) = weights.names["embed"], weights.names["head"]
    if head in files and not torch.equal(_read(files, head), _read(files, embed)):
        raise ValueError(f"{head} differs from {embed}, but config.json sets tie_word_embeddings")


def _expected_shapes(checkpoint: Checkpoint, files: Files) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, for all that the model needs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, params in all_shapes(checkpoint.spec):
        for name, parts in params.items():
            shapes |= _parts(checkpoint, files, name, layer, parts)
    return shapes


def _parts(
    checkpoint: Checkpoint, files: Files, name: str, layer: int | None, shapes: Shapes
) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, for the tensors whose rows are a parameter, in order."""
    spec, weights = checkpoint.spec, checkpoint.weights
    experts = spec.experts[layer] if name in EXPERTS and layer is not None else None
    if experts is None:
        names = [part.format(layer=layer) for part in weights.names[name]]
        return dict(zip(names, shapes, strict=True))
    fused = weights.fused.get(name, "").format(layer=layer)
    if fused in files:
        shape = (
            experts.n_experts,
            sum(rows for rows, _ in shapes) // experts.n_experts,
            shapes[0][1],
        )
        turned = (shape[0], shape[2], shape[1])
        is_turned = (
            weights.is_transposed and tuple(files[fused].get_slice(fused).get_shape()) == turned
        )
        return {fused: turned if is_turned else shape}
    numbers = range(experts.n_experts)
    names = [
        part.format(layer=layer, expert=number)
        for number in numbers
        for part in weights.names[name]
    ]
    return dict(zip(names, shapes, strict=True))


def _harmless_shapes(spec: ModelSpec, weights: Weights) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, for what may be there without being needed: rope buffers, and a tied
    head."""
    shapes = {
        name.format(layer=layer): (rope.dim // 2,)
        for name in weights.rope_buffers
        for layer, rope in enumerate(spec.ropes[i] for i in spec.rope_ids)
    }
    return shapes | {
        head: (spec.vocab_size, spec.hidden_size)
        for head in weights.names["head"]
        if spec.tied_head
    }


def _some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; download it again")
    return content
